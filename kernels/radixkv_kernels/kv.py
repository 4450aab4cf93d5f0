"""Write tokens into a paged KV cache, and copy whole blocks of it, with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixkv_kernels.checks import BlockIds, as_words, check_copy_blocks, check_write_kv
from radixkv_kernels.launch import EXPONENTS, WARPS, load_kernel, on_device, row_tile, strides_of


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
    """Write each token's key and value into its slot of the caches, in one launch.

    Numbers are divided by their head's scale and rounded to the nearest that the cache has, halves
    to even. For caches of 8 bits, what is too large becomes the largest; a NaN stays one in float8,
    and becomes 0 in int8, which has none.

    The shapes choose the compiled kernel; the number of tokens and the slots do not, and nothing is
    read back, so a launch can be captured in a CUDA graph.

    Parameters
    ----------
    key, value : Tensor
        float32, float16 or bfloat16, any strides, shapes (T, Hkv, D) and (T, Hkv, Dv).
    key_cache, value_cache : Tensor
        float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8, contiguous, changed in
        place, shapes (num_blocks, block_size, Hkv, D) and (num_blocks, block_size, Hkv, Dv).
    slot_mapping : Tensor
        int64 or int32, contiguous, block * block_size + offset. A negative slot skips its token.
        Not checked against the caches' size; two tokens in one slot leave either, shape (T,).
    key_scale, value_scale : Tensor, optional
        float32, what `paged_attention` multiplies by again, shape (Hkv,).

    Raises
    ------
    ValueError
        For a wrong shape, dtype or device, or a cache that is not contiguous.
    ImportError, RuntimeError
        Without Triton; with tensors on the CPU outside Triton's interpreter.
    """
    check_write_kv(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    num_tokens, heads, key_dim = key.shape
    value_dim = value.shape[2]
    kernel = load_kernel("kv_jit", "write_kv_kernel", key.device)
    if num_tokens == 0:
        return
    columns = max(key_dim, value_dim)
    rows, width = row_tile(columns)
    with on_device(key.device):
        kernel[(-(-num_tokens // rows), heads, -(-columns // width))](
            *(key, value, _bits(key_cache), _bits(value_cache), slot_mapping),
            *(key_scale, value_scale, num_tokens, *strides_of(key), *strides_of(value)),
            HEADS=heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_CODE=code_of(key_cache.dtype),
            VALUE_CODE=code_of(value_cache.dtype),
            ROWS=rows,
            COLUMNS=width,
            num_warps=WARPS,
        )


def code_of(dtype: torch.dtype) -> int:
    """How the kernel encodes a cache's numbers: see `write_kv_kernel`."""
    return 8 if dtype == torch.int8 else EXPONENTS.get(dtype, 0)


def _bits(cache: Tensor) -> Tensor:
    """A cache of 8-bit floats as bytes, which every GPU can store."""
    return cache.view(torch.uint8) if cache.dtype in EXPONENTS else cache


def copy_blocks(caches: Sequence[Tensor], sources: BlockIds, targets: BlockIds) -> None:
    """Copy whole blocks in every cache, all sources read as they were before any target is written.

    So swaps, chains and cycles come out right, though pairs run in any order on the device: the ids
    are on the host, which decides. Copy-on-write copies into blocks just allocated, so as a rule no
    block is both source and target, and one launch for each cache does it, without extra memory.
    Otherwise the sources go to a scratch buffer first: a second launch, and one block of memory for
    each pair. Ordering the pairs instead would need no memory but run a chain one by one.

    Parameters
    ----------
    caches : sequence of Tensor
        Any dtype, contiguous, on one device, changed in place; none twice. Each of shape
        (num_blocks, ...).
    sources, targets : sequence of int or Tensor
        Block ids, best on the host (a tensor on a GPU waits for its stream); no target twice; a
        block onto itself is left alone, shape (P,).

    Raises
    ------
    ValueError
        For a target named twice, lists of different lengths, ids outside a cache, or bad caches.
    ImportError, RuntimeError
        Without Triton; with tensors on the CPU outside Triton's interpreter.
    """
    pairs = check_copy_blocks(caches, sources, targets)
    if not caches:
        return
    device = caches[0].device
    kernel = load_kernel("kv_jit", "copy_blocks_kernel", device)
    blocks = [as_words(cache) for cache in caches if pairs and cache.numel()]
    if not blocks:
        return
    with on_device(device):
        if {source for source, _ in pairs}.isdisjoint(target for _, target in pairs):
            ids = torch.tensor(pairs, device=device)
            for cache in blocks:
                _copy_rows(kernel, cache, cache, ids)
        else:
            gather = torch.tensor([(s, i) for i, (s, _) in enumerate(pairs)], device=device)
            scatter = torch.tensor([(i, t) for i, (_, t) in enumerate(pairs)], device=device)
            for cache in blocks:
                scratch = cache.new_empty(len(pairs), cache.shape[1])
                _copy_rows(kernel, cache, scratch, gather)
                _copy_rows(kernel, scratch, cache, scatter)


def _copy_rows(kernel: Any, source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Launch copies of rows, shapes (N, words), (M, words) and (P, 2)."""
    words = source.shape[1]
    rows, width = row_tile(words)
    kernel[(-(-len(pairs) // rows), -(-words // width))](
        *(source, target, pairs, len(pairs)),
        WORDS=words,
        ROWS=rows,
        COLUMNS=width,
        num_warps=WARPS,
    )
