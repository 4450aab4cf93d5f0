"""The Triton side of `radixkv_kernels.kv`; the only imports are Triton's."""
# ruff: noqa: N803, N806 -- compile-time arguments in capitals, as Triton's own kernels write them
# mypy: allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def row_offset(row: tl.tensor, stride: tl.tensor) -> tl.tensor:
    """Elements before `row`, in 64 bits: a large cache has more than 2^31 elements."""
    return row.to(tl.int64) * stride


@triton.jit
def encode_float8(number: tl.tensor, EXPONENT: tl.constexpr) -> tl.tensor:
    """float32 to the bits of float8_e4m3fn or float8_e5m2, by the bits of their exponents.

    To the nearest, halves to even; what is too large becomes the largest. By hand, so that every
    GPU (sm_80 has no instruction for it) and the interpreter give the same bits.
    """
    MANTISSA: tl.constexpr = 7 - EXPONENT
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    LARGEST: tl.constexpr = 448.0 if EXPONENT == 4 else 57344.0
    SHIFT: tl.constexpr = 23 - MANTISSA
    # The last bit of a float32 of this size is the smallest float8: adding it rounds to those.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    bits = number.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(number), LARGEST)
    wide = magnitude.to(tl.int32, bitcast=True) - ((127 - BIAS) << 23)
    normal = (wide + ((1 << (SHIFT - 1)) - 1) + ((wide >> SHIFT) & 1)) >> SHIFT
    small = (magnitude + MAGIC).to(tl.int32, bitcast=True) & ((1 << (MANTISSA + 1)) - 1)
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)
    code = tl.where(number == number, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_int8(number: tl.tensor) -> tl.tensor:
    """float32 to int8: to the nearest, halves to even, within 127; NaN, which int8 lacks, to 0."""
    MAGIC: tl.constexpr = 1.5 * 2.0**23
    nearest = (tl.minimum(tl.maximum(number, -127.0), 127.0) + MAGIC) - MAGIC
    return tl.where(number == number, nearest, 0.0).to(tl.int8)


@triton.jit
def kept(
    number: tl.tensor,
    scale_ptr: tl.tensor,
    head: tl.tensor,
    dtype: tl.constexpr,
    CODE: tl.constexpr,
) -> tl.tensor:
    """Numbers of one head as a cache keeps them: over the head's scale, and rounded."""
    if scale_ptr is not None:
        # Exactly as torch divides: `/` would be off by a bit.
        number = tl.div_rn(number.to(tl.float32), tl.load(scale_ptr + head))
    if CODE == 8:
        number = encode_int8(number.to(tl.float32))
    elif CODE > 0:
        number = encode_float8(number.to(tl.float32), CODE)
    else:
        number = number.to(dtype)
    return number


# The number of tokens and the slots' alignment change every step: neither may cost a compilation.
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_ptr", "key_scale_ptr", "value_scale_ptr"],
)
def write_kv_kernel(
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    key_cache_ptr: tl.tensor,
    value_cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
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
    KEY_CODE: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program (i, h, j): tokens from i * ROWS, head h, elements from j * COLUMNS of its K and V.

    Codes: bits of the exponent of an 8-bit float, 8 for int8, 0 for what Triton converts.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slot_ptr + token, mask=token < num_tokens, other=-1)

    key_mask = (slot >= 0)[:, None] & (column < KEY_DIM)[None, :]
    value_mask = (slot >= 0)[:, None] & (column < VALUE_DIM)[None, :]
    key_row = row_offset(token, key_stride_token) + row_offset(head, key_stride_head)
    value_row = row_offset(token, value_stride_token) + row_offset(head, value_stride_head)
    key_source = key_row[:, None] + row_offset(column, key_stride_dim)[None, :]
    value_source = value_row[:, None] + row_offset(column, value_stride_dim)[None, :]
    # Both loads come before the first store, which the compiler could not move them across.
    key = tl.load(key_ptr + key_source, mask=key_mask)
    value = tl.load(value_ptr + value_source, mask=value_mask)

    key = kept(key, key_scale_ptr, head, key_cache_ptr.dtype.element_ty, KEY_CODE)
    value = kept(value, value_scale_ptr, head, value_cache_ptr.dtype.element_ty, VALUE_CODE)
    key_target = row_offset(slot, HEADS * KEY_DIM) + head * KEY_DIM
    value_target = row_offset(slot, HEADS * VALUE_DIM) + head * VALUE_DIM
    tl.store(key_cache_ptr + key_target[:, None] + column[None, :], key, mask=key_mask)
    tl.store(value_cache_ptr + value_target[:, None] + column[None, :], value, mask=value_mask)


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
