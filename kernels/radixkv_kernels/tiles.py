"""How big a tile a program works on, for each GPU: chosen from compiler reports, not by timing."""

from __future__ import annotations

from dataclasses import dataclass

MERGE_WARPS = 2
MERGE_TILE = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of `attend_kernel` works on at a time.

    The same tile gives the same bits for a row whatever else is in the batch: who needs that must
    choose one tile and keep it.

    Attributes
    ----------
    rows : int
        Rows of the query tile, a query for each of a KV head's query heads; a power of two from 16.
    tokens : int
        Keys of a step; a power of two from 16.
    warps, stages : int
        Triton's `num_warps` and `num_stages`.
    """

    rows: int
    tokens: int
    warps: int
    stages: int


def width_of(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: a power of two, for matrix units at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def merge_heads(num_heads: int, value_dim: int) -> int:
    """Heads that a program of `merge_kernel` merges: a power of two."""
    most = 1 << (num_heads - 1).bit_length()
    return max(1, min(most, MERGE_TILE // width_of(value_dim)))


def choose_tile(target: str, rows: int, key_width: int, value_width: int, bytes_each: int) -> Tile:
    """Look up the tile for a GPU ("sm_90"), rows of the largest item, widths and cached bytes."""
    if target == "cpu":
        return Tile(16, 16, 4, 1)
    return Tile(16 if rows <= 16 else 64, 64, 4, 3)
