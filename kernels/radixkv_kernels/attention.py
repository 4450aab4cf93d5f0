"""Attention over a paged KV cache, driven by a work list, with Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixkv_kernels.checks import check_paged_attention
from radixkv_kernels.launch import (
    EXPONENTS,
    interpreted,
    load_kernel,
    on_device,
    strides_of,
    target_of,
)
from radixkv_kernels.tiles import (
    Tile,
    choose_tile,
    launch_options,
    merge_heads,
    merge_warps,
    width_of,
)
from radixkv_kernels.worklist import WorkList

Partials = tuple[Tensor, Tensor]


def allocate_partials(work: WorkList, num_heads: int, value_dim: int) -> Partials:
    """Scratch for `paged_attention`: to allocate once where a CUDA graph is captured.

    Layers may share it. What is in it before a call does not matter.

    Returns
    -------
    (Tensor, Tensor)
        float32: partial outputs (P, H, Dv), and their base-2 log-sum-exps (P, H).
    """
    device, rows = work.items.device, work.num_partials
    return (
        torch.empty(rows, num_heads, value_dim, dtype=torch.float32, device=device),
        torch.empty(rows, num_heads, dtype=torch.float32, device=device),
    )


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
    partials: Partials | None = None,
    return_lse: bool = False,
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend to paged keys and values, with one launch, or two if any query merges partials.

    A query at position p sees key k of the reads that serve it if k <= p, and k > p - window, and
    k // chunk == p // chunk, as far as these are asked for. Nothing is read back, so a launch can
    be captured in a CUDA graph. Of what a read names, only keys from the oldest to the newest that
    its queries see are used: elsewhere caches may hold NaN, and block tables anything.

    Parameters
    ----------
    query : Tensor
        float32, float16 or bfloat16, last axis contiguous, shape (T, H, D). D and Dv up to
        512, in float32 up to 256.
    key_cache, value_cache : Tensor
        The query's dtype, float8_e4m3fn, float8_e5m2 or int8, the same for both, last axis
        contiguous, shapes (num_blocks, block_size, Hkv, D) and (num_blocks, block_size, Hkv, Dv).
    block_tables : Tensor
        int32, last axis contiguous; entry j of a row is the block of keys j * block_size onwards.
        Entries that no query reaches are not read, shape (R, max_blocks).
    work : WorkList
        Who reads what. Its contents are not checked, as that would wait for the device.
    positions : Tensor
        int32, contiguous, of each token; negative for padding, which sees nothing, shape (T,).
    out : Tensor, optional
        Last axis contiguous, dtype of the query, shape (T, H, Dv). A token that no item serves
        is left untouched; one that sees no key gets zeros.
    scale : float
        Of the logits, usually D ** -0.5.
    causal : bool
        False: queries see all keys of their reads, which then need an end. It goes with no window,
        chunk or ALiBi.
    window : int
        Keys that a query sees, itself included; 0 for all.
    chunk : int
        Keys are seen only within the chunk of this many positions that the query is in; 0 for all.
    softcap : float
        Logits become softcap * tanh(logits / softcap); 0 for none.
    sinks : Tensor, optional
        float32, of each head: a logit that takes part in the denominator only, shape (H,).
    alibi_slopes : Tensor, optional
        float32: slope * (k - p) is added to a logit, after the softcap, shape (H,).
    key_scale, value_scale : Tensor, optional
        float32, what a KV head's cached numbers are to be multiplied by, shape (Hkv,).
    partials : (Tensor, Tensor), optional
        From `allocate_partials`; allocated here if missing.
    return_lse : bool
        Return the log-sum-exps too.
    tile : Tile, optional
        Instead of the one that `choose_tile` takes from its table.

    Returns
    -------
    Tensor or (Tensor, Tensor)
        `out`, and if asked for, float32 (T, H): the base-2 logarithm of the denominator that it was
        divided by, sinks included; `NOTHING` if that was 0.

    Raises
    ------
    ValueError
        For a wrong shape, dtype, layout or device, or options that exclude each other.
    ImportError, RuntimeError
        Without Triton; with tensors on the CPU outside Triton's interpreter.
    """
    if out is None:
        out = query.new_empty(*query.shape[:2], *value_cache.shape[3:])
    if partials is None:
        partials = allocate_partials(work, query.shape[1], value_cache.shape[-1])
    check_paged_attention(
        *(query, key_cache, value_cache, block_tables, work, positions, out, partials),
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        scales={
            "sinks": sinks,
            "alibi_slopes": alibi_slopes,
            "key_scale": key_scale,
            "value_scale": value_scale,
        },
    )
    attend = load_kernel("attention_jit", "attend_kernel", query.device)
    merge = load_kernel("attention_jit", "merge_kernel", query.device)
    num_tokens, heads, key_dim = query.shape
    kv_heads, value_dim = value_cache.shape[2:]
    lse = query.new_empty(num_tokens, heads, dtype=torch.float32) if return_lse else None
    if num_tokens and len(work.items):
        target = target_of(query.device)
        if tile is None:
            widths = (width_of(key_dim), width_of(value_dim))
            rows = work.max_queries * (heads // kv_heads)
            tile = choose_tile(target, rows, *widths, key_cache.element_size())
        with on_device(query.device):
            _attend(
                attend,
                *(query, key_cache, value_cache, block_tables, work, positions, out, lse),
                partials,
                (sinks, alibi_slopes, key_scale, value_scale),
                tile,
                scale=scale,
                WINDOW=window,
                CHUNK=chunk,
                SOFTCAP=softcap,
                CAUSAL=causal,
                DECODE=decoded_by_hand(key_cache.dtype, target),
                UPCAST=interpreted(attend) and query.dtype == torch.bfloat16,
            )
            if work.num_partials:
                _merge(merge, work, out, lse, partials, sinks)
    return (out, lse) if lse is not None else out


def decoded_by_hand(dtype: torch.dtype, target: str) -> int:
    """Exponent bits of an 8-bit float that a GPU cannot convert, NVIDIA's before sm_89; else 0.

    Triton 3.9 converts e5m2 there by itself, 3.6 does not.
    """
    arch = target.removeprefix("sm_")
    return EXPONENTS.get(dtype, 0) if arch.isdigit() and int(arch) < 89 else 0


def _attend(
    kernel: Any,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    work: WorkList,
    positions: Tensor,
    out: Tensor,
    lse: Tensor | None,
    partials: Partials,
    scales: tuple[Tensor | None, ...],
    tile: Tile,
    scale: float,
    **options: Any,
) -> None:
    heads, key_dim = query.shape[1:]
    block_size, kv_heads, value_dim = value_cache.shape[1:]
    group = heads // kv_heads
    if options["DECODE"]:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    row_tiles = -(-work.max_queries * group // tile.rows)
    kernel[(kv_heads, row_tiles, len(work.items))](
        *(query, key_cache, value_cache, block_tables, positions, work.order),
        *(work.items, work.num_items, out, lse, *partials, *scales, float(scale)),
        *(*strides_of(query)[:2], *strides_of(key_cache)[:3], *strides_of(value_cache)[:3]),
        *(block_tables.stride(0), *strides_of(out)[:2]),
        KV_HEADS=kv_heads,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_WIDTH=width_of(key_dim),
        VALUE_WIDTH=width_of(value_dim),
        BLOCK_SIZE=block_size,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        **options,
        **launch_options(tile, target_of(query.device)),
    )


def _merge(
    kernel: Any,
    work: WorkList,
    out: Tensor,
    lse: Tensor | None,
    partials: Partials,
    sinks: Tensor | None,
) -> None:
    _, heads, value_dim = out.shape
    tile = merge_heads(heads, value_dim)
    kernel[(work.num_queries, -(-heads // tile))](
        *(*partials, work.merge_ptr, work.merge_idx, work.order, out, lse, sinks),
        *strides_of(out)[:2],
        NUM_HEADS=heads,
        VALUE_DIM=value_dim,
        HEADS=tile,
        VALUE_WIDTH=width_of(value_dim),
        num_warps=merge_warps(target_of(out.device)),
    )
