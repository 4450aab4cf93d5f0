"""The cache stands alone: light to import, and nothing of the floors above."""

from __future__ import annotations

import subprocess
import sys

import radixkv.cache

PROBE = """
import sys, radixkv.cache
heavy = {"torch", "transformers", "triton", "pandas", "scipy", "rich", "typer", "numba", "asyncio"}
print(sorted(name for name in sys.modules if name.partition(".")[0] in heavy))
print(sorted(name for name in sys.modules if name.startswith("radixkv")))
"""


def test_importing_the_cache_imports_little() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    heavy, own = done.stdout.splitlines()
    assert heavy == "[]"
    ground = ("config", "errors", "folders", "compiled")
    allowed = tuple(f"radixkv.{name}" for name in ("cache", *ground))
    for name in own.strip("[]").replace("'", "").split(", "):
        assert name == "radixkv" or name.startswith(allowed), name


def test_all_that_is_promised_is_there() -> None:
    assert len(set(radixkv.cache.__all__)) == len(radixkv.cache.__all__)
    for name in radixkv.cache.__all__:
        assert getattr(radixkv.cache, name) is not None
    public = {
        name
        for name, value in vars(radixkv.cache).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("radixkv")
    }
    assert public <= set(radixkv.cache.__all__)
