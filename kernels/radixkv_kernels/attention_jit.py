"""The Triton side of `radixkv_kernels.attention`; the only imports are Triton's.

The running maximum and log-sum-exps are base 2, log2(e) is folded into the scale, and everything
but the operands of the two matrix products is float32. The recurrence is that of FlashAttention
(Dao et al., 2022); packing a KV head's query heads into the rows of a tile is from FlashDecoding.
"""
# ruff: noqa: N803 -- compile-time arguments in capitals, as Triton's own kernels write them
# mypy: allow-untyped-decorators

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# The running maximum of a row that has seen no key; finite, since -inf - -inf is NaN.
NOTHING = tl.constexpr(-1e30)
FAR = tl.constexpr(2**31 - 1)
ITEM_SIZE = tl.constexpr(6)


@triton.jit
def block_ids(
    table_ptr: tl.tensor,
    key: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """The blocks of keys through a table row, in 64 bits; shape (TOKENS,).

    Of a key outside of [first, end) it is the nearest one's: reading that twice is cheaper than
    masking what is read.
    """
    nearest = tl.minimum(tl.maximum(key, first), end - 1)
    block = tl.load(table_ptr + nearest // BLOCK_SIZE, mask=nearest >= first, other=0)
    return block.to(tl.int64)


@triton.jit
def slot_offset(key: tl.tensor, stride_slot: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Elements between the beginning of a key's block and the key; shape (TOKENS,)."""
    return (key % BLOCK_SIZE).to(tl.int64) * stride_slot


@triton.jit
def load_keys(row_ptr: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Cached keys, whatever they are: the logits of unused ones are masked; (TOKENS, WIDTH)."""
    column = tl.arange(0, WIDTH)[None, :]
    if DIM < WIDTH:
        key = tl.load(row_ptr[:, None] + column, mask=column < DIM, other=0.0)
    else:
        key = tl.load(row_ptr[:, None] + column)
    return key


@triton.jit
def load_values(
    row_ptr: tl.tensor, used: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Cached values, zero where not `used`: a weight of 0 times a NaN would be NaN."""
    column = tl.arange(0, WIDTH)[None, :]
    mask = used[:, None]
    if DIM < WIDTH:
        mask = mask & (column < DIM)
    return tl.load(row_ptr[:, None] + column, mask=mask, other=0.0)


@triton.jit
def decode_float8(byte: tl.tensor, EXPONENT: tl.constexpr) -> tl.tensor:
    """Numbers of float8_e4m3fn or float8_e5m2, by the bits of their exponents, as float16; exact.

    An e5m2 is the upper byte of a float16. An e4m3 is 2^8 times what its bits are, shifted.
    """
    bits = byte.to(tl.int16)
    if EXPONENT == 5:
        half = (bits << 8).to(tl.float16, bitcast=True)
    else:
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256
        half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
    return half


@triton.jit
def as_operand(
    tile: tl.tensor, dtype: tl.constexpr, DECODE: tl.constexpr, UPCAST: tl.constexpr
) -> tl.tensor:
    """Cached numbers in the dtype of a matrix product."""
    if DECODE:
        tile = decode_float8(tile, DECODE)
    # Triton's interpreter multiplies bfloat16 wrongly.
    return tile.to(tl.float32 if UPCAST else dtype)


@triton.jit
def tanh(x: tl.tensor, PRECISE: tl.constexpr) -> tl.tensor:
    """From one exponential that overflows to the right limit, whatever its argument."""
    result = 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)
    if PRECISE:
        # Near 0 the difference above has few digits; its series has all that float32 holds.
        square = x * x
        series = ((square * (62 / 2835) - 17 / 315) * square + 2 / 15) * square - 1 / 3
        result = tl.where(tl.abs(x) < 0.25, x + x * square * series, result)
    return result


@triton.jit
def scaled_logits(
    product: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr
) -> tl.tensor:
    """Base-2 logits, scaled and capped."""
    if SOFTCAP > 0:
        logits = SOFTCAP * LOG2E * tanh(product * (scale / SOFTCAP), PRECISE)
    else:
        logits = product * (scale * LOG2E)
    return logits


@triton.jit
def add_sink(lse: tl.tensor, sink_ptr: tl.tensor, head: tl.tensor, live: tl.tensor) -> tl.tensor:
    """The largest of `lse` and the heads' sinks, and the sinks' share of the denominator."""
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + head, mask=live, other=0.0) * LOG2E
        top = tl.maximum(lse, sink)
        share = tl.exp2(sink - top)
    else:
        top = lse
        share = tl.zeros_like(lse)
    return top, share


# Sizes that change from step to step, and views that start anywhere, may not cost a compilation.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        *("table_ptr", "position_ptr", "order_ptr", "item_ptr", "num_items_ptr"),
        *("sink_ptr", "slope_ptr", "key_scale_ptr", "value_scale_ptr"),
    ],
)
def attend_kernel(
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    position_ptr: tl.tensor,
    order_ptr: tl.tensor,
    item_ptr: tl.tensor,
    num_items_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    slope_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    value_scale_ptr: tl.tensor,
    scale: tl.tensor,
    query_stride_token: tl.tensor,
    query_stride_head: tl.tensor,
    key_stride_block: tl.tensor,
    key_stride_slot: tl.tensor,
    key_stride_head: tl.tensor,
    value_stride_block: tl.tensor,
    value_stride_slot: tl.tensor,
    value_stride_head: tl.tensor,
    table_stride: tl.tensor,
    out_stride_token: tl.tensor,
    out_stride_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    DECODE: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """Program (h, i, w): KV head h, rows from i * ROWS of item w; a row is (query, query head)."""
    # Items come last, so that those at the front of the list start first, for all heads.
    kv_head = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    item = tl.program_id(2)
    if item >= tl.load(num_items_ptr):
        return
    item_ptr += item * ITEM_SIZE
    num_queries = tl.load(item_ptr + 1)
    if first_row >= num_queries * GROUP:
        return
    first_query = tl.load(item_ptr)
    table_row = tl.load(item_ptr + 2).to(tl.int64)
    first = tl.load(item_ptr + 3)
    end = tl.load(item_ptr + 4)
    first_partial = tl.load(item_ptr + 5)

    row = first_row + tl.arange(0, ROWS)
    query_index = row // GROUP
    live = query_index < num_queries
    head = kv_head * GROUP + row % GROUP
    token = first_query + query_index
    if order_ptr is not None:
        token = tl.load(order_ptr + token, mask=live, other=0)
    position = tl.load(position_ptr + token, mask=live, other=-1)
    token = token.to(tl.int64)

    # A row sees the keys from `oldest` to `newest`, and the tile reads what any of its rows sees.
    oldest = tl.zeros_like(position)
    if WINDOW > 0:
        oldest = tl.maximum(oldest, position - WINDOW + 1)
    if CHUNK > 0:
        oldest = tl.maximum(oldest, position // CHUNK * CHUNK)
    if (WINDOW > 0) or (CHUNK > 0):
        first = tl.maximum(first, tl.min(tl.where(position >= 0, oldest, FAR), 0))
    if CAUSAL:
        end = tl.minimum(end, tl.max(position, 0) + 1)
        newest = tl.minimum(position, end - 1)
    else:
        newest = tl.where(position >= 0, end - 1, -1)
    oldest = tl.maximum(oldest, first)

    column = tl.arange(0, KEY_WIDTH)
    query_row = token * query_stride_token + head.to(tl.int64) * query_stride_head
    query = tl.load(
        query_ptr + query_row[:, None] + column[None, :],
        mask=live[:, None] & (column < KEY_DIM)[None, :],
        other=0,
    )
    if UPCAST:
        query = query.to(tl.float32)

    logit_scale = scale
    if key_scale_ptr is not None:
        logit_scale *= tl.load(key_scale_ptr + kv_head)
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + head, mask=live, other=0.0) * LOG2E

    table_ptr += table_row * table_stride
    key_ptr += kv_head.to(tl.int64) * key_stride_head
    value_ptr += kv_head.to(tl.int64) * value_stride_head
    top = tl.full((ROWS,), NOTHING, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    # Tiles begin at multiples of TOKENS whatever the item: a row's sums are grouped alike in all.
    start = first // TOKENS * TOKENS
    block = block_ids(table_ptr, start + tl.arange(0, TOKENS), first, end, BLOCK_SIZE)
    for tile_start in range(start, end, TOKENS):
        index = tile_start + tl.arange(0, TOKENS)
        used = (index >= first) & (index < end)
        key_row = block * key_stride_block + slot_offset(index, key_stride_slot, BLOCK_SIZE)
        key = load_keys(key_ptr + key_row, KEY_DIM, KEY_WIDTH)
        value_row = block * value_stride_block + slot_offset(index, value_stride_slot, BLOCK_SIZE)
        value = load_values(value_ptr + value_row, used, VALUE_DIM, VALUE_WIDTH)
        # Carried from one iteration to the next: a load that other loads of the same iteration
        # wait for would leave the pipeliner a single buffer for keys and values.
        block = block_ids(table_ptr, index + TOKENS, first, end, BLOCK_SIZE)

        key = as_operand(key, query.dtype, DECODE, UPCAST)
        value = as_operand(value, query.dtype, DECODE, UPCAST)
        product = tl.dot(query, tl.trans(key), input_precision="ieee")
        logits = scaled_logits(product, logit_scale, SOFTCAP, query.dtype == tl.float32)
        if slope_ptr is not None:
            logits += slope[:, None] * (index[None, :] - position[:, None]).to(tl.float32)
        visible = (index[None, :] >= oldest[:, None]) & (index[None, :] <= newest[:, None])
        logits = tl.where(visible, logits, float("-inf"))

        new_top = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator, input_precision="ieee")
        top = new_top

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    accumulator = accumulator / total[:, None]
    lse = tl.where(empty, NOTHING, top + tl.log2(total))
    if value_scale_ptr is not None:
        accumulator *= tl.load(value_scale_ptr + kv_head)
    column = tl.arange(0, VALUE_WIDTH)
    mask = live[:, None] & (column < VALUE_DIM)[None, :]
    if first_partial >= 0:
        partial = (first_partial + query_index).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial_lse_ptr + partial, lse, mask=live)
        partial_row = partial_ptr + partial[:, None] * VALUE_DIM
        tl.store(partial_row + column[None, :], accumulator, mask=mask)
    else:
        # As if merge_kernel merged this one partial: the same operations, the same bits.
        top, sink = add_sink(lse, sink_ptr, head, live)
        weight = tl.exp2(lse - top)
        total = weight + sink
        accumulator = accumulator * weight[:, None] / total[:, None]
        if lse_ptr is not None:
            lse = top + tl.log2(total)
            tl.store(lse_ptr + token * (KV_HEADS * GROUP) + head, lse, mask=live)
        out_row = token * out_stride_token + head.to(tl.int64) * out_stride_head
        tl.store(
            out_ptr + out_row[:, None] + column[None, :],
            accumulator.to(out_ptr.dtype.element_ty),
            mask=mask,
        )


