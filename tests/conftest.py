"""For all tests: Triton interprets where there is no GPU, torch keeps to one thread; ``--long``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

if not Path("/dev/nvidia0").exists():
    # Before anything imports triton, which decides when it decorates its own helpers.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot run kernels here, as far as that is known."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
    numpy = metadata.version("numpy")
    if Version(triton) >= Version("3.7") or Version(numpy) < Version("2.4"):
        return None
    return f"the interpreter of Triton {triton} fails with numpy {numpy}: it needs numpy<2.4"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not yet written is NaN."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def kernels_run() -> None:
    """For tests that run kernels: on a GPU, or in an interpreter that can."""
    fault = interpreter_fault() if interpreting() else None
    if fault is not None:
        pytest.skip(fault)


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
    reason = (
        interpreter_fault() if interpreting() else "needs Triton's interpreter: TRITON_INTERPRET=1"
    )
    if reason is None:
        return
    for item in items:
        if "interpreted" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
