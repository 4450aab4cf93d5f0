"""AttentionPlan: a batch of block tables becomes a forest of shared runs.

Sorted by block table, the members of every shared run are neighbours, so a run is a range of rows
and a range of blocks, and its keys are read once for all of them. What is left of each row is its
tail. Prefill, decode, branches and beams differ in nothing but the list. Pure numpy: the planner
knows no tensor library.

The idea of attending to a shared prefix once and merging by log-sum-exp is from Hydragen (Juravsky
et al., 2024) and ChunkAttention (Ye et al., 2024); from sorted tables to a forest is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from radixkv.attention.cost import ON_A_CPU, CostModel
from radixkv.attention.cost import Int64Array as Int64Array

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Blocks that several neighbouring rows read in common.

    Attributes
    ----------
    first_row, last_row : int
        The rows, as a half-open range in the plan's order.
    first_block, last_block : int
        Entries of any member's block table, half-open.
    """

    first_row: int
    last_row: int
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who reads what.

    Attributes
    ----------
    order : int64 array (rows,)
        The caller's rows in the plan's order, sorted by block table.
    runs : tuple of SharedRun
        Outer runs before inner ones.
    tail_blocks : int64 array (rows,)
        In the plan's order: the first block that a row reads by itself.
    """

    order: Int64Array
    runs: tuple[SharedRun, ...]
    tail_blocks: Int64Array

    def blocks_saved(self) -> int:
        """Block reads that sharing saves, of all that reading row by row would take."""
        return sum(
            (run.last_row - run.first_row - 1) * (run.last_block - run.first_block)
            for run in self.runs
        )


def plan_attention(
    tables: Sequence[Int32Array],
    shareable: Sequence[int],
    num_queries: Sequence[int],
    block_size: int,
    cost: CostModel = ON_A_CPU,
) -> AttentionPlan:
    """Plan one batch; O(rows x (log(rows) + depth of the forest) + blocks).

    Parameters
    ----------
    tables : sequence of int32 arrays (blocks of the row,)
        Block tables.
    shareable : sequence of int
        Leading blocks of each row that lie wholly before its first query, so that every query of
        the row may see all of them.
    num_queries : sequence of int
        Queries of each row.
    block_size : int
        Tokens in a block.
    cost : CostModel
        Which runs pay: what does not is left to the runs inside, and to the tails.
    """
    rows = len(tables)
    prefixes = [table[:count] for table, count in zip(tables, shareable, strict=True)]
    keys = [prefix.astype(">i4").tobytes() for prefix in prefixes]
    order = sorted(range(rows), key=keys.__getitem__)
    grain = cost.run_blocks(block_size)
    common = [
        _common_blocks(prefixes[left], prefixes[right]) // grain * grain
        for left, right in pairwise(order)
    ]
    queries_before = np.cumsum([0, *(num_queries[row] for row in order)])
    tail = np.zeros(rows, np.int64)
    runs: list[SharedRun] = []
    # Outermost first: (rows, blocks already shared above them).
    stack = [(0, rows, 0)]
    while stack:
        first, last, above = stack.pop()
        if last - first < 2:
            continue
        depth = min(common[first : last - 1])
        if depth > above:
            queries = int(queries_before[last] - queries_before[first])
            if cost.sharing_pays(queries, (depth - above) * block_size):
                runs.append(SharedRun(first, last, above, depth))
                tail[first:last] = depth
                above = depth
        stack.extend(reversed(_split_at(common, first, last, depth, above)))
    return AttentionPlan(np.array(order, np.int64), tuple(runs), tail)


def _split_at(
    common: list[int], first: int, last: int, depth: int, above: int
) -> list[tuple[int, int, int]]:
    """Cut rows ``first`` to ``last`` where neighbours share no more than ``depth`` blocks."""
    cuts = [row + 1 for row in range(first, last - 1) if common[row] <= depth]
    bounds = [first, *cuts, last]
    return [(lo, hi, above) for lo, hi in pairwise(bounds)]


def _common_blocks(left: Int32Array, right: Int32Array) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size
