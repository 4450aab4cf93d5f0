"""Compiling the cache: where, when not, and that what was compiled is what runs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import radixkv.cache
from radixkv import compiled
from radixkv.compiled import CACHE, DECODING, ROOMS, Room
from radixkv.errors import NativeBuildError
from radixkv.native import build_rooms

PACKAGE = Path(compiled.__file__).parent
PROBE = """
import radixkv.cache
from radixkv.cache import PrefixCache, pool
from radixkv.config import CacheConfig
cache = PrefixCache(CacheConfig(num_blocks=8, block_size=2))
sequence = cache.acquire([1, 2, 3])
cache.commit(sequence, include_open=True)
cache.release(sequence)
print(radixkv.cache.IS_COMPILED, pool.__spec__.origin, cache.match([1, 2, 3, 4]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache would be compiled to; nothing is there."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    return CACHE.folder()


def run(code: str, *, package: Path = PACKAGE) -> subprocess.CompletedProcess[str]:
    """In a process of its own, whose folder comes first where modules are looked for."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_folder_is_named_by_the_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder == CACHE.folder()
    other = folder.parent / "radixkv"
    (other / "cache").mkdir(parents=True)
    for path in CACHE.sources():
        target = other / "cache" if path.parent.name == "cache" else other
        shutil.copy(path, target / path.name)
    monkeypatch.setattr(compiled, "__file__", str(other / "compiled.py"))
    assert CACHE.folder() == folder
    for name in ("cache/retention.py", "errors.py"):  # Not compiled, but compiled against.
        with (other / name).open("a") as file:
            file.write("# changed\n")
        assert CACHE.folder() != folder
        folder = CACHE.folder()


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_compiled_module_exists(room: Room) -> None:
    names = {path.stem for path in room.sources() if path.parent.name == room.name}
    assert set(room.modules) <= names


def test_a_room_that_follows_no_types_depends_on_its_own_modules_alone() -> None:
    assert not DECODING.follows
    assert {path.stem for path in DECODING.sources()} == set(DECODING.modules)


@pytest.mark.usefixtures("folder")
def test_without_it_the_sources_run() -> None:
    done = run(PROBE)
    assert done.stdout.split() == ["False", str(PACKAGE / "cache" / "pool.py"), "3"], done.stderr


def test_an_edited_source_runs_as_it_stands(tmp_path: Path) -> None:
    """In the usual cache folder, whether or not the unedited source was compiled there."""
    package = tmp_path / "radixkv"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.cpp"))
    pool = package / "cache" / "pool.py"
    pool.write_text(pool.read_text() + "\nEDITED = True\n")
    done = run(PROBE + "print(pool.EDITED)", package=package)
    assert done.stdout.split() == ["False", str(pool), "3", "True"], done.stderr


def test_a_library_that_does_not_load_is_said_and_done_without(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / f"abc__mypyc{compiled.SUFFIX}").write_text("no library")
    assert build_rooms.build_room(CACHE) == folder
    done = run("import logging; logging.basicConfig()\n" + PROBE)
    assert done.stdout.split() == ["False", str(PACKAGE / "cache" / "pool.py"), "3"]
    assert "compiled cache cannot be loaded, Python's is used" in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("no home"), PermissionError("not yours")])
def test_a_user_without_a_folder_can_import_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder() -> Path:
        raise error

    monkeypatch.setattr(compiled, "cache_folder", no_folder)
    search_path = ["here"]
    assert not compiled.use_compiled(CACHE, search_path)
    assert search_path == ["here"]


def test_an_empty_folder_is_nothing_compiled(folder: Path) -> None:
    folder.mkdir(parents=True)
    search_path = ["here"]
    assert not compiled.use_compiled(CACHE, search_path)
    assert search_path == ["here"]


def test_no_mypyc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NativeBuildError, match=r"pip install 'mypy\[mypyc\]'"):
        build_rooms.build_room(CACHE)
    assert not folder.exists()


def test_what_mypyc_says_is_passed_on(folder: Path) -> None:
    with pytest.raises(NativeBuildError, match=r"mypyc failed:\n.*no_such_module"):
        build_rooms.build_room(CACHE._replace(modules=("no_such_module",)))
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="cannot be stored"):
        build_rooms.build_room(CACHE)


def test_another_process_may_be_first(folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    for place in (made, folder):
        place.mkdir(parents=True)
        (place / "pool.so").touch()
    build_rooms._put_in_place(made, folder)
    assert [entry.name for entry in folder.iterdir()] == ["pool.so"]


@pytest.mark.skipif(
    not radixkv.cache.IS_COMPILED, reason="the cache is not compiled on this machine"
)
def test_what_was_compiled_runs() -> None:
    done = run(PROBE)
    is_compiled, pool, matched = done.stdout.split()
    assert is_compiled == "True", done.stderr
    assert CACHE.folder() in Path(pool).parents
    assert Path(pool).suffix in (".so", ".pyd")
    assert matched == "3"


DECODING_PROBE = """
import radixkv.decoding
from radixkv.decoding import SamplingParams, TextStream, stopping
stream = TextStream(SamplingParams(max_tokens=2, ignore_eos=True))
twin = stream.copy()
print(radixkv.decoding.IS_COMPILED, stopping.__spec__.origin)
print(*[delta[1] for delta in (stream.push(5), stream.push(6))], twin.token_ids)
"""


def test_decoding_compiles_by_itself(folder: Path) -> None:
    """Some seconds; what was compiled is what runs, and gives the same."""
    done = run(DECODING_PROBE)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["False", str(PACKAGE / "decoding" / "stopping.py")], done.stderr
    if importlib.util.find_spec("mypyc") is None or not shutil.which("cc"):
        pytest.skip("nothing to compile with")
    made = build_rooms.build_room(DECODING)
    assert made.parent == folder.parent
    again = run(DECODING_PROBE)
    is_compiled, module = again.stdout.splitlines()[0].split()
    assert is_compiled == "True", again.stderr
    assert made in Path(module).parents
    assert again.stdout.splitlines()[1] == lines[1] == "None length []"
