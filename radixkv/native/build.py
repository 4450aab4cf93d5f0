"""Build what can be compiled: ``python -m radixkv.native.build [--if-possible]``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils import cpp_extension

from radixkv.compiled import ROOMS
from radixkv.errors import NativeBuildError
from radixkv.native import SOURCES, compile_flags, library_path, missing_feature, source_folder
from radixkv.native.build_rooms import build_room


def build() -> Path:
    """Compile the operators into the cache folder, unless they lie there already.

    Takes half a minute.

    Raises
    ------
    NativeBuildError
        With the reason: the CPU, no compiler, or what the compiler said.
    """
    if (reason := missing_feature()) is not None:
        raise NativeBuildError(f"the compiled operators are not for this machine: {reason}")
    path = library_path()
    if path.is_file():
        return path
    # CXX may be more than a path: "ccache g++".
    chosen = shutil.which("g++") or shutil.which("clang++")
    compiler = shlex.split(os.environ.get("CXX", "")) or ([chosen] if chosen else [])
    if not compiler:
        raise NativeBuildError("no C++ compiler was found: install g++, or set CXX")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            objects = []
            for name in SOURCES:
                objects.append(str(Path(folder) / f"{name}.o"))
                source = str(source_folder() / name)
                _run([*compiler, *compile_flags(), *_includes(), "-c", source, "-o", objects[-1]])
            # Linked without -fopenmp: a second OpenMP beside torch's would mean a second pool of
            # threads, each waiting for the other.
            made = Path(folder) / path.name
            _run([*compiler, "-shared", *objects, *_libraries(), "-o", str(made)])
            made.replace(path)
    except OSError as error:
        raise NativeBuildError(f"the compiled operators cannot be stored: {error}") from error
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NativeBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[:20])
        raise NativeBuildError(f"{command[0]} failed:\n{said}")


def _includes() -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    return [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *folders]


def _libraries() -> list[str]:
    folders = cpp_extension.library_paths()
    # torch brings its own OpenMP, under a name that differs from build to build.
    packages = Path(torch.__file__).parents[1]
    own = [*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")]
    openmp = [str(own[0])] if own else ["-fopenmp"]
    return [*(f"-L{folder}" for folder in folders), "-lc10", "-ltorch_cpu", *openmp]


def main() -> None:
    """Build all, say where to, and exit with 1 if any failed."""
    parser = argparse.ArgumentParser(description="Compile radixkv's operators and rooms.")
    parser.add_argument(
        "--if-possible", action="store_true", help="exit with 0 where they cannot be built"
    )
    arguments = parser.parse_args()
    failed = False
    made: list[tuple[str, Callable[[], Path]]] = [("operators", build)]
    made += [(room.name, partial(build_room, room)) for room in ROOMS]
    for name, make in made:
        try:
            print(f"compiled {name}: {make()}")
        except NativeBuildError as error:
            print(f"compiled {name}: not built ({error})", file=sys.stderr)
            failed = True
    if failed and not arguments.if_possible:
        sys.exit(1)


if __name__ == "__main__":
    main()
