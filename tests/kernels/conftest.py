"""Triton runs in its interpreter where there is no GPU; TRITON_INTERPRET overrides either way."""

import os

import pytest
import torch

# Before anything imports Triton: @triton.jit decides when it decorates.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    return torch.device("cpu" if interpreted else "cuda")
