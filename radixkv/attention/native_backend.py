"""NativeBackend: the compiled operators, for bfloat16 on CPUs with AMX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from radixkv.attention.backend import LayerAttention
from radixkv.attention.batch import FULL, AttentionBatch, BlockTables, Span
from radixkv.attention.cost import ON_A_CPU
from radixkv.attention.plan import AttentionPlan, Int32Array, Int64Array
from radixkv.attention.reads import TO_THE_END, Reads, plan_reads
from radixkv.attention.store import LayerShape
from radixkv.attention.torch_backend import TorchBackend

# What the operator takes; see its checks.
DIM_MULTIPLE = 32
MAX_DIM = 256
MAX_GROUPS = 128


@dataclass(frozen=True, slots=True)
class WorkItems:
    """A step's reads as the operator takes them.

    Attributes
    ----------
    items : int32 tensor (items, 5)
        First query token, number of tokens, where the block table begins in ``tables``, and the
        range of key positions.
    tables : int32 tensor (blocks of all rows,)
        The rows' block tables, one after the other; there may be gaps between them.
    positions, first : int64 tensors (tokens,)
        The last and the first key that each query sees.
    """

    items: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor


def work_items(batch: AttentionBatch, span: Span, reads: Reads) -> WorkItems:
    """The reads of one step as the operator takes them, for layers with this span."""
    rows = batch.rows
    places = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row.table) for row in rows], out=places[1:])
    items = reads.items.copy()
    items[:, 4] = np.minimum(items[:, 4], batch.stops()[items[:, 2]])
    items[:, 2] = places[items[:, 2]]
    return WorkItems(
        torch.from_numpy(items.astype(np.int32)),
        torch.from_numpy(np.concatenate([row.table for row in rows])),
        torch.from_numpy(batch.positions),
        torch.from_numpy(span.first_visible(batch.positions)),
    )


class _Decoding:
    """Work items of full attention for rows that decode, good for all steps of their batch.

    All that changes is where tails end, and now and then where tables begin.
    """

    def __init__(self, batch: AttentionBatch, reads: Reads) -> None:
        self._open = np.flatnonzero(reads.items[:, 4] == TO_THE_END)
        self._rows = reads.items[:, 2]
        self._of_open = self._rows[self._open]
        self._items = reads.items.astype(np.int32)
        self._given = torch.from_numpy(self._items)
        self._first = torch.zeros(len(batch.positions), dtype=torch.int64)
        self._lines: Int32Array | None = None
        self._tables = torch.empty(0, dtype=torch.int32)

    def at(self, batch: AttentionBatch, tables: BlockTables) -> WorkItems:
        """Those of a batch that was grown."""
        if tables.lines is not self._lines:
            self._lines = tables.lines
            self._tables = torch.from_numpy(tables.lines).view(-1)
            self._items[:, 2] = self._rows * tables.lines.shape[1]
        self._items[self._open, 4] = batch.positions[self._of_open] + 1
        return WorkItems(self._given, self._tables, batch.position_ids, self._first)


@dataclass(frozen=True, slots=True)
class DirectLayer:
    """What a layer's attention reads and writes in a step, for an operator that does both.

    Attributes
    ----------
    keys, values : bfloat16 tensors (blocks, block_size, kv_heads, dim)
    slots : int64 tensor (tokens,)
        Where each token's key and value go; -1 for those that are there already.
    copies : int64 tensor (2, copied) or None
        Slots to copy then, sources and targets, one after the other.
    reads : list of tensor
        The fields of `WorkItems`, in order.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    copies: torch.Tensor | None
    reads: list[torch.Tensor]


