"""The kernels in plain torch: what runs without Triton, and what the kernels must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixkv_kernels.checks import (
    BlockIds,
    as_words,
    check_copy_blocks,
    check_paged_attention,
    check_write_kv,
)
from radixkv_kernels.worklist import NOTHING, WorkList


@torch.no_grad()
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write each token's key and value into its slot; see `radixkv_kernels.write_kv`.

    Reads which slots are negative on the host, so on a GPU it waits for the stream.

    Parameters
    ----------
    key, value : Tensor
        float32, float16 or bfloat16, any strides, shapes (T, Hkv, D) and (T, Hkv, Dv).
    key_cache, value_cache : Tensor
        Changed in place, contiguous, shapes (num_blocks, block_size, Hkv, D) and (..., Dv).
    slot_mapping : Tensor
        int64 or int32; a negative slot skips its token, shape (T,).
    key_scale, value_scale : Tensor, optional
        float32, shape (Hkv,).
    """
    check_write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    written = slot_mapping >= 0
    slots = slot_mapping[written].long()
    for rows, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        new = _kept(rows[written], cache.dtype, scale)
        if cache.element_size() == 1:
            # As bytes: not every operator knows 8-bit floats.
            cache, new = cache.view(torch.uint8), new.view(torch.uint8)
        cache.flatten(0, 1).index_copy_(0, slots, new)


def _kept(numbers: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Numbers (..., Hkv, D) as a cache keeps them."""
    if scale is not None:
        numbers = numbers.float() / scale[:, None]
    if dtype == torch.int8:
        return numbers.float().round().clamp(-127, 127).nan_to_num(0.0).to(dtype)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        numbers = numbers.clamp(-most, most)
    return numbers.to(dtype)


@torch.no_grad()
def copy_blocks(caches: Sequence[Tensor], sources: BlockIds, targets: BlockIds) -> None:
    """Copy whole blocks, all sources read first; see `radixkv_kernels.copy_blocks`.

    Parameters
    ----------
    caches : sequence of Tensor
        Changed in place, contiguous, any dtype, each of shape (num_blocks, ...).
    sources, targets : sequence of int or Tensor
        Block ids; no target twice, shape (P,).
    """
    pairs = check_copy_blocks(caches, sources, targets)
    if not (caches and pairs):
        return
    ids = torch.tensor(pairs, device=caches[0].device)
    for cache in caches:
        blocks = as_words(cache)
        blocks.index_copy_(0, ids[:, 1], blocks.index_select(0, ids[:, 0]))


@torch.no_grad()
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    positions: Tensor,
    out: Tensor | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor | tuple[Tensor, Tensor]:
    """Execute a work list item by item, then merge; see `radixkv_kernels.paged_attention`.

    Reads the work list on the host, so on a GPU it waits for the stream.

    Parameters
    ----------
    query, key_cache, value_cache, block_tables, work, positions, out : Tensor, WorkList
        As for the kernel.
    scale, causal, window, chunk, softcap, sinks, alibi_slopes, key_scale, value_scale, return_lse
        As for the kernel.
    compute_dtype : torch.dtype
        Of all arithmetic: float32 as in the kernel, or float64.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        `out`, and if asked for, the base-2 log-sum-exps, float32 (T, H).
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], *value_cache.shape[3:])
    scales = {
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "key_scale": key_scale,
        "value_scale": value_scale,
    }
    check_paged_attention(
        *(query, key_cache, value_cache, block_tables, work, positions, out, None),
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        scales=scales,
    )
    layer = _Layer(
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        positions=positions,
        scale=scale,
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        key_scale=key_scale,
        value_scale=value_scale,
        dtype=compute_dtype,
    )
    _, heads, value_dim = out.shape
    tokens = range(work.num_queries) if work.order is None else work.order.tolist()
    partial_out = out.new_zeros(work.num_partials, heads, value_dim, dtype=compute_dtype)
    partial_lse = out.new_zeros(work.num_partials, heads, dtype=compute_dtype)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)

    def finish(token: int, outputs: Tensor, lses: Tensor) -> None:
        out[token], lse[token] = _merge(outputs, lses, sinks)

    for first, count, row, start, end, partial in work.items[: int(work.num_items)].tolist():
        served = tokens[first : first + count]
        outputs, lses = layer.attend(list(served), row, start, end)
        if partial >= 0:
            partial_out[partial : partial + count] = outputs
            partial_lse[partial : partial + count] = lses
        else:
            for i, token in enumerate(served):
                finish(token, outputs[i, None], lses[i, None])
    bounds = work.merge_ptr.tolist()
    for i, token in enumerate(tokens):
        if bounds[i] < bounds[i + 1]:
            merged = work.merge_idx[bounds[i] : bounds[i + 1]].long()
            finish(token, partial_out[merged], partial_lse[merged])
    return (out, lse) if return_lse else out


