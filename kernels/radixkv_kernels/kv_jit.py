"""The Triton side of `radixkv_kernels.kv`; the only imports are Triton's."""
# ruff: noqa: N803 -- compile-time arguments in capitals, as Triton's own kernels write them
# mypy: allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def row_offset(row: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """Elements before `row`, in 64 bits: a large cache has more than 2^31 elements."""
    return row.to(tl.int64) * stride


@triton.jit
def source_offset(
    token: tl.tensor,
    column: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    stride_dim: tl.tensor,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Elements before (token, column // DIM, column % DIM) in a strided (T, Hkv, DIM) tensor."""
    head = row_offset(column // DIM, stride_head)
    return row_offset(token, stride_token) + head + row_offset(column % DIM, stride_dim)


# The number of tokens and the slots' alignment change every step: neither may cost a compilation.
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slot_ptr"])
def write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    num_tokens: tl.tensor,
    key_stride_token: tl.tensor,
    key_stride_head: tl.tensor,
    key_stride_dim: tl.tensor,
    value_stride_token: tl.tensor,
    value_stride_head: tl.tensor,
    value_stride_dim: tl.tensor,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j): tokens from i * ROWS, elements from j * COLUMNS of their K and V rows."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)

    key_mask = (slot >= 0) & (column < HEADS * KEY_DIM)
    value_mask = (slot >= 0) & (column < HEADS * VALUE_DIM)
    key_source = source_offset(
        token, column, key_stride_token, key_stride_head, key_stride_dim, KEY_DIM
    )
    value_source = source_offset(
        token, column, value_stride_token, value_stride_head, value_stride_dim, VALUE_DIM
    )
    # Both loads come before the first store, which the compiler could not move them across.
    key = tl.load(key_ptr + key_source, mask=key_mask)
    value = tl.load(value_ptr + value_source, mask=value_mask)

    key_target = key_cache_ptr + row_offset(slot, HEADS * KEY_DIM) + column
    value_target = value_cache_ptr + row_offset(slot, HEADS * VALUE_DIM) + column
    tl.store(key_target, key.to(key_cache_ptr.dtype.element_ty), mask=key_mask)
    tl.store(value_target, value.to(value_cache_ptr.dtype.element_ty), mask=value_mask)


@triton.jit(do_not_specialize=["num_pairs"])
def copy_blocks_kernel(
    source_ptr: tl.tensor,
    target_ptr: tl.tensor,
    pair_ptr: tl.tensor,
    num_pairs: tl.tensor,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, j): pairs from i * ROWS, words from j * COLUMNS of each block."""
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    live = pair < num_pairs
    source = tl.load(pair_ptr + 2 * pair, mask=live, other=0)
    target = tl.load(pair_ptr + 2 * pair + 1, mask=live, other=0)
    mask = live & (column < WORDS)
    words = tl.load(source_ptr + row_offset(source, WORDS) + column, mask=mask)
    tl.store(target_ptr + row_offset(target, WORDS) + column, words, mask=mask)
