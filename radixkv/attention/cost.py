"""CostModel: when sharing pays on a processor, and how long its reads should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Keys are cut into parts of this many tiles or more: below, starting a program and merging what it
# leaves take longer than reading.
FEWEST_TILES = 2
# Reads are cut so that each program gets one part or up to this many.
ROUNDS = (1, 2, 3, 4, 5, 6)

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a plan costs on a processor. The unit is one key read for one query.

    Attributes
    ----------
    per_item : int
        A read more: a launch or a program, and whatever comes with it.
    per_query : int
        One of a read's queries more: a partial output that is written, read again and merged.
    per_program : int
        Keys that a program could have read while it starts.
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
    per_program: int = 0
    tile: int = 1
    programs: int = 0
    split: int = 0

    def sharing_pays(self, queries: int, tokens: int) -> bool:
        """Whether a run of keys should be read once for all of these queries."""
        return (queries - 1) * tokens > self.per_item + self.per_query * queries

    def run_blocks(self, block_size: int) -> int:
        """Runs begin and end at multiples of this many blocks."""
        return self.split // math.gcd(self.split, block_size) if self.split else 1

    def part(self, lengths: Int64Array, kv_heads: int) -> int:
        """About how many keys a part of a long read should have; 0 for no parts.

        An equal share for every program would be best if all reads could be cut to it; what is left
        over would wait for a whole round else, so a half, a third, ... of it are considered too.

        Parameters
        ----------
        lengths : int64 array (reads,)
            Keys of each read of the step. Many short reads fill the processors as well as few long
            ones: what counts is the work, not the number of rows.
        kv_heads : int
            Each is a program of its own.
        """
        if self.split or not self.programs:
            return self.split
        share = int(lengths.sum()) * kv_heads / (self.programs * self.tile)
        tiles = {max(math.ceil(share / rounds), FEWEST_TILES) for rounds in ROUNDS}
        parts = [count * self.tile for count in sorted(tiles, reverse=True)]
        return min(parts, key=lambda part: self.duration(lengths, part, kv_heads))

    def duration(self, lengths: Int64Array, part: int, kv_heads: int) -> float:
        """How long reads take that are cut into such parts, in keys that one program reads.

        Programs are started in rounds, those that take longest first.
        """
        pieces = parts_of(lengths, part)
        each = np.sort(np.repeat(lengths / pieces, pieces))[::-1]
        rounds = each[:: max(1, self.programs // kv_heads)]
        return float(rounds.sum()) + self.per_program * len(rounds)


def parts_of(lengths: Int64Array, part: int) -> Int64Array:
    """Into how many equal parts each read is cut, of two thirds to one and a half of `part`."""
    return np.maximum((lengths + part // 2) // part, 1)


# Measured in float32 and bfloat16: another pass over the queries and a merge cost as much as 1,000
# reads. The compiled operator cuts what it is given by itself.
ON_A_CPU = CostModel(per_item=1000)

# What follows is of GPUs, and derived: NOBODY HAS TIMED IT. `benchmarks/gpu_kernels.py --tune`
# does, and prints what these should be. The arithmetic is of an H200 as its data sheet has it
# (4.8 TB/s, 132 processors) and of keys and values of 128 numbers in bfloat16, 512 bytes a key.
#
# All reads are one launch, so that one read more costs no launch.
GPU_PER_ITEM = 0
# A partial of a query is written and read again: 4 query heads x 129 float32 x 2 are 4,128 bytes
# for each KV head, as much as 8 keys; 16 keys with 8 query heads. Whoever had none before needs a
# merge too, which is a launch: in the 2 us that one takes, as is commonly found, even in a graph,
# the card reads 2,300 keys of 8 heads, and with 32 queries that is 73 for each. Two queries share
# from 129 tokens on, many from 65; others' kernels gain from some 100 to 250 tokens on.
GPU_PER_QUERY = 64
# A program waits four times for memory, some 0.5 us each, before its first key is there: read its
# item, the positions, the block ids, the keys. In 2 us one of 264 programs reads 36 KB, or 71 keys.
GPU_PER_PROGRAM = 64
# How many programs of the attention kernel a processor holds at one time. By the report it takes
# 148 registers a thread, 128 threads and 70 KB: three would fit.
PROGRAMS_A_PROCESSOR = 2
# Where reads are cut if the cuts may depend on nothing. A lone row of 32,768 tokens makes 32 parts
# of it, times 8 KV heads about as many as there are programs; shorter ones cost more memory.
INVARIANT_SPLIT = 1024


def on_a_gpu(processors: int, tile: int, *, invariant: bool = False) -> CostModel:
    """The model of a GPU with this many processors whose programs read ``tile`` keys at a time.

    Invariant: cut at fixed places, however many processors there are.
    """
    return CostModel(
        per_item=GPU_PER_ITEM,
        per_query=GPU_PER_QUERY,
        per_program=GPU_PER_PROGRAM,
        tile=tile,
        programs=processors * PROGRAMS_A_PROCESSOR,
        split=INVARIANT_SPLIT if invariant else 0,
    )
