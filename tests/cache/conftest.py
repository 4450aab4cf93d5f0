"""Options and paths for the tests of the cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The tests share helpers that are no package: pytest imports test files by path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def long_run(request: pytest.FixtureRequest) -> bool:
    """Whether the state machines are to run a hundred times as long."""
    return bool(request.config.getoption("--long", default=False))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="state machines: 100 times the examples")
