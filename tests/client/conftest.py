"""Real servers over the engine's tiny model, for clients."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def _server_fixtures() -> Any:
    path = Path(__file__).parents[1] / "server" / "conftest.py"
    spec = importlib.util.spec_from_file_location("server_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_fixtures = _server_fixtures()
_one_thread = _fixtures._one_thread
tiny = _fixtures.tiny
make_llm = _fixtures.make_llm
serve = _fixtures.serve
