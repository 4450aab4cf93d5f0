"""Amounts of memory, and the blocks that fit."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv import memory
from radixkv.errors import ConfigError
from radixkv.memory import num_blocks_for, parse_memory


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
