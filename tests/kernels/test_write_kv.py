"""write_kv: the Triton kernel, its torch twin and a naive loop agree bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radixkv_kernels import torch_twins, write_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def layouts(tokens, heads, dim, dtype, device):
    """The same integers, which every dtype holds exactly, under each layout; shape (T, Hkv, D)."""
    rows = torch.randint(-256, 257, (tokens, heads, dim)).to(dtype).to(device)
    packed = torch.cat([torch.full_like(rows, 7), rows, torch.full_like(rows, 8)], dim=1)
    sparse = torch.full((2 * tokens, heads, 2 * dim), 9.0, dtype=dtype, device=device)
    sparse[::2, :, ::2] = rows
    return {
        "contiguous": rows,
        "one of q, k, v": packed[:, heads : 2 * heads],
        "heads first": rows.transpose(0, 1).contiguous().transpose(0, 1),
        "every other token and element": sparse[::2, :, ::2],
    }


def empty_cache(blocks, block_size, heads, dim, dtype, device):
    return torch.full((blocks, block_size, heads, dim), torch.nan, dtype=dtype, device=device)


def walled(cache):
    """A copy with a block of NaN on either side, where a stray write shows instead of crashing."""
    room = torch.full_like(torch.cat([cache, cache.new_empty(2, *cache.shape[1:])]), torch.nan)
    room[1:-1] = cache
    return room


def naive(rows, cache, slots):
    expected = cache.float().cpu().numpy().copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            expected[block, offset] = rows[token].float().cpu().numpy()
    return expected


def check(key, value, key_cache, value_cache, slots, slot_dtype=torch.int64):
    """Write with both, compare with the loop: bits equal, and NaN wherever nobody wrote."""
    expected = naive(key, key_cache, slots), naive(value, value_cache, slots)
    # Beyond the mapping's end lies a valid slot, which a kernel that reads on would spoil.
    mapping = torch.tensor(slots + [0] * 1024, dtype=slot_dtype, device=key.device)[: len(slots)]
    written = walled(key_cache), walled(value_cache)
    twin = walled(key_cache), walled(value_cache)
    assert write_kv(key, value, *(room[1:-1] for room in written), mapping) is None
    assert torch_twins.write_kv(key, value, *(room[1:-1] for room in twin), mapping) is None
    for got, other, wanted in zip(written, twin, expected, strict=True):
        assert torch.equal(got.view(BITS[got.dtype]), other.view(BITS[got.dtype]))
        assert got[[0, -1]].isnan().all()
        np.testing.assert_array_equal(got[1:-1].float().cpu().numpy(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 64), (128, 128), (40, 24)], ids=str)
def test_every_geometry(dtype, block_size, dims, device):
    key = layouts(5, 3, dims[0], dtype, device)["one of q, k, v"]
    value = layouts(5, 3, dims[1], dtype, device)["one of q, k, v"]
    blocks = 64 // block_size
    caches = [empty_cache(blocks, block_size, 3, dim, dtype, device) for dim in dims]
    check(key, value, *caches, [63, -1, 0, 17, 18])


@pytest.mark.parametrize("layout", list(layouts(1, 1, 1, torch.float32, "cpu")))
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_every_layout(layout, slot_dtype, device):
    key = layouts(6, 2, 40, torch.float16, device)[layout]
    value = layouts(6, 2, 16, torch.float16, device)[layout]
    caches = [empty_cache(4, 2, 2, dim, torch.float16, device) for dim in (40, 16)]
    check(key, value, *caches, [5, 2, -1, 7, -2, 0], slot_dtype)


def test_rows_wider_than_a_tile(device):
    key = layouts(2, 9, 128, torch.bfloat16, device)["contiguous"]
    value = layouts(2, 9, 240, torch.bfloat16, device)["contiguous"]
    caches = [empty_cache(2, 2, 9, dim, torch.bfloat16, device) for dim in (128, 240)]
    check(key, value, *caches, [3, 1])


@pytest.mark.parametrize("slots", [[], [-1], [-1, -1, -1]], ids=str)
def test_nothing_to_write(slots, device):
    rows = layouts(len(slots), 2, 16, torch.float32, device)["contiguous"]
    caches = [empty_cache(2, 2, 2, 16, torch.float32, device) for _ in "kv"]
    check(rows, rows, *caches, slots)
    check(rows, rows, *(cache[:0] for cache in caches), slots)


@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_any_write(data, seed, device):
    torch.manual_seed(seed)
    blocks, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    block_size = data.draw(st.sampled_from([1, 2, 3, 16]))
    slot = st.integers(0, blocks * block_size - 1)
    written = data.draw(st.lists(slot, max_size=9, unique=True))
    slots = data.draw(st.permutations(written + [-1] * data.draw(st.integers(0, 3))))
    arguments = []
    for _ in "kv":
        dim, dtypes = data.draw(st.integers(1, 130)), st.sampled_from(DTYPES)
        rows = layouts(len(slots), heads, dim, data.draw(dtypes), device)
        cache = empty_cache(blocks, block_size, heads, dim, data.draw(dtypes), device)
        arguments.append((rows[data.draw(st.sampled_from(list(rows)))], cache))
    (key, key_cache), (value, value_cache) = arguments
    check(key, value, key_cache, value_cache, slots)


def test_rounds_to_the_caches_dtype(device):
    # The interpreter truncates float32 to bfloat16; test_compile.py sees the rounding instruction.
    rows = torch.randn(4, 1, 64, device=device) * 100
    rows[0, 0, :4] = torch.tensor([1e6, -torch.inf, 1e-8, 65519.0])
    for dtype in DTYPES if device.type == "cuda" else DTYPES[:2]:
        caches = [empty_cache(4, 1, 1, 64, dtype, device) for _ in "kv"]
        with np.errstate(over="ignore"):
            write_kv(rows, rows, *caches, torch.arange(4, device=device))
        assert torch.equal(caches[0].flatten(0, 1), rows.to(dtype))
        assert torch.equal(caches[1].flatten(0, 1), rows.to(dtype))


def test_takes_tensors_that_require_grad(device):
    rows = torch.randn(2, 1, 8, device=device, requires_grad=True)
    for write in (write_kv, torch_twins.write_kv):
        caches = [empty_cache(2, 1, 1, 8, torch.float32, device) for _ in "kv"]
        write(rows, rows, *caches, torch.arange(2, device=device))
        assert torch.equal(caches[1].flatten(0, 1), rows)
        assert not caches[1].requires_grad
