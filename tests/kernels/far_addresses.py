"""Runs the kernels on addresses far beyond 2^31 elements without such memory; a script.

A base pointer moved back by the offset that the kernel should compute lets the right address land
in a small buffer. Any other address is outside of it: hence a process of its own, which may crash.
"""

import torch
import triton
import triton.language as tl
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
    print("every address was right")
