"""Real servers over the engine's tiny model, for clients."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from real_server import serve
from tiny_model import _one_thread, make_llm, tiny

__all__ = ["_one_thread", "make_llm", "serve", "tiny"]
