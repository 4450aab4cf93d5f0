"""How much memory the KV store may take."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from pathlib import Path

from radixkv.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# Of the memory that is available when the engine starts, what "auto" may take at the most.
AUTO_SHARE = 0.25
# What is taken for available on a system that does not say.
UNKNOWN = 8 * 2**30
# Limits of control groups from here on stand for none.
NO_LIMIT = 2**60


def parse_memory(text: str | int) -> int:
    """Bytes of "2GiB", "500MB", "1.5g" or a plain number.

    Raises
    ------
    ConfigError
        If it is none of these, or not above 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?|)b?\s*", str(text), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size < 1:
        raise ConfigError(f"{text!r} is no amount of memory; write it like 2GiB or 500MB, or auto")
    return size


def available_memory() -> int:
    """Bytes that can be taken without swapping, within what the container has left."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return UNKNOWN
    room = container_room()
    available = _fields(info, ":")["MemAvailable"] * 1024
    return available if room is None else min(available, room)


def return_freed_memory() -> None:
    """Have the C library give the system what was freed, where it can: glibc.

    It keeps freed pieces of some megabytes to itself, and a model's replaced weights are such.
    """
    if platform.system() == "Linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def prefer_large_pages(address: int, num_bytes: int) -> None:
    """Have memory that nothing was written to yet lie in pages of megabytes, where Linux can.

    Whoever streams through it looks up fewer addresses. Where there are no such pages, or none is
    left, it lies in small ones.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if advice is not None and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def container_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes up to the container's limit; None if there is no limit.

    Pages of files that the kernel would drop first (inactive ones) count as free. Both layouts of
    control groups are read: the files of version 2, and those of version 1 below ``memory/``.
    """
    for folder, most, used, idle in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = ((folder / name).read_text().strip() for name in (most, used))
            dropped = _fields(folder / "memory.stat", " ").get(idle, 0)
        except OSError:
            continue
        # Without a limit, version 2 says "max" and version 1 a number above any machine's memory.
        if limit.isdigit() and int(limit) < NO_LIMIT:
            return max(int(limit) - int(usage) + dropped, 0)
    return None


def _fields(path: Path, separator: str) -> dict[str, int]:
    """Numbers of a file that holds a name and a number in each line."""
    pairs = (line.split(separator, 1) for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1].split()[0]) for pair in pairs if len(pair) == 2}


def num_blocks_for(
    kv_memory: str | int,
    bytes_per_block: int,
    block_size: int,
    max_tokens: int,
    *,
    room: int | None = None,
) -> int:
    """Blocks that fit into ``kv_memory``.

    Parameters
    ----------
    kv_memory : str or int
        As for `parse_memory`, or "auto": what ``max_tokens`` need, within a share of what is
        available now. Blocks that are never written take no memory on a CPU.
    bytes_per_block, block_size : int
    max_tokens : int
        The most tokens that could ever be held at one time.
    room : int, optional
        Bytes that "auto" may take, on a device whose memory was measured.

    Raises
    ------
    ConfigError
        If not even one block fits.
    """
    if kv_memory == "auto":
        size = int(available_memory() * AUTO_SHARE) if room is None else room
        blocks = min(size // bytes_per_block, -(-max_tokens // block_size))
    else:
        size = parse_memory(kv_memory)
        blocks = size // bytes_per_block
    if blocks < 1:
        raise ConfigError(f"kv_memory of {size} bytes holds no block of {bytes_per_block} bytes")
    return blocks
