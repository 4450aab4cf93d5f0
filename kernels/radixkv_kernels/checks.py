"""The one validator: the Triton functions and their torch twins refuse the same arguments."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

BlockIds: TypeAlias = Sequence[int] | Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
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
    expected: tuple[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
        ("key", key, (tokens, heads, key_dim), FLOATS),
        ("value", value, (tokens, heads, value_dim), FLOATS),
        ("key_cache", key_cache, (num_blocks, block_size, heads, key_dim), FLOATS),
        ("value_cache", value_cache, (num_blocks, block_size, heads, value_dim), FLOATS),
        ("slot_mapping", slot_mapping, (tokens,), (torch.int64, torch.int32)),
    )
    for name, tensor, shape, dtypes in expected:
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be one of {dtypes}, got {tensor.dtype}")
        if tensor.device != key.device:
            raise ValueError(f"{name} is on {tensor.device}, but key is on {key.device}")
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


def _expect_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _block_ids(ids: BlockIds) -> list[int]:
    return [operator.index(i) for i in (ids.tolist() if isinstance(ids, Tensor) else ids)]
