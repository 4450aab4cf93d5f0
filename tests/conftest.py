"""For all tests: Triton interprets where there is no GPU, and torch keeps to one thread."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidia0").exists():
    # Before anything imports triton, which decides when it decorates its own helpers.
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
