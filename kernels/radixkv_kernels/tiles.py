"""How big a tile a program works on, for each GPU: chosen from compiler reports, not by timing."""

from __future__ import annotations

from dataclasses import dataclass

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
    registers : int
        NVIDIA only: what a thread may use. Left to itself, the assembler spills some of them to fit
        in more programs, though shared memory has no room for these.
    """

    rows: int
    tokens: int
    warps: int
    stages: int
    registers: int = 255

    def __post_init__(self) -> None:
        for size in (self.rows, self.tokens):
            if size < 16 or size & (size - 1):
                raise ValueError(f"rows and tokens must be powers of two from 16, got {self}")


def width_of(head_dim: int) -> int:
    """Columns of a tile that holds `head_dim`: a power of two, for matrix units at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def merge_heads(num_heads: int, value_dim: int) -> int:
    """Heads that a program of `merge_kernel` merges: a power of two."""
    most = 1 << (num_heads - 1).bit_length()
    return max(1, min(most, MERGE_TILE // width_of(value_dim)))


def merge_warps(target: str) -> int:
    """Warps that hold `MERGE_TILE` at 16 bytes a lane: one load for each partial, so that several
    partials are on their way at a time."""
    return MERGE_TILE // (4 * (64 if target.startswith("gfx") else 32))


# (bytes of a cached number, rows up to 16?, columns of the wider of K and V) -> tile.
# Chosen without a GPU, from what the compiler reports: no spills, shared memory within the limit,
# two or more tiles of K and V in flight, and room for several programs where that left a choice.
# Nothing was timed; `python -m radixkv_kernels.report` prints what each entry costs.
_Table = dict[tuple[int, bool, int], Tile]

# NVIDIA's data centre GPUs: 163 KB of shared memory or more.
_ROOMY: _Table = {
    (2, True, 64): Tile(16, 64, 4, 3, 128),
    (2, True, 128): Tile(16, 64, 4, 3, 168),
    (2, True, 256): Tile(16, 32, 4, 3, 168),
    (2, True, 512): Tile(16, 16, 4, 3),
    (2, False, 64): Tile(64, 64, 4, 3),
    (2, False, 128): Tile(64, 64, 8, 3),
    (2, False, 256): Tile(64, 32, 8, 3),
    (2, False, 512): Tile(32, 16, 8, 3),
    (1, True, 64): Tile(16, 64, 4, 3, 128),
    (1, True, 128): Tile(16, 32, 4, 3, 128),
    (1, True, 256): Tile(16, 32, 8, 3, 128),
    (1, True, 512): Tile(16, 32, 8, 3),
    (1, False, 64): Tile(64, 64, 8, 3),
    (1, False, 128): Tile(64, 64, 8, 3),
    (1, False, 256): Tile(64, 32, 8, 3),
    (1, False, 512): Tile(32, 32, 8, 3),
    # float32 is multiplied without matrix units, and all operands are in registers.
    (4, True, 64): Tile(16, 16, 4, 3, 128),
    (4, True, 128): Tile(16, 16, 4, 3, 168),
    (4, True, 256): Tile(16, 16, 8, 3, 128),
    (4, False, 64): Tile(32, 16, 8, 3),
    (4, False, 128): Tile(32, 16, 8, 3),
    (4, False, 256): Tile(32, 16, 16, 3, 128),
}

# AMD's gfx942 has 64 KB. So it is for GPUs that nobody looked at: this fits most.
_TIGHT: _Table = {
    (2, True, 64): Tile(16, 64, 4, 3, 128),
    (2, True, 128): Tile(16, 32, 4, 3, 128),
    (2, True, 256): Tile(16, 16, 4, 3, 168),
    # Here too, with heads of more than 256.
    (2, True, 512): Tile(16, 16, 4, 2),
    (2, False, 64): Tile(64, 32, 4, 3),
    (2, False, 128): Tile(64, 32, 8, 3),
    (2, False, 256): Tile(64, 16, 8, 3),
    (2, False, 512): Tile(32, 16, 8, 2),
    (1, True, 64): Tile(16, 64, 4, 3, 128),
    (1, True, 128): Tile(16, 32, 4, 3, 128),
    (1, True, 256): Tile(16, 16, 4, 3, 128),
    (1, True, 512): Tile(16, 16, 4, 3),
    (1, False, 64): Tile(64, 32, 4, 3),
    (1, False, 128): Tile(64, 32, 8, 3),
    (1, False, 256): Tile(64, 16, 8, 3),
    (1, False, 512): Tile(32, 16, 4, 3),
    (4, True, 64): Tile(16, 32, 4, 3, 128),
    (4, True, 128): Tile(16, 16, 4, 3, 128),
    # Two tiles would take more than 64 KB: here one is in flight while another is computed on.
    (4, True, 256): Tile(16, 16, 8, 2, 128),
    (4, False, 64): Tile(32, 16, 8, 3),
    (4, False, 128): Tile(32, 16, 8, 3),
    (4, False, 256): Tile(32, 16, 8, 2),
}

# Decoding e4m3 takes registers.
_AMPERE = _ROOMY | {(1, False, 256): Tile(64, 16, 8, 3)}

# Three tiles in flight leave sm_100 too few registers, and two let two programs share a processor.
_BLACKWELL = _ROOMY | {(2, False, 128): Tile(64, 64, 8, 2)}

_TABLES = {"sm_80": _AMPERE, "sm_90": _ROOMY, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL}


def choose_tile(target: str, rows: int, key_width: int, value_width: int, bytes_each: int) -> Tile:
    """Look up the tile for a GPU ("sm_90"), rows of the largest item, widths and cached bytes.

    Triton's interpreter, on the CPU, gets a small one: there, tests need many tiles, not big ones.
    """
    if target == "cpu":
        return Tile(16 if rows <= 16 else 64, 32, 4, 1)
    width = max(64, key_width, value_width)
    return _TABLES.get(target, _TIGHT)[bytes_each, rows <= 16, width]


def launch_options(tile: Tile, target: str) -> dict[str, int]:
    """Triton's options for a launch; those for AMD's GPUs know no limit of registers."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options | {"maxnreg": tile.registers} if target.startswith("sm_") else options
