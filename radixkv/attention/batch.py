"""AttentionBatch: one step's rows laid out for attention, whichever backend reads it.

A row is a sequence with some queries. Rows stand in the order of the plan, so that the queries of
a shared run are one contiguous range of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from radixkv.attention.cost import ON_A_CPU, CostModel
from radixkv.attention.plan import AttentionPlan, Int32Array, Int64Array, plan_attention


@dataclass(frozen=True, slots=True)
class Span:
    """Which keys a query may see besides those after it, which it never sees.

    Attributes
    ----------
    window : int
        Sliding window: a query sees the last ``window`` keys, itself among them; 0 for all.
    chunk : int
        Chunked attention: a query sees the keys of its own chunk of positions; 0 for all.
    """

    window: int = 0
    chunk: int = 0

    def first_visible(self, positions: Int64Array) -> Int64Array:
        """The first key position that a query at each position sees; int64, same shape."""
        first = np.zeros_like(positions)
        if self.window:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


FULL = Span()


class Row(NamedTuple):
    """One sequence's share of a step.

    Attributes
    ----------
    table : int32 array (blocks,)
        Block table; covers ``start + num_queries`` tokens.
    start : int
        Position of the first query; everything before it is in the blocks.
    num_queries : int
        Queries, at positions ``start`` and on.
    """

    table: Int32Array
    start: int
    num_queries: int

    @property
    def stop(self) -> int:
        return self.start + self.num_queries


@dataclass(slots=True)
class AttentionBatch:
    """One step's attention.

    Attributes
    ----------
    plan : AttentionPlan
    rows : list of Row
        In the plan's order.
    block_size : int
    offsets : int64 array (rows + 1,)
        Where each row's queries begin among the step's tokens.
    positions : int64 array (tokens,)
        Of every query in its sequence.
    position_ids : int64 tensor (tokens,)
        The same, for the model.
    slots : int64 tensor (written,)
        Slots to write.
    written : int64 tensor (written,) or None
        Which tokens have a slot; None if all have.
    copies : list of (sources, targets)
        Slots to copy in each layer once its keys and values are written, int64 tensors each; one
        pair after the other.
    prepared : dict
        What a backend worked out from the rows, shared by all layers of the step.
    """

    plan: AttentionPlan
    rows: list[Row]
    block_size: int
    offsets: Int64Array
    positions: Int64Array
    position_ids: torch.Tensor
    slots: torch.Tensor
    written: torch.Tensor | None = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    prepared: dict[object, object] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def stops(self) -> Int64Array:
        """How many tokens each row has with its queries; int64 (rows,)."""
        stops: Int64Array = self.positions[self.offsets[1:] - 1] + 1
        return stops

    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that a full-attention layer reads, and would read without sharing."""
        unshared = int(self.stops().sum())
        return unshared - self.plan.blocks_saved() * self.block_size, unshared

    def grown(self, tables: Mapping[int, Int32Array]) -> AttentionBatch:
        """The next step, if every row had one query and goes on by another.

        Equals what `make_batch` makes of it, at a fraction of the time.

        Parameters
        ----------
        tables : mapping of int to int32 array (blocks,)
            By the row's place in the plan's order, the block tables that have changed.
        """
        size = self.block_size
        positions = self.positions + 1
        slots = self.slots.numpy() + 1
        for place, table in tables.items():
            index, offset = divmod(int(positions[place]), size)
            slots[place] = int(table[index]) * size + offset
        rows = [
            Row(tables.get(place, row.table), row.start + 1, 1)
            for place, row in enumerate(self.rows)
        ]
        return AttentionBatch(
            self.plan,
            rows,
            size,
            self.offsets,
            positions,
            torch.from_numpy(positions),
            torch.from_numpy(slots),
        )


def table_slots(table: Int32Array, start: int, stop: int, block_size: int) -> Int64Array:
    """Slots of the tokens ``start`` to ``stop``; int64 (stop - start,)."""
    positions = np.arange(start, stop)
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size


def make_batch(
    rows: Sequence[Row],
    block_size: int,
    *,
    keep: Sequence[bool] | None = None,
    plan: AttentionPlan | None = None,
    cost: CostModel = ON_A_CPU,
) -> AttentionBatch:
    """Lay rows out for attention.

    Parameters
    ----------
    rows : sequence of Row
        In any order; ``batch.plan.order`` tells where each went.
    block_size : int
    keep : sequence of bool, optional
        Per row, whether its keys and values are written. A row that does not write finds them in
        its blocks, cached already or written by another row of this step. All write unless given.
    plan : AttentionPlan, optional
        An earlier plan of the same rows, of which only the lengths have grown since.
    cost : CostModel
        The backend's, for a new plan.
    """
    if not rows or any(row.num_queries < 1 for row in rows):
        raise ValueError("a step needs at least one row, and every row at least one query")
    if plan is None:
        plan = plan_attention(
            [row.table for row in rows],
            [row.start // block_size for row in rows],
            [row.num_queries for row in rows],
            block_size,
            cost,
        )
    ordered = [rows[index] for index in plan.order]
    counts = np.array([row.num_queries for row in ordered], np.int64)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    starts = np.array([row.start for row in ordered], np.int64)
    positions = np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1])
    slots = _slots(ordered, starts, counts, positions, block_size)
    written = None
    if keep is not None and not all(keep):
        kept = np.repeat([keep[index] for index in plan.order], counts)
        written = torch.from_numpy(np.flatnonzero(kept))
        slots = slots[kept]
    return AttentionBatch(
        plan,
        ordered,
        block_size,
        offsets,
        positions,
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        written,
    )


def _slots(
    rows: Sequence[Row],
    starts: Int64Array,
    counts: Int64Array,
    positions: Int64Array,
    block_size: int,
) -> Int64Array:
    """The slot of every query, int64 (tokens,); for all rows at once, as steps have many."""
    first, last = starts // block_size, (starts + counts - 1) // block_size + 1
    spans = zip(rows, first.tolist(), last.tolist(), strict=True)
    blocks = np.concatenate([row.table[low:high] for row, low, high in spans]).astype(np.int64)
    # Where each row's first block stands among these, less its place in the table.
    base = np.cumsum(last - first) - last
    places = np.repeat(base, counts) + positions // block_size
    return blocks[places] * block_size + positions % block_size
