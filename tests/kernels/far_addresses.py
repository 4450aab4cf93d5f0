"""Runs the kernels on addresses far beyond 2^31 elements without such memory; a script.

A base pointer moved back by the offset that the kernel should compute lets the right address land
in a small buffer. Any other address is outside of it: hence a process of its own, which may crash.
"""

import torch
import triton
import triton.language as tl
from radixkv_kernels.attention_jit import attend_kernel, merge_kernel
from radixkv_kernels.kv_jit import copy_blocks_kernel, write_kv_kernel

DIM = 64


@triton.jit
def far_write(key, value, key_cache, value_cache, slots, tokens, stride, back_in, back_out):
    write_kv_kernel(
        key - back_in,
        value - back_in,
        key_cache - back_out,
        value_cache - back_out,
        slots,
        None,
        None,
        tokens,
        stride,
        stride,
        1,
        stride,
        stride,
        1,
        HEADS=1,
        KEY_DIM=64,
        VALUE_DIM=64,
        KEY_CODE=0,
        VALUE_CODE=0,
        ROWS=4,
        COLUMNS=64,
    )


@triton.jit
def far_copy(source, target, pairs, back_source, back_target):
    copy_blocks_kernel(
        source - back_source, target - back_target, pairs, 1, WORDS=64, ROWS=1, COLUMNS=64
    )


def write(slot: int, token: int, stride: int, slot_dtype: torch.dtype) -> None:
    """Only `token` has a slot, so that only it is read."""
    key, value = torch.randn(2, DIM).half()
    key_cache, value_cache = torch.zeros(2, DIM).half()
    slots = torch.full((4,), -1, dtype=slot_dtype)
    slots[token] = slot
    far_write[(1,)](
        key, value, key_cache, value_cache, slots, 4, stride, token * stride, slot * DIM
    )
    assert torch.equal(key, key_cache)
    assert torch.equal(value, value_cache)


def copy(source: int, target: int, dtype: torch.dtype) -> None:
    words, copied = torch.randint(1, 99, (DIM,)).short(), torch.zeros(DIM).short()
    pairs = torch.tensor([(source, target)], dtype=dtype)
    far_copy[(1,)](words, copied, pairs, source * DIM, target * DIM)
    assert torch.equal(words, copied)


@triton.jit
def far_attend(
    query, key, value, table, position, order, items, num_items, out, lse, partial, partial_lse,
    back_query, back_cache, back_table, back_out, back_lse, back_partial, back_partial_lse, stride
):  # fmt: skip
    attend_kernel(
        query - back_query,
        key - back_cache,
        value - back_cache,
        table - back_table,
        position,
        order,
        items,
        num_items,
        out - back_out,
        lse - back_lse,
        partial - back_partial,
        partial_lse - back_partial_lse,
        None,
        None,
        None,
        None,
        1.0,
        stride,
        64,
        64,
        64,
        64,
        64,
        64,
        64,
        stride,
        stride,
        64,
        KV_HEADS=1,
        GROUP=1,
        KEY_DIM=64,
        VALUE_DIM=64,
        KEY_WIDTH=64,
        VALUE_WIDTH=64,
        BLOCK_SIZE=1,
        ROWS=16,
        TOKENS=16,
        WINDOW=0,
        CHUNK=0,
        SOFTCAP=0.0,
        CAUSAL=True,
        DECODE=0,
        UPCAST=False,
    )


@triton.jit
def far_merge(
    partial, partial_lse, merge_ptr, merge_idx, order, out, lse,
    back_partial, back_partial_lse, back_out, back_lse, stride
):  # fmt: skip
    merge_kernel(
        partial - back_partial,
        partial_lse - back_partial_lse,
        merge_ptr,
        merge_idx,
        order,
        out - back_out,
        lse - back_lse,
        None,
        stride,
        64,
        NUM_HEADS=1,
        VALUE_DIM=64,
        HEADS=1,
        VALUE_WIDTH=64,
    )


def attend(block: int, token: int, row: int, partial: int, stride: int, skipped: int = 0) -> None:
    """One query, one key: the output is its value, through the partials or directly.

    Its block is the only one of the table that exists.
    """
    query, key, value = torch.randn(3, DIM).half()
    out, lse = torch.zeros(DIM).half(), torch.zeros(1)
    partials, partial_lse = torch.zeros(DIM), torch.zeros(1)
    order, num_items = (torch.tensor([n], dtype=torch.int32) for n in (token, 1))
    # The kernel reads the token's position at positions[token], so that one must be memory.
    positions = torch.full((token + 1,), skipped, dtype=torch.int32)
    items = torch.tensor([[0, 1, row, skipped, skipped + 1, partial]], dtype=torch.int32)
    missing = 2**31 - 1 if block != 2**31 - 1 else 0
    table = torch.tensor([*[missing] * skipped, block, missing], dtype=torch.int32)
    buffers = (query, key, value, table, positions, order, items, num_items)
    to_partials = (partial * DIM, partial) if partial >= 0 else (0, 0)
    to_out = (token * stride, token)
    far_attend[(1, 1, 1)](
        *(*buffers, out, lse, partials, partial_lse),
        *(token * stride, block * DIM, row * stride, *to_out, *to_partials, stride),
    )
    if partial >= 0:
        assert torch.equal(partials, value.float())
        merge_ptr, merge_idx = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [partial]))
        far_merge[(1, 1)](
            *(partials, partial_lse, merge_ptr, merge_idx, order, out, lse),
            *(*to_partials, *to_out, stride),
        )
    assert torch.equal(out, value)
    logit = query.double() @ key.double() * 1.4426950408889634
    assert abs(lse.item() - logit.item()) < 1e-2


if __name__ == "__main__":
    assert type(write_kv_kernel).__name__ == "InterpretedFunction", tl
    near, far = 5, 2**31 // DIM + 7
    write(near, 0, DIM, torch.int32)
    write(far, 0, DIM, torch.int32)
    write(far * 40, 0, DIM, torch.int64)
    write(near, 3, 2**30 + DIM, torch.int32)
    copy(near, near, torch.int32)
    copy(far, near, torch.int32)
    copy(near, far, torch.int32)
    copy(far * 40, far, torch.int64)
    for partial in (-1, near, far):
        attend(near, 0, 0, partial, DIM)
        attend(far, 0, 0, partial, DIM, skipped=3)
        attend(2**31 - 1, 3, 3, partial, 2**30 + DIM)
    print("every address was right")
