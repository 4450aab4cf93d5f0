"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

# The tests share helpers that are no package: pytest imports test files by path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def device(kernels_run: None) -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return torch.device("cpu" if interpreted else "cuda")


@pytest.fixture(autouse=True)
def _poisoned(poisoned: None) -> None:
    """Outputs, partials, caches and scratch are NaN at first."""
