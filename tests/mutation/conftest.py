"""Paths for the planted bugs."""

from __future__ import annotations

import sys
from pathlib import Path

# The tests share a list that is no package: pytest imports test files by path.
sys.path.insert(0, str(Path(__file__).parent))
