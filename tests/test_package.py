"""What the package promises: names, cheap imports, and arrows that run downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv

ROOT = Path(radixkv.__file__).parent
# Each room may import those before it; `decoding` stands beside `attention`.
FLOORS = ["cache", "attention", "model", "engine", "programs", "llm", "server", "cli"]
EVERYWHERE = {"errors", "config"}
ALLOWED = {
    "cache": {"cache", "compiled"},
    "compiled": {"folders"},
    "native": {"native", "compiled", "folders"},
    "attention": {"attention", "cache", "native"},
    "decoding": {"decoding", "compiled"},
    "model": {"model", "attention", "cache", "devices", "folders", "memory", "native"},
    "engine": {"engine", "model", "attention", "cache", "decoding"},
    "programs": {"programs", "model", "cache", "decoding", "engine"},
    "inputs": {"decoding", "engine"},
    "llm": {"devices", "inputs", "memory", "model", "attention", "cache", "decoding", "engine"}
    | {"programs"},
    "server": {"server", "inputs", "llm", "model", "cache", "decoding", "engine", "programs"},
    "devices": set(),
    "memory": set(),
    "workloads": {"workloads"},
    "errors": set(),
    "folders": set(),
    "config": {"cache"},  # for types alone, see below
    "client": {"client"},
    "cli": {"cli", "llm", "memory", "native", "model", "attention", "cache", "decoding", "engine"}
    | {"workloads", "devices", "server"},
}


def test_all_is_exact() -> None:
    assert radixkv.__all__ == [
        "EPHEMERAL",
        "LLM",
        "BeamSearchParams",
        "CacheConfig",
        "Completion",
        "Context",
        "EngineConfig",
        "PrefixCache",
        "RequestOutput",
        "Retention",
        "SamplingParams",
        "majority",
    ]
    assert set(radixkv.__all__) <= set(dir(radixkv))
    for name in radixkv.__all__:
        assert getattr(radixkv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = radixkv.Nothing


@pytest.mark.parametrize(
    "module", ["radixkv", "radixkv.cache", "radixkv.config", "radixkv.cli", "radixkv.client"]
)
def test_importing_is_cheap(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([n for n in ('torch', 'transformers', 'triton') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def imports_of(path: Path, *, at_run_time: bool) -> set[str]:
    """Modules of radixkv (or of others, by their first name) that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                skipped.update(inner for child in node.body for inner in ast.walk(child))
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            found.add(node.module or "")
    return found


def files_of(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{room}.py"]


def test_every_room_is_known() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "py"} - {"py.typed"} == ALLOWED.keys()


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_arrows_run_downwards_only(room: str) -> None:
    for path in files_of(room):
        for name in imports_of(path, at_run_time=room == "config"):
            parts = name.split(".")
            if parts[0] == "radixkv" and len(parts) > 1:
                assert parts[1] in ALLOWED[room] | EVERYWHERE, f"{path} imports {name}"


def test_the_cache_knows_no_tensors_and_the_kernels_nothing_of_us() -> None:
    for path in files_of("cache"):
        assert not any("torch" in name for name in imports_of(path, at_run_time=False)), path
    kernels = sorted((ROOT.parent / "kernels" / "radixkv_kernels").rglob("*.py"))
    assert kernels
    for path in kernels:
        names = imports_of(path, at_run_time=False)
        assert not any(name.split(".")[0] == "radixkv" for name in names), path
    assert not (ROOT.parent / "kernels" / "__init__.py").exists()
