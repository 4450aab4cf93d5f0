"""The room's public names, and what it may import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import radixkv.decoding

ROOM = Path(radixkv.decoding.__file__).parent


def test_all_is_exact() -> None:
    modules = {path.stem for path in ROOM.glob("*.py")}
    public = {name for name in vars(radixkv.decoding) if not name.startswith("_")}
    assert sorted(public - modules | {"sample"}) == sorted(radixkv.decoding.__all__)


def test_it_knows_nothing_of_the_rooms_around_it() -> None:
    allowed = {"torch", "numpy", "tokenizers", "xgrammar", "__future__", *sys.stdlib_module_names}
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ground = ("radixkv.errors", "radixkv.compiled")
                own = name in ground or name.startswith("radixkv.decoding")
                assert own or name.split(".")[0] in allowed, (path.name, name)
