"""The tiny model's fixtures, and helpers of other tests."""

from __future__ import annotations

import sys
from pathlib import Path

# The tests share helpers that are no package: pytest imports test files by path.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "decoding"))

from tiny_model import _one_thread, make_llm, reference, tiny

__all__ = ["_one_thread", "make_llm", "reference", "tiny"]