@triton.jit
def partial_lses(
    partial_lse_ptr: tl.tensor,
    merge_idx_ptr: tl.tensor,
    index: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
) -> tl.tensor:
    """Log-sum-exps (HEADS,) of a query's partial; behind its last one, those of nothing at all."""
    partial = tl.load(merge_idx_ptr + tl.minimum(index, end - 1)).to(tl.int64)
    there = head < tl.where(index < end, NUM_HEADS, 0)
    return tl.load(partial_lse_ptr + partial * NUM_HEADS + head, mask=there, other=float("-inf"))


@triton.jit
def partial_outputs(
    partial_ptr: tl.tensor,
    merge_idx_ptr: tl.tensor,
    index: tl.tensor,
    end: tl.tensor,
    head: tl.tensor,
    column: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
) -> tl.tensor:
    """Outputs (HEADS, VALUE_WIDTH) of a query's partial; behind its last one, zeros."""
    partial = tl.load(merge_idx_ptr + tl.minimum(index, end - 1)).to(tl.int64)
    row = (partial * NUM_HEADS + head)[:, None] * VALUE_DIM
    there = (head < tl.where(index < end, NUM_HEADS, 0))[:, None] & (column < VALUE_DIM)[None, :]
    return tl.load(partial_ptr + row + column[None, :], mask=there, other=0.0)


