"""CostModel: when sharing pays on a processor, and how long its reads should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Keys are cut into parts of this many tiles or more: below, starting a program and merging what it
# leaves take longer than reading.
FEWEST_TILES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a plan costs on a processor. The unit is one key read for one query.

    Attributes
    ----------
    per_item : int
        A read more: a launch or a program, and whatever comes with it.
    per_query : int
        One of a read's queries more: a partial output that is written, read again and merged.
    tile : int
        Keys that a program reads at a time. Reads are cut at multiples of it.
    programs : int
        How many programs run at one time (processors × programs on each); 0 if whoever carries the
        reads out cuts them as it likes.
    split : int
        If positive, reads are cut at multiples of this and nowhere else, and runs end there. How a
        query's sums are grouped then depends neither on what it shares nor on its batch mates. A
        multiple of ``tile``.
    """

    per_item: int
    per_query: int = 0
    tile: int = 1
    programs: int = 0
    split: int = 0

    def sharing_pays(self, queries: int, tokens: int) -> bool:
        """Whether a run of keys should be read once for all of these queries."""
        return (queries - 1) * tokens > self.per_item + self.per_query * queries

    def run_blocks(self, block_size: int) -> int:
        """Runs begin and end at multiples of this many blocks."""
        return self.split // math.gcd(self.split, block_size) if self.split else 1

    def part(self, keys: int, kv_heads: int) -> int:
        """How many keys a part of a long read should have; 0 for no parts.

        Parameters
        ----------
        keys : int
            Of all reads of the step. Many short reads fill the processors as well as few long ones:
            what counts is the work, not the number of rows.
        kv_heads : int
            Each is a program of its own.
        """
        if self.split or not self.programs:
            return self.split
        tiles = -(-keys * kv_heads // (self.programs * self.tile))
        return max(tiles, FEWEST_TILES) * self.tile


# Measured in float32 and bfloat16: another pass over the queries and a merge cost as much as 1,000
# reads. The compiled operator cuts what it is given by itself.
ON_A_CPU = CostModel(per_item=1000)

# Two queries share from 129 tokens on, many from 65: all reads are one launch, so what is left is a
# partial for each query. A start, from others' figures; nobody has timed it.
GPU_PER_ITEM, GPU_PER_QUERY = 0, 64
# How many programs of the attention kernel a processor holds at one time, by its registers.
PROGRAMS_A_PROCESSOR = 2
# Where reads are cut if the cuts may depend on nothing.
INVARIANT_SPLIT = 1024


def on_a_gpu(processors: int, tile: int, *, invariant: bool = False) -> CostModel:
    """The model of a GPU with this many processors whose programs read ``tile`` keys at a time.

    Invariant: cut at fixed places, however many processors there are.
    """
    return CostModel(
        per_item=GPU_PER_ITEM,
        per_query=GPU_PER_QUERY,
        tile=tile,
        programs=processors * PROGRAMS_A_PROCESSOR,
        split=INVARIANT_SPLIT if invariant else 0,
    )
