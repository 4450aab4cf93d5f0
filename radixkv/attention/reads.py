"""Reads: a plan as a list of who reads which keys, cut so that they fill the processors.

A read is a range of queries, one row's block table, and a range of keys. Runs are reads of several
rows' queries, tails reads of one row's. The list outlives the step: a tail goes on to wherever its
row ends, so while rows only grow it stays right, and is made anew only when the parts have grown
too uneven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.attention.batch import AttentionBatch, Span
from radixkv.attention.cost import CostModel, parts_of
from radixkv.attention.plan import Int64Array

# The end of a read that goes as far as its queries see.
TO_THE_END = 2**31 - 1

_FIRST, _COUNT, _ROW, _START, _END = range(5)


@dataclass(frozen=True, slots=True)
class Reads:
    """Who reads what in the layers of one span.

    Attributes
    ----------
    items : int64 array (reads, 5)
        First query, number of queries, row whose table is read through, first key, and the key
        behind the last or `TO_THE_END`. Queries and rows are counted in the plan's order. What
        takes longest comes first.
    until : int64 array (rows,)
        The parts are even enough while no row is longer than this.
    """

    items: Int64Array
    until: Int64Array

    def last_for(self, batch: AttentionBatch) -> bool:
        """Whether these reads still do for a later step of the same plan."""
        return bool((batch.stops() <= self.until).all())


def plan_reads(
    batch: AttentionBatch,
    span: Span,
    cost: CostModel,
    *,
    kv_heads: int = 1,
    max_queries: int = 0,
) -> Reads:
    """The reads of a step, for layers with this span; O(reads × log + tokens).

    Parameters
    ----------
    batch : AttentionBatch
    span : Span
        Keys that none of a read's queries sees are left out.
    cost : CostModel
    kv_heads : int
        See `CostModel.part`.
    max_queries : int
        Most queries of one read; 0 for no limit.
    """
    stops = batch.stops()
    items = _cut_queries(_runs_and_tails(batch), max_queries)
    # A run lies before all of its queries, and a tail's last query is its row's last of the read.
    last = batch.positions[items[:, _FIRST] + items[:, _COUNT] - 1]
    seen_to = np.minimum(items[:, _END], last + 1)
    items[:, _START] = np.maximum(items[:, _START], _first_seen(batch, span, items))
    # Out of the window of every query, and windows only move on.
    seen = items[:, _START] < seen_to
    items, seen_to = items[seen], seen_to[seen]
    part = cost.part(seen_to - items[:, _START], kv_heads)
    until = np.full(len(stops), TO_THE_END, np.int64)
    if cost.split:
        until = -(-stops // part) * part
        items, seen_to = _cut_at_multiples(items, seen_to, part)
    elif part:
        until = stops + part
        items, seen_to = _cut_evenly(items, seen_to, part, cost.tile)
    order = np.lexsort((-items[:, _COUNT], items[:, _START] - seen_to))
    return Reads(items[order], until)


def _runs_and_tails(batch: AttentionBatch) -> Int64Array:
    runs = np.array(
        [(r.first_row, r.last_row, r.first_block, r.last_block) for r in batch.plan.runs], np.int64
    ).reshape(-1, 4)
    items = np.empty((len(runs) + len(batch.rows), 5), np.int64)
    shared, own = items[: len(runs)], items[len(runs) :]
    shared[:, _FIRST] = batch.offsets[runs[:, 0]]
    shared[:, _COUNT] = batch.offsets[runs[:, 1]] - shared[:, _FIRST]
    shared[:, _ROW] = runs[:, 0]
    shared[:, _START:] = runs[:, 2:] * batch.block_size
    own[:, _FIRST] = batch.offsets[:-1]
    own[:, _COUNT] = np.diff(batch.offsets)
    own[:, _ROW] = np.arange(len(batch.rows))
    own[:, _START] = batch.plan.tail_blocks * batch.block_size
    own[:, _END] = TO_THE_END
    return items


def _cut_queries(items: Int64Array, most: int) -> Int64Array:
    """Reads of at most this many queries each; none cut if 0."""
    if not most or items[:, _COUNT].max() <= most:
        return items
    pieces = -(-items[:, _COUNT] // most)
    cut = np.repeat(items, pieces, 0)
    offset = _counted(pieces) * most
    cut[:, _FIRST] += offset
    cut[:, _COUNT] = np.minimum(cut[:, _COUNT] - offset, most)
    return cut


def _first_seen(batch: AttentionBatch, span: Span, items: Int64Array) -> Int64Array:
    """The first key that any query of each read sees; int64 (reads,)."""
    if not (span.window or span.chunk):
        return np.zeros(len(items), np.int64)
    # A value behind the last, so that a read may end there.
    first = np.append(span.first_visible(batch.positions), TO_THE_END)
    bounds = np.stack([items[:, _FIRST], items[:, _FIRST] + items[:, _COUNT]], 1)
    return np.minimum.reduceat(first, bounds.ravel())[::2]


def _cut_at_multiples(
    items: Int64Array, seen_to: Int64Array, part: int
) -> tuple[Int64Array, Int64Array]:
    """Cut at every multiple of ``part``."""
    begin = items[:, _START] // part * part
    pieces = -(-(seen_to - begin) // part)
    return _cut(items, seen_to, pieces, np.repeat(begin, pieces) + (_counted(pieces) + 1) * part)


def _cut_evenly(
    items: Int64Array, seen_to: Int64Array, part: int, tile: int
) -> tuple[Int64Array, Int64Array]:
    """Cut at multiples of ``tile`` into parts that are equal but for a tile."""
    # Tiles begin at multiples wherever a read does: a cut elsewhere would have one read twice.
    begin = items[:, _START] // tile * tile
    pieces = parts_of(seen_to - items[:, _START], part)
    ends = (_counted(pieces) + 1) * np.repeat(seen_to - begin, pieces) // np.repeat(pieces, pieces)
    return _cut(items, seen_to, pieces, np.repeat(begin, pieces) + ends // tile * tile)


def _cut(
    items: Int64Array, seen_to: Int64Array, pieces: Int64Array, border: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Cut each read into pieces that end at their ``border``, the last where the read does."""
    cut = np.repeat(items, pieces, 0)
    place = _counted(pieces)
    inner = place < np.repeat(pieces, pieces) - 1
    cut[:, _START] = np.where(place > 0, np.roll(border, 1), cut[:, _START])
    cut[:, _END] = np.where(inner, border, cut[:, _END])
    return cut, np.where(inner, border, np.repeat(seen_to, pieces))


def _counted(sizes: Int64Array) -> Int64Array:
    """0 to size - 1 for each size, one after the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