@dataclass(frozen=True, slots=True)
class _Layer:
    """What all items of a call have in common."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    positions: Tensor
    scale: float
    causal: bool
    window: int
    chunk: int
    softcap: float
    alibi_slopes: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    dtype: torch.dtype

    def attend(self, tokens: list[int], row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Partial outputs (n, H, Dv) of some queries, and their log-sum-exps (n, H)."""
        query = self.query[tokens].to(self.dtype)
        position = self.positions[tokens].long()
        if self.causal:
            end = min(end, int(position.max()) + 1)
        index = torch.arange(start, max(start, end), device=query.device)
        visible = self.visible(index, position)
        # Blocks that no query sees may be missing from the table, and their keys be anything.
        seen = visible.any(0)
        index, visible = index[seen], visible[:, seen]
        key = self.gather(self.key_cache, self.key_scale, row, index)
        value = self.gather(self.value_cache, self.value_scale, row, index)

        heads, kv_heads = query.shape[1], key.shape[1]
        grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
        logits = torch.einsum("nhgd,khd->nhgk", grouped, key).flatten(1, 2) * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.alibi_slopes is not None:
            distance = index[None, :] - position[:, None]
            logits = logits + self.alibi_slopes.to(self.dtype)[:, None] * distance[:, None, :]
        logits = (logits * math.log2(math.e)).masked_fill(~visible[:, None, :], -math.inf)
        if not len(index):
            empty = query.new_zeros(*query.shape[:2], value.shape[2])
            return empty, query.new_full(query.shape[:2], NOTHING)
        top = logits.amax(2).clamp_min(NOTHING)
        weights = torch.exp2(logits - top[:, :, None])
        total = weights.sum(2)
        weights = weights.unflatten(1, grouped.shape[1:3])
        output = torch.einsum("nhgk,khd->nhgd", weights, value).flatten(1, 2)
        nothing = total == 0
        output = output / total.masked_fill(nothing, 1.0)[:, :, None]
        return output, (top + torch.log2(total)).masked_fill(nothing, NOTHING)

    def visible(self, index: Tensor, position: Tensor) -> Tensor:
        """Which keys (k,) each query (n,) sees; bool (n, k)."""
        key, query = index[None, :], position[:, None]
        visible = (query >= 0).expand(len(position), len(index))
        if self.causal:
            visible = visible & (key <= query)
        if self.window:
            visible = visible & (key > query - self.window)
        if self.chunk:
            visible = visible & (key // self.chunk == query // self.chunk)
        return visible

    def gather(self, cache: Tensor, scale: Tensor | None, row: int, index: Tensor) -> Tensor:
        """Cached rows at positions `index` of a table row; (k, Hkv, D)."""
        block_size = cache.shape[1]
        blocks = self.block_tables[row, index // block_size].long()
        rows = cache[blocks, index % block_size].to(self.dtype)
        return rows if scale is None else rows * scale.to(self.dtype)[:, None]


def _merge(outputs: Tensor, lses: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """One query's output (H, Dv) and log-sum-exp (H,) from partials (p, H, Dv) and (p, H)."""
    top = lses.amax(0)
    if sinks is not None:
        sink = sinks.to(lses.dtype) * math.log2(math.e)
        top = torch.maximum(top, sink)
    weights = torch.exp2(lses - top)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp2(sink - top)
    output = (weights[:, :, None] * outputs).sum(0) / total[:, None]
    return output, top + torch.log2(total)
