"""Where the kernels run: on a GPU if there is one, else in Triton's interpreter."""

import os
import sys
from collections.abc import Iterator
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
def _poisoned() -> Iterator[None]:
    """Whatever is allocated and not yet written is NaN: outputs, partials, caches, scratch."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
