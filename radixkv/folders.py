"""Where radixkv keeps what it has made: converted models, compiled operators."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for everything that radixkv keeps: ``$RADIXKV_CACHE``, else the XDG cache."""
    if own := os.environ.get("RADIXKV_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "radixkv"