class NativeBackend(TorchBackend):
    """Reads every shared run once, in one operator a layer; what that cannot do, torch does."""

    # The plan and the places of queries for which the items were made.
    _last: tuple[AttentionPlan, Int64Array, _Decoding] | None = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        if not pairs:
            return
        stores = [*self.store.keys, *self.store.values]
        sources, targets = torch.tensor(pairs).T.contiguous()
        torch.ops.radixkv.copy_blocks(stores, sources, targets)

    def direct(self, layer: int, batch: AttentionBatch, span: Span) -> DirectLayer:
        """What a whole block needs of this layer."""
        reads = self.reads(batch, span)
        writes = batch.prepared.get("writes")
        if not isinstance(writes, _Writes):
            writes = batch.prepared["writes"] = _writes(batch)
        return DirectLayer(
            self.store.keys[layer],
            self.store.values[layer],
            writes.slots,
            writes.copies,
            [reads.items, reads.tables, reads.positions, reads.first],
        )

    def reads(self, batch: AttentionBatch, span: Span) -> WorkItems:
        """What layers with this span read in a step; made once for all of them."""
        kept = ("native", span)
        items = batch.prepared.get(kept)
        if not isinstance(items, WorkItems):
            items = batch.prepared[kept] = self._work_items(batch, span)
        return items

    def _work_items(self, batch: AttentionBatch, span: Span) -> WorkItems:
        """The step's; those of the step before, moved on, where its rows only went on."""
        # What is out of a window should be read no more.
        if span != FULL or batch.tables is None:
            return work_items(batch, span, plan_reads(batch, span, ON_A_CPU))
        plan, offsets, decoding = self._last or (None, None, None)
        if decoding is None or plan is not batch.plan or offsets is not batch.offsets:
            decoding = _Decoding(batch, plan_reads(batch, span, ON_A_CPU))
            self._last = batch.plan, batch.offsets, decoding
        return decoding.at(batch, batch.tables)

    def _write(
        self, layer: int, batch: AttentionBatch, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        if batch.written is None and key[0].is_contiguous() and value[0].is_contiguous():
            torch.ops.radixkv.write_kv(
                key, value, self.store.keys[layer], self.store.values[layer], batch.slots
            )
            self._copy(layer, batch)
        else:
            super()._write(layer, batch, key, value)

    def forward(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        if attention.softcap or not fits(self.store.layers[attention.layer], query.shape[1]):
            return super().forward(attention, batch, query, key, value)
        asked, query = query.dtype, query.to(self.store.dtype)
        if key is not None and value is not None:
            key, value = key.to(self.store.dtype), value.to(self.store.dtype)
            self._write(attention.layer, batch, key, value)
        reads = self.reads(batch, attention.span)
        if query.stride(-1) != 1:
            query = query.contiguous()
        out: torch.Tensor
        out, lse = torch.ops.radixkv.paged_attention(
            query,
            self.store.keys[attention.layer],
            self.store.values[attention.layer],
            reads.items,
            reads.tables,
            reads.positions,
            reads.first,
            attention.scale,
        )
        if attention.sinks is not None:
            # A sink adds to the denominator alone: scale by the share that the keys keep.
            out = out * torch.sigmoid(lse - attention.sinks.float()).unsqueeze(-1)
        return out.to(asked)


class _Writes(NamedTuple):
    """The slots and the copies of a `DirectLayer`, the same in all layers."""

    slots: torch.Tensor
    copies: torch.Tensor | None


def _writes(batch: AttentionBatch) -> _Writes:
    slots, copies = batch.slots, None
    if batch.written is not None:
        slots = torch.full((batch.num_tokens,), -1)
        slots[batch.written] = batch.slots
    if batch.copies:
        sources, targets = zip(*batch.copies, strict=True)
        copies = torch.stack((torch.cat(sources), torch.cat(targets)))
    return _Writes(slots, copies)


def fits(shape: LayerShape, heads: int) -> bool:
    """Whether the operator takes a layer of this shape."""
    dims = (shape.key_dim, shape.value_dim)
    groups = heads // shape.kv_heads
    return groups <= MAX_GROUPS and all(d % DIM_MULTIPLE == 0 and d <= MAX_DIM for d in dims)