@triton.jit(
    do_not_specialize_on_alignment=["merge_ptr_ptr", "merge_idx_ptr", "order_ptr", "sink_ptr"]
)
def merge_kernel(
    partial_ptr: tl.tensor,
    partial_lse_ptr: tl.tensor,
    merge_ptr_ptr: tl.tensor,
    merge_idx_ptr: tl.tensor,
    order_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    out_stride_token: tl.tensor,
    out_stride_head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
) -> None:
    """Program (q, i): query q, heads from i * HEADS; partials in the order that the list gives."""
    query = tl.program_id(0)
    begin = tl.load(merge_ptr_ptr + query)
    end = tl.load(merge_ptr_ptr + query + 1)
    if begin == end:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live = head < NUM_HEADS
    column = tl.arange(0, VALUE_WIDTH)

    # Four at a time are loaded before any is added: one after the other, each would wait for memory
    # by itself. They are added one by one, so that a partial without a key changes no bit wherever
    # it stands.
    top = tl.full((HEADS,), NOTHING, tl.float32)
    for i in range(begin, end, 4):
        a = partial_lses(partial_lse_ptr, merge_idx_ptr, i, end, head, NUM_HEADS)
        b = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 1, end, head, NUM_HEADS)
        c = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 2, end, head, NUM_HEADS)
        d = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 3, end, head, NUM_HEADS)
        top = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    top, sink = add_sink(top, sink_ptr, head, live)

    weight_sum = tl.zeros((HEADS,), tl.float32)
    accumulator = tl.zeros((HEADS, VALUE_WIDTH), tl.float32)
    for i in range(begin, end, 4):
        a = partial_lses(partial_lse_ptr, merge_idx_ptr, i, end, head, NUM_HEADS)
        b = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 1, end, head, NUM_HEADS)
        c = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 2, end, head, NUM_HEADS)
        d = partial_lses(partial_lse_ptr, merge_idx_ptr, i + 3, end, head, NUM_HEADS)
        out_a = partial_outputs(
            partial_ptr, merge_idx_ptr, i, end, head, column, NUM_HEADS, VALUE_DIM
        )
        out_b = partial_outputs(
            partial_ptr, merge_idx_ptr, i + 1, end, head, column, NUM_HEADS, VALUE_DIM
        )
        out_c = partial_outputs(
            partial_ptr, merge_idx_ptr, i + 2, end, head, column, NUM_HEADS, VALUE_DIM
        )
        out_d = partial_outputs(
            partial_ptr, merge_idx_ptr, i + 3, end, head, column, NUM_HEADS, VALUE_DIM
        )
        a, b, c, d = tl.exp2(a - top), tl.exp2(b - top), tl.exp2(c - top), tl.exp2(d - top)
        weight_sum = (((weight_sum + a) + b) + c) + d
        accumulator += out_a * a[:, None]
        accumulator += out_b * b[:, None]
        accumulator += out_c * c[:, None]
        accumulator += out_d * d[:, None]
    total = tl.where(live, weight_sum + sink, 1.0)

    accumulator = accumulator / total[:, None]
    token = query.to(tl.int64)
    if order_ptr is not None:
        token = tl.load(order_ptr + query).to(tl.int64)
    if lse_ptr is not None:
        lse = top + tl.log2(total)
        tl.store(lse_ptr + token * NUM_HEADS + head, lse, mask=live)
    out_row = token * out_stride_token + head.to(tl.int64) * out_stride_head
    tl.store(
        out_ptr + out_row[:, None] + column[None, :],
        accumulator.to(out_ptr.dtype.element_ty),
        mask=live[:, None] & (column < VALUE_DIM)[None, :],
    )
