"""The one validator: the Triton functions and their torch twins refuse the same arguments."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from radixkv_kernels.worklist import ITEM_FIELDS, WorkList

BlockIds: TypeAlias = Sequence[int] | Tensor
Expected: TypeAlias = tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTIZED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
# By the query's dtype: float32 is multiplied without matrix units, all of it in registers.
LARGEST_HEAD = {torch.float32: 256, torch.float16: 512, torch.bfloat16: 512}
# What a grid's last axis holds on NVIDIA's GPUs.
LARGEST_GRID = 65535
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Refuse arguments that `write_kv` cannot take; slots stay unread, so that nothing waits.

    Raises
    ------
    ValueError
        For a wrong shape, dtype or device, or a cache that is not contiguous.
    """
    tokens, heads, key_dim = _sizes("key", key, "(T, Hkv, D)")
    _, _, value_dim = _sizes("value", value, "(T, Hkv, Dv)")
    num_blocks, block_size, *_ = _sizes("key_cache", key_cache, "(num_blocks, block_size, Hkv, D)")
    if 0 in (block_size, heads, key_dim, value_dim):
        raise ValueError("block_size, Hkv, D and Dv must be positive")
    cached = (*FLOATS, *QUANTIZED)
    expected: list[Expected] = [
        ("key", key, (tokens, heads, key_dim), FLOATS),
        ("value", value, (tokens, heads, value_dim), FLOATS),
        ("key_cache", key_cache, (num_blocks, block_size, heads, key_dim), cached),
        ("value_cache", value_cache, (num_blocks, block_size, heads, value_dim), cached),
        ("slot_mapping", slot_mapping, (tokens,), (torch.int64, torch.int32)),
    ]
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scale is not None:
            expected.append((name, scale, (heads,), (torch.float32,)))
    _expect(expected)
    for name, tensor, _, _ in expected[2:]:
        _expect_contiguous(name, tensor)


def check_copy_blocks(
    caches: Sequence[Tensor], sources: BlockIds, targets: BlockIds
) -> list[tuple[int, int]]:
    """Refuse arguments that `copy_blocks` cannot take, and return the pairs that change something.

    Returns
    -------
    list of (int, int)
        Source and target of each pair; a block copied onto itself is left out.

    Raises
    ------
    ValueError
        For lists of different lengths, a target named twice, a block id outside a cache, or caches
        that are not contiguous, not on one device or listed twice.
    """
    source_ids, target_ids = _block_ids(sources), _block_ids(targets)
    if len(source_ids) != len(target_ids):
        raise ValueError(f"{len(source_ids)} sources for {len(target_ids)} targets")
    if twice := sorted(block for block, n in Counter(target_ids).items() if n > 1):
        raise ValueError(f"blocks {twice} are targets of more than one copy")
    # Copying one cache twice would undo a swap: layers that share a cache must list it once.
    addresses = [cache.data_ptr() for cache in caches if cache.numel()]
    if len(set(addresses)) < len(addresses):
        raise ValueError("the same cache is listed twice")
    named = [*source_ids, *target_ids]
    for i, cache in enumerate(caches):
        _expect_contiguous(f"caches[{i}]", cache)
        if cache.dim() == 0 or cache.element_size() not in WORDS:
            raise ValueError(f"caches[{i}] must be (num_blocks, ...) of 1, 2, 4 or 8 byte elements")
        if cache.device != caches[0].device:
            raise ValueError(f"caches[{i}] is on {cache.device}, caches[0] on {caches[0].device}")
        if named and (min(named) < 0 or max(named) >= cache.shape[0]):
            raise ValueError(f"block ids must be in [0, {cache.shape[0]}) for caches[{i}]")
    return [pair for pair in zip(source_ids, target_ids, strict=True) if pair[0] != pair[1]]


