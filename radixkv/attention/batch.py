"""AttentionBatch: one step's rows laid out for attention, whichever backend reads it.

A row is a sequence with some queries. Rows stand in the order of the plan, so that the queries of
a shared run are one contiguous range of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

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


class BlockTables:
    """Rows' block tables in one array, a line each; what decodes goes on with it, in place.

    Attributes
    ----------
    lines : int32 array (rows, most blocks of a row)
        What stands in a line behind its table means nothing.
    lengths : list of int
        Blocks of each table.
    """

    __slots__ = ("lengths", "lines")

    def __init__(self, tables: Sequence[Int32Array]) -> None:
        self.lengths = [len(table) for table in tables]
        self.lines = _lines(tables, self._width(max(self.lengths)))

    @staticmethod
    def _width(num_blocks: int) -> int:
        """Room for so many, and for some that come later."""
        return num_blocks + max(num_blocks // 4, 8)

    def __getitem__(self, place: int) -> Int32Array:
        """The table of one row, good until it is put anew."""
        table: Int32Array = self.lines[place, : self.lengths[place]]
        return table

    def put(self, place: int, table: Int32Array) -> None:
        """The row has another table from now on."""
        length = self.lengths[place] = len(table)
        if length > self.lines.shape[1]:
            self.lines = _lines(self.lines, self._width(length))
        self.lines[place, :length] = table


def _lines(tables: Sequence[Int32Array] | Int32Array, width: int) -> Int32Array:
    lines = np.zeros((len(tables), width), np.int32)
    for line, table in zip(lines, tables, strict=True):
        line[: len(table)] = table
    return lines


class _GrownRows(Sequence[Row]):
    """Rows of one query each, made when somebody looks at them."""

    def __init__(self, tables: BlockTables, positions: Int64Array) -> None:
        self._tables = tables
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[each] for each in range(len(self))[place]]
        return Row(self._tables[place], int(self._positions[place]), 1)


@dataclass(slots=True)
class AttentionBatch:
    """One step's attention.

    Attributes
    ----------
    plan : AttentionPlan
    rows : sequence of Row
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
    tables : BlockTables or None
        The rows' tables once more, if this batch was grown from another.
    prepared : dict
        What a backend worked out from the rows, shared by all layers of the step.
    """

    plan: AttentionPlan
    rows: Sequence[Row]
    block_size: int
    offsets: Int64Array
    positions: Int64Array
    position_ids: torch.Tensor
    slots: torch.Tensor
    written: torch.Tensor | None = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tables: BlockTables | None = None
    prepared: dict[object, object] = field(default_factory=dict)
    _kv_tokens: tuple[int, int] | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def stops(self) -> Int64Array:
        """How many tokens each row has with its queries; int64 (rows,)."""
        stops: Int64Array = self.positions[self.offsets[1:] - 1] + 1
        return stops

    def kv_tokens(self) -> tuple[int, int]:
        """KV tokens that a full-attention layer reads, and would read without sharing."""
        if self._kv_tokens is None:
            unshared = int(self.stops().sum())
            self._kv_tokens = unshared - self.plan.blocks_saved() * self.block_size, unshared
        return self._kv_tokens

    def grown(self, tables: Mapping[int, Int32Array]) -> AttentionBatch:
        """The next step, if every row had one query and goes on by another.

        Equals what `make_batch` makes of it, at a fraction of the time. From now on this batch is
        good for nothing: the next one has its block tables.

        Parameters
        ----------
        tables : mapping of int to int32 array (blocks,)
            By the row's place in the plan's order, the block tables that have changed.
        """
        size, count = self.block_size, len(self.positions)
        own = self.tables
        if own is None:
            own = BlockTables([row.table for row in self.rows])
        positions = self.positions + 1
        slots = self.slots.numpy() + 1
        for place, table in tables.items():
            own.put(place, table)
            index, offset = divmod(int(positions[place]), size)
            slots[place] = int(table[index]) * size + offset
        read, unshared = self.kv_tokens()
        return AttentionBatch(
            self.plan,
            _GrownRows(own, positions),
            size,
            self.offsets,
            positions,
            torch.from_numpy(positions),
            torch.from_numpy(slots),
            tables=own,
            _kv_tokens=(read + count, unshared + count),
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
