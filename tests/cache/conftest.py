"""Paths for the tests of the cache."""

from __future__ import annotations

import sys
from pathlib import Path

# The tests share helpers that are no package: pytest imports test files by path.
sys.path.insert(0, str(Path(__file__).parent))
