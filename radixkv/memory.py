"""How much memory the KV store may take."""

from __future__ import annotations

import re
from pathlib import Path

from radixkv.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
# Of the memory that is available when the engine starts, what "auto" may take at the most.
AUTO_SHARE = 0.25


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
    """Bytes that can be taken without swapping, within the container's limit if there is one."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 8 * 2**30
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text))
    return available


def num_blocks_for(
    kv_memory: str | int, bytes_per_block: int, block_size: int, max_tokens: int
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

    Raises
    ------
    ConfigError
        If not even one block fits.
    """
    if kv_memory == "auto":
        size = int(available_memory() * AUTO_SHARE)
        blocks = min(size // bytes_per_block, -(-max_tokens // block_size))
    else:
        size = parse_memory(kv_memory)
        blocks = size // bytes_per_block
    if blocks < 1:
        raise ConfigError(f"kv_memory of {size} bytes holds no block of {bytes_per_block} bytes")
    return blocks