def check_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    positions: Tensor,
    out: Tensor,
    partials: tuple[Tensor, Tensor] | None,
    *,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
    scales: Mapping[str, Tensor | None],
) -> None:
    """Refuse arguments that `paged_attention` cannot take; what tensors hold stays unread.

    Raises
    ------
    ValueError
        For a wrong shape, dtype, layout or device, or options that exclude each other.
    """
    tokens, heads, key_dim = _sizes("query", query, "(T, H, D)")
    cache_axes = "(num_blocks, block_size, Hkv, D)"
    blocks, block_size, kv_heads, _ = _sizes("key_cache", key_cache, cache_axes)
    *_, value_dim = _sizes("value_cache", value_cache, cache_axes)
    rows, most_blocks = _sizes("block_tables", block_tables, "(R, max_blocks)")
    if 0 in (block_size, kv_heads) or heads % kv_heads or not heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
    most = LARGEST_HEAD.get(query.dtype, 0)
    if most and not (0 < key_dim <= most and 0 < value_dim <= most):
        raise ValueError(
            f"D and Dv must be in [1, {most}] for {query.dtype}, got {key_dim} and {value_dim}"
        )
    cache_dtypes = (query.dtype, *QUANTIZED)
    items, queries, count = len(work.items), work.num_queries, work.num_partials
    int32 = (torch.int32,)
    expected: list[Expected] = [
        ("query", query, (tokens, heads, key_dim), FLOATS),
        ("key_cache", key_cache, (blocks, block_size, kv_heads, key_dim), cache_dtypes),
        ("value_cache", value_cache, (blocks, block_size, kv_heads, value_dim), cache_dtypes),
        ("block_tables", block_tables, (rows, most_blocks), int32),
        ("out", out, (tokens, heads, value_dim), (query.dtype,)),
    ]
    contiguous: list[Expected] = [
        ("positions", positions, (tokens,), int32),
        ("work.items", work.items, (items, len(ITEM_FIELDS)), int32),
        ("work.num_items", work.num_items, (1,), int32),
        ("work.merge_ptr", work.merge_ptr, (queries + 1,), int32),
        ("work.merge_idx", work.merge_idx, (count,), int32),
    ]
    if work.order is not None:
        contiguous.append(("work.order", work.order, (queries,), int32))
    if partials is not None:
        floats = (torch.float32,)
        contiguous.append(("partials[0]", partials[0], (count, heads, value_dim), floats))
        contiguous.append(("partials[1]", partials[1], (count, heads), floats))
    for name, tensor in scales.items():
        if tensor is not None:
            size = kv_heads if name.endswith("_scale") else heads
            contiguous.append((name, tensor, (size,), (torch.float32,)))
    _expect([*expected, *contiguous])
    for name, tensor, _, _ in expected:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last axis of {name} must be contiguous")
    for name, tensor, _, _ in contiguous:
        _expect_contiguous(name, tensor)
    if key_cache.dtype != value_cache.dtype:
        raise ValueError(f"key_cache is {key_cache.dtype}, but value_cache {value_cache.dtype}")
    if queries > tokens:
        raise ValueError(f"the work list has {queries} queries, but query has {tokens} tokens")
    if work.max_queries < 1 or items > LARGEST_GRID:
        raise ValueError(
            f"max_queries must be positive, and items at most {LARGEST_GRID}: "
            f"got {work.max_queries} and {items}"
        )
    if window < 0 or chunk < 0 or softcap < 0:
        raise ValueError("window, chunk and softcap must not be negative")
    if not causal and (window or chunk or scales["alibi_slopes"] is not None):
        raise ValueError("causal=False goes with no window, chunk or alibi_slopes")


def as_words(cache: Tensor) -> Tensor:
    """View a cache's bits as integers, shape (num_blocks, words_per_block).

    Moving integers keeps every bit (a NaN's payload too), serves fp8 and int8 caches, and compiles
    one kernel for each element size instead of one for each dtype.
    """
    words = cache.detach().view(WORDS[cache.element_size()])
    return words.view(cache.shape[0], -1) if cache.numel() else words.new_empty(cache.shape[0], 0)


def _sizes(name: str, tensor: Tensor, axes: str) -> tuple[int, ...]:
    if tensor.dim() != axes.count(",") + 1:
        raise ValueError(f"{name} must have shape {axes}, got {tuple(tensor.shape)}")
    return tuple(tensor.shape)


def _expect(expected: Sequence[Expected]) -> None:
    """Refuse a wrong shape or dtype, or a device other than the first one's."""
    first, on, _, _ = expected[0]
    for name, tensor, shape, dtypes in expected:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be one of {dtypes}, got {tensor.dtype}")
        if tensor.device != on.device:
            raise ValueError(f"{name} is on {tensor.device}, but {first} is on {on.device}")


def _expect_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _block_ids(ids: BlockIds) -> list[int]:
    return [operator.index(i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids)]
