"""TritonBackend: the paged kernels of `radixkv_kernels`; the default on a GPU.

A layer is one launch that writes keys and values, one that attends, and one that merges if any
query has more than one read. Nothing waits for the device: what a step must know is worked out on
the host and sent once, and work lists stay there while rows only grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from radixkv_kernels import copy_blocks, paged_attention, write_kv
from radixkv_kernels.checks import FLOATS, LARGEST_HEAD
from radixkv_kernels.launch import load_kernel, target_of
from radixkv_kernels.tiles import Tile, choose_tile, width_of
from radixkv_kernels.worklist import WorkList, build_work_list

from radixkv.attention.backend import LayerAttention
from radixkv.attention.batch import AttentionBatch, Row, Span
from radixkv.attention.cost import CostModel, on_a_gpu
from radixkv.attention.placement import send
from radixkv.attention.plan import AttentionPlan, Int64Array
from radixkv.attention.reads import Reads, plan_reads
from radixkv.attention.store import KVStore, LayerShape
from radixkv.errors import ConfigError

# Rows of an item's query tile in the kernel's larger configurations; `choose_tile` has the others.
MANY_ROWS = 64
# Partial outputs of one launch take no more memory than this, if it can be helped.
PARTIALS_AT_ONCE = 2**28


# Where a batch keeps its `StepTensors`; work lists are kept under their `WorkKey`.
STEP = "triton step"


# Done one after the other; nearly always there is one.
WorkLists = tuple[WorkList, ...]


class WorkKey(NamedTuple):
    """Layers that read by the same work list."""

    span: Span
    heads: int
    kv_heads: int

    @property
    def max_queries(self) -> int:
        """Most queries of a read: as many as fill a program's tile."""
        return max(1, MANY_ROWS // (self.heads // self.kv_heads))


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What all layers of a step ask for, on the device.

    Attributes
    ----------
    tables : int32 tensor (rows, most blocks of a row)
        Behind a row's own blocks is nothing that anybody reads.
    positions : int32 tensor (tokens,)
    slots : int64 tensor (tokens,)
        Where to write; −1 for a token that is not written.
    copies : list of (sources, targets)
        See `AttentionBatch`.
    padded : bool
        Whether there are tokens that belong to no row, at negative positions.
    """

    tables: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    padded: bool = False


@dataclass(frozen=True, slots=True)
class _Lists:
    """The work lists of a plan, which outlive the step."""

    plan: AttentionPlan
    offsets: Int64Array
    made: dict[WorkKey, tuple[Reads, WorkLists]]


class TritonBackend:
    """Reads every shared run once, in one launch a layer.

    Parameters
    ----------
    store : KVStore
        On a GPU; or on the CPU, for Triton's interpreter.
    cost : CostModel, optional
        Instead of the one for this device.
    invariant : bool
        Cut keys at fixed places and use one tile: neither what a row shares nor its batch mates
        change a bit of its output. Costs some speed, and memory for partial outputs: of every query
        one for each `INVARIANT_SPLIT` keys, but no more than `PARTIALS_AT_ONCE` bytes at a time.

    Raises
    ------
    ConfigError
        For keys and values that the kernels do not take, or where they cannot run.
    """

    def __init__(
        self, store: KVStore, *, cost: CostModel | None = None, invariant: bool = False
    ) -> None:
        _refuse_unfit(store)
        self.store = store
        self._target = target_of(store.device)
        if cost is None:
            tiles = [self._tile(shape, rows) for shape in store.layers for rows in (1, MANY_ROWS)]
            tile = max(tile.tokens for tile in tiles)
            cost = on_a_gpu(_processors(store.device), tile, invariant=invariant)
        self.cost = cost
        self._lists: _Lists | None = None
        self._sinks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend.copy_blocks`."""
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        copy_blocks([*self.store.keys, *self.store.values], sources, targets)

    def forward(
        self,
        attention: LayerAttention,
        batch: AttentionBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        asked, query = query.dtype, query.to(self.store.dtype)
        if query.stride(-1) != 1:
            query = query.contiguous()
        step = batch.prepared.get(STEP)
        if not isinstance(step, StepTensors):
            step = batch.prepared[STEP] = step_tensors(batch, self.store.device)
        layer, heads = attention.layer, query.shape[1]
        keys, values = self.store.keys[layer], self.store.values[layer]
        if key is not None and value is not None:
            self._write(layer, key, value, step.slots)
            for sources, targets in step.copies:
                self.store.copy_slots(layer, sources, targets)
        shape = self.store.layers[layer]
        out = query.new_empty(len(query), heads, shape.value_dim)
        if step.padded:
            # Nothing is read for padding, and nothing written.
            out.zero_()
        for work in self.work_lists(batch, WorkKey(attention.span, heads, shape.kv_heads)):
            paged_attention(
                *(query, keys, values, step.tables, work, step.positions, out),
                scale=attention.scale,
                window=attention.span.window,
                chunk=attention.span.chunk,
                softcap=attention.softcap,
                sinks=self._float_sinks(attention),
                key_scale=self.store.scales.get(("key", layer)),
                value_scale=self.store.scales.get(("value", layer)),
                # The tile decides how sums are grouped, so it may not follow the batch.
                tile=self._tile(shape, MANY_ROWS) if self.cost.split else None,
            )
        return out.to(asked)

    def _write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        store = self.store
        write_kv(
            *(key, value, store.keys[layer], store.values[layer], slots),
            key_scale=store.scales.get(("key", layer)),
            value_scale=store.scales.get(("value", layer)),
        )

    def work_lists(self, batch: AttentionBatch, key: WorkKey) -> WorkLists:
        """The step's work for layers of this kind; kept until the plan or its cuts change."""
        made = batch.prepared.get(key)
        if isinstance(made, tuple):
            return made
        lists = self._lists
        if lists is None or lists.plan is not batch.plan or any(lists.offsets != batch.offsets):
            lists = self._lists = _Lists(batch.plan, batch.offsets, {})
        reads, works = lists.made.get(key, (None, None))
        if reads is None or works is None or not reads.last_for(batch):
            reads = plan_reads(
                batch, key.span, self.cost, kv_heads=key.kv_heads, max_queries=key.max_queries
            )
            each = max(4 * key.heads * (1 + shape.value_dim) for shape in self.store.layers)
            works = tuple(
                _sent(build_work_list(items, batch.num_tokens), self.store.device)
                for items in in_turns(reads.items, batch.num_tokens, PARTIALS_AT_ONCE // each)
            )
            lists.made[key] = (reads, works)
        batch.prepared[key] = works
        return works

    def _tile(self, shape: LayerShape, rows: int) -> Tile:
        widths = (width_of(shape.key_dim), width_of(shape.value_dim))
        return choose_tile(self._target, rows, *widths, self.store.kv_dtype.itemsize)

    def _float_sinks(self, attention: LayerAttention) -> torch.Tensor | None:
        """A layer's sinks as the kernel takes them, made once."""
        sinks = attention.sinks
        if sinks is None:
            return None
        given, made = self._sinks.get(attention.layer, (None, None))
        if given is not sinks or made is None:
            made = sinks.detach().to(torch.float32).contiguous()
            self._sinks[attention.layer] = (sinks, made)
        return made


def in_turns(items: Int64Array, num_queries: int, most: int) -> list[Int64Array]:
    """Reads in as many lists as it takes for none to leave more than ``most`` partials.

    Each has all reads of its queries, so that what a query merges, and in which order, is as if
    there were one. A query with more reads than ``most`` is alone in its list.
    """
    first, count = items[:, 0], items[:, 1]
    if int(count.sum()) <= most:
        return [items]
    steps = np.zeros(num_queries + 1, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, first + count, -1)
    before = np.concatenate([[0], np.cumsum(np.cumsum(steps)[:-1])])
    lists, begin = [], 0
    while begin < num_queries:
        end = int(np.searchsorted(before, before[begin] + most, side="right")) - 1
        end = max(end, begin + 1)
        own = items[(first < end) & (first + count > begin)].copy()
        own[:, 1] = np.minimum(own[:, 0] + own[:, 1], end)
        own[:, 0] = np.maximum(own[:, 0], begin)
        own[:, 1] -= own[:, 0]
        lists.append(own)
        begin = end
    return lists


def step_tensors(batch: AttentionBatch, device: torch.device) -> StepTensors:
    """Lay a step's tables, positions and slots out, and send each in one copy."""
    slots = batch.slots
    if batch.written is not None:
        slots = torch.full((batch.num_tokens,), -1)
        slots[batch.written] = batch.slots
    return StepTensors(
        send(padded_tables(batch.rows), device),
        send(torch.from_numpy(batch.positions.astype(np.int32)), device),
        send(slots, device),
        [(send(sources, device), send(targets, device)) for sources, targets in batch.copies],
    )


def padded_tables(rows: Sequence[Row]) -> torch.Tensor:
    """Block tables one below the other; int32 (rows, most blocks of a row)."""
    tables = np.zeros((len(rows), max(len(row.table) for row in rows)), np.int32)
    for line, row in zip(tables, rows, strict=True):
        line[: len(row.table)] = row.table
    return torch.from_numpy(tables)


def _sent(work: WorkList, device: torch.device) -> WorkList:
    return replace(
        work,
        items=send(work.items, device),
        num_items=send(work.num_items, device),
        merge_ptr=send(work.merge_ptr, device),
        merge_idx=send(work.merge_idx, device),
    )


def _refuse_unfit(store: KVStore) -> None:
    if store.dtype not in FLOATS or not (store.quantized or store.kv_dtype == store.dtype):
        raise ConfigError(
            f"the Triton kernels take no keys and values in {store.kv_dtype} "
            f"for a model in {store.dtype}"
        )
    for layer, shape in enumerate(store.layers):
        most = LARGEST_HEAD[store.dtype]
        if max(shape.key_dim, shape.value_dim) > most:
            half = LARGEST_HEAD[torch.bfloat16]
            fits = max(shape.key_dim, shape.value_dim) <= half
            raise ConfigError(
                f"the Triton kernels take heads up to {most} wide in {store.dtype}, but layer "
                f"{layer} has keys of {shape.key_dim} and values of {shape.value_dim}; use "
                + ("dtype='bfloat16' or device='cpu'" if fits else "device='cpu'")
            )
    try:
        load_kernel("attention_jit", "attend_kernel", store.device)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"the Triton backend cannot run on {store.device}: {error}") from error


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # The interpreter runs one program after the other.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
