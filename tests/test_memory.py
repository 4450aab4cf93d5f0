"""Amounts of memory, and the blocks that fit."""

from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import memory
from radixkv.errors import ConfigError
from radixkv.memory import (
    num_blocks_for,
    parse_memory,
    prefer_large_pages,
    return_freed_memory,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5g", 1_500_000_000),
        (" 3 kib ", 3072),
        ("17", 17),
        (4096, 4096),
        ("8B", 8),
    ],
)
def test_amounts(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "-1", "0", "0.1", "2TiB", "1e3", "GiB", 0, "1 2", None]
)
def test_no_amounts(text: Any) -> None:
    with pytest.raises(ConfigError, match="no amount of memory"):
        parse_memory(text)


def test_blocks() -> None:
    assert num_blocks_for("1000", 300, 16, 10**9) == 3
    assert num_blocks_for(900, 300, 16, 10**9) == 3
    with pytest.raises(ConfigError, match="holds no block of 300 bytes"):
        num_blocks_for("299", 300, 16, 10**9)


def test_auto_takes_what_is_needed_within_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4000)
    assert num_blocks_for("auto", 10, 16, 33) == 3
    assert num_blocks_for("auto", 10, 16, 10**9) == 100
    with pytest.raises(ConfigError):
        num_blocks_for("auto", 2000, 16, 33)


def test_available_memory_is_plausible() -> None:
    assert memory.available_memory() > 1 << 20


def group(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")
    return folder


def test_room_in_a_container(tmp_path: Path) -> None:
    """What others in it have taken is not there for us; files that can be dropped are."""
    assert memory.container_room(tmp_path) is None
    group(tmp_path, max=1000, current=700, stat="anon 500\ninactive_file 150\nactive_file 50")
    assert memory.container_room(tmp_path) == 450
    group(tmp_path, max=600)
    assert memory.container_room(tmp_path) == 50
    group(tmp_path, max=100)
    assert memory.container_room(tmp_path) == 0
    group(tmp_path, max="max")
    assert memory.container_room(tmp_path) is None


def test_room_in_a_container_of_the_older_kind(tmp_path: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 150"
    group(tmp_path / "memory", limit_in_bytes=1000, usage_in_bytes=700, stat=stat)
    assert memory.container_room(tmp_path) == 450
    group(tmp_path / "memory", limit_in_bytes=9223372036854771712)
    assert memory.container_room(tmp_path) is None


def test_the_container_bounds_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "container_room", lambda: 12345)
    assert memory.available_memory() == 12345
    monkeypatch.setattr(memory, "container_room", lambda: None)
    assert memory.available_memory() > 1 << 20


def test_freed_memory_is_returned_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=trimmed.append))
    return_freed_memory()
    assert trimmed == [0]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    return_freed_memory()
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("it has none"))
    return_freed_memory()
    assert trimmed == [0]


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this kernel has no large pages")
def test_whole_pages_of_a_piece_are_asked_to_be_large() -> None:
    with mmap.mmap(-1, 8 << 20) as room:
        piece = ctypes.c_char.from_buffer(room)
        address = ctypes.addressof(piece)
        prefer_large_pages(address + 1, 3)  # No whole page lies in it.
        assert "hg" not in flags_of(address)
        prefer_large_pages(address + 64, (4 << 20) + mmap.PAGESIZE)
        assert "hg" not in flags_of(address)
        assert "hg" in flags_of(address + mmap.PAGESIZE)
        assert "hg" in flags_of(address + (4 << 20))
        assert "hg" not in flags_of(address + (4 << 20) + mmap.PAGESIZE)
        del piece


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return others
    raise AssertionError("no mapping holds the address")


def test_without_large_pages_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("there is nothing to ask for"))
    prefer_large_pages(0, 8 << 20)
