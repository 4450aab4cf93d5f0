"""For all tests: Triton interprets where there is no GPU, torch keeps to one thread; ``--long``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidia0").exists():
    # Before anything imports triton, which decides when it decorates its own helpers.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether what draws its examples is to run many times as long."""
    return bool(request.config.getoption("--long", default=False))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="state machines: 100 times the examples; the OpenAPI document: 5,405 cases",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of kernels on CPU tensors need the interpreter; on a GPU others run the real ones."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return
    skip = pytest.mark.skip(reason="needs Triton's interpreter: TRITON_INTERPRET=1")
    for item in items:
        if "interpreted" in item.keywords:
            item.add_marker(skip)
