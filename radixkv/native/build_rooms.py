"""Compile rooms with mypyc; see `radixkv.compiled`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from radixkv.compiled import SUFFIX, Room
from radixkv.errors import NativeBuildError

OPTIONS = ("--ignore-missing-imports", "--explicit-package-bases")


def build_room(room: Room) -> Path:
    """Compile a room's modules into the cache folder, unless they lie there already.

    The cache takes half a minute, decoding some seconds. The sources are compiled as they are;
    nothing is written beside them.

    Raises
    ------
    NativeBuildError
        With the reason: no mypyc, no C compiler, or what it said.
    """
    folder = room.folder()
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("mypyc") is None:
        raise NativeBuildError("mypyc is needed to compile it: pip install 'mypy[mypyc]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            workshop, made = Path(scratch) / "sources", Path(scratch) / "made"
            _copy_sources(room, workshop / "radixkv")
            _run_mypyc(room, workshop)
            made.mkdir()
            for library in (
                *workshop.glob(f"*{SUFFIX}"),
                *workshop.glob(f"radixkv/{room.name}/*{SUFFIX}"),
            ):
                library.rename(made / library.name)
            _put_in_place(made, folder)
    except OSError as error:
        raise NativeBuildError(f"compiled {room.name} cannot be stored: {error}") from error
    return folder


def _copy_sources(room: Room, package: Path) -> None:
    """Only what the room needs: mypyc would read, and compile against, all that it finds."""
    (package / room.name).mkdir(parents=True)
    (package / "__init__.py").touch()
    for path in room.sources():
        if path.name != "__init__.py":
            target = package if path.parent.name == "radixkv" else package / room.name
            shutil.copy(path, target / path.name)
    (package / room.name / "__init__.py").touch()


def _run_mypyc(room: Room, workshop: Path) -> None:
    modules = [f"radixkv/{room.name}/{name}.py" for name in room.modules]
    follow = ("--follow-imports", "silent" if room.follows else "skip")
    # Higher levels take as long to compile and run no faster.
    environment = {**os.environ, "MYPYC_OPT_LEVEL": "2", "MYPYC_DEBUG_LEVEL": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", *follow, *OPTIONS, *modules],
        cwd=workshop,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-20:])
        raise NativeBuildError(f"mypyc failed:\n{said}")


def _put_in_place(made: Path, folder: Path) -> None:
    """All modules at once, or another process would find half of them."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # Another process was first, with the same modules.
            raise
