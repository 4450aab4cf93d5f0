"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return torch.device("cpu" if interpreted else "cuda")
