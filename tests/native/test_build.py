"""Building the compiled operators: where, when not, and what the user is told."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixkv import native
from radixkv.errors import NativeBuildError
from radixkv.native import build

ROOMS_MADE = "compiled cache: /made\ncompiled decoding: /made\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder, and nothing remembered of another."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    native.is_available.cache_clear()
    yield
    native.is_available.cache_clear()


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this CPU had all that is needed."""
    monkeypatch.setattr(build, "missing_feature", lambda: None)
    monkeypatch.setattr(native, "missing_feature", lambda: None)


def test_the_library_is_named_by_what_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = native.library_path()
    assert path.parent == tmp_path / "native"
    assert path == native.library_path()
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert native.library_path() != path
    monkeypatch.undo()
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    other = tmp_path / "sources"
    shutil.copytree(native.source_folder(), other)
    (other / "vectors.h").write_text("// changed")
    monkeypatch.setattr(native, "source_folder", lambda: other)
    assert native.library_path() != path
    monkeypatch.undo()
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", ("-O1",))
    assert native.library_path() != path


def test_nothing_is_compiled_for_what_the_name_does_not_tell() -> None:
    """A home folder may be shared by machines whose CPUs differ in more than torch looks at."""
    assert not [flag for flag in native.compile_flags() if "native" in flag]


def test_a_cpu_that_lacks_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(
        NativeBuildError, match="not for this machine: they need a CPU with AVX-512"
    ):
        build.build()
    assert not native.is_available()


@pytest.mark.usefixtures("able")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler was found: install g\+\+"):
        build.build()


@pytest.mark.usefixtures("able")
def test_what_the_compiler_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'bad intrinsic' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeBuildError, match="compiler failed:\nbad intrinsic"):
        build.build()
    assert list((tmp_path / "native").iterdir()) == []
    assert not native.is_available()


@pytest.mark.usefixtures("able")
def test_a_compiler_with_arguments_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env LANG=C false")
    with pytest.raises(NativeBuildError, match="env failed"):
        build.build()


@pytest.mark.usefixtures("able")
def test_a_compiler_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    with pytest.raises(NativeBuildError, match="/nowhere/compiler cannot be run"):
        build.build()


@pytest.mark.usefixtures("able")
def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(NativeBuildError, match="cannot be stored"):
        build.build()


@pytest.mark.usefixtures("able")
def test_a_library_that_does_not_load_is_said_and_done_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = native.library_path()
    path.parent.mkdir()
    path.write_text("no library")
    assert build.build() == path
    assert not native.is_available()
    assert "cannot be loaded, torch's are used" in caplog.text


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("arguments", [[], ["--if-possible"]])
def test_the_command_says_why_not(
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    monkeypatch.setattr(sys, "argv", ["build", *arguments])
    monkeypatch.setattr(build, "build_room", lambda room: Path("/made"))
    if arguments:
        build.main()
    else:
        with pytest.raises(SystemExit, match="1"):
            build.main()
    said = capsys.readouterr()
    assert "compiled operators: not built (" in said.err
    # What fails does not stop the other.
    assert said.out == ROOMS_MADE


@pytest.mark.skipif(native.missing_feature() is not None, reason="not for this machine")
@pytest.mark.skipif(
    not (os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler",
)
@pytest.mark.usefixtures("_elsewhere")
def test_built_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["build"])
    monkeypatch.setattr(build, "build_room", lambda room: Path("/made"))
    build.main()
    path = native.library_path()
    assert capsys.readouterr().out == f"compiled operators: {path}\n{ROOMS_MADE}"
    made = path.stat().st_mtime_ns
    build.main()
    assert path.stat().st_mtime_ns == made
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
