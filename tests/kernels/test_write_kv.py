"""write_kv: the Triton kernel, its torch twin and a naive loop agree bit for bit."""

import numpy as np
import pytest
import radixkv_kernels.kv
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radixkv_kernels import paged_attention, torch_twins, unshared_work_list, write_kv

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
QUANTIZED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
BITS |= dict.fromkeys(QUANTIZED, torch.uint8)
# What fills a cache before: NaN, or of int8 what nothing is rounded to.
UNWRITTEN = {torch.int8: -128}


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
    unwritten = UNWRITTEN.get(dtype, torch.nan)
    full = torch.full((blocks, block_size, heads, dim), unwritten, device=device)
    return full.to(dtype)


def walled(cache):
    """A copy with a block of NaN on either side, where a stray write shows instead of crashing."""
    wall = empty_cache(1, *cache.shape[1:], cache.dtype, cache.device).view(BITS[cache.dtype])
    return torch.cat([wall, cache.view(wall.dtype), wall]).view(cache.dtype)


def nearest(numbers, dtype):
    """The nearest number of 8 bits, of two the one whose last bit is 0, by trying all of them."""
    codes = np.arange(256, dtype=np.uint8)
    known = torch.from_numpy(codes).view(dtype).float().numpy().astype(np.float64)
    usable = np.isfinite(known) & (known != UNWRITTEN.get(dtype))
    # Nothing lies between two neighbours: only these need trying.
    codes, known = codes[usable], known[usable]
    order = np.lexsort((codes & 1, known))
    codes, known = codes[order], known[order]
    place = np.searchsorted(known, numbers).clip(1, len(known) - 1)
    low, high = known[place - 1], known[place]
    below, above = numbers - low, high - numbers
    odd = codes[place - 1] & 1
    return np.where((below < above) | ((below == above) & (odd == 0)), low, high)


def naive(rows, cache, slots, scale=None):
    expected = cache.float().cpu().numpy().copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[1])
            row = rows[token].float().cpu().numpy()
            if scale is not None:
                row = row / scale.cpu().numpy()[:, None]
            if cache.dtype in QUANTIZED:
                row = nearest(row.astype(np.float64), cache.dtype)
            expected[block, offset] = row
    return expected


def check(key, value, key_cache, value_cache, slots, slot_dtype=torch.int64, **scales):
    """Write with both, compare with the loop: bits equal, and NaN wherever nobody wrote."""
    expected = (
        naive(key, key_cache, slots, scales.get("key_scale")),
        naive(value, value_cache, slots, scales.get("value_scale")),
    )
    # Beyond the mapping's end lies a valid slot, which a kernel that reads on would spoil.
    mapping = torch.tensor(slots + [0] * 1024, dtype=slot_dtype, device=key.device)[: len(slots)]
    written = walled(key_cache), walled(value_cache)
    twin = walled(key_cache), walled(value_cache)
    for write, rooms in ((write_kv, written), (torch_twins.write_kv, twin)):
        assert write(key, value, *(room[1:-1] for room in rooms), mapping, **scales) is None
    for got, other, wanted in zip(written, twin, expected, strict=True):
        bits, wall = got.view(BITS[got.dtype]), walled(got[:0]).view(BITS[got.dtype])
        assert torch.equal(bits, other.view(bits.dtype))
        assert torch.equal(bits[[0, -1]], wall)
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
        kept = data.draw(st.sampled_from(DTYPES + QUANTIZED))
        cache = empty_cache(blocks, block_size, heads, dim, kept, device)
        arguments.append((rows[data.draw(st.sampled_from(list(rows)))], cache))
    (key, key_cache), (value, value_cache) = arguments
    scales = {}
    for name, cache in (("key_scale", key_cache), ("value_scale", value_cache)):
        # What is not rounded to 8 bits must be exact to be compared.
        step = 0.37 if cache.dtype in QUANTIZED else 0.5
        if data.draw(st.booleans()):
            scales[name] = step * 2.0 ** torch.arange(heads, device=device)
    check(key, value, key_cache, value_cache, slots, **scales)


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


def every_number(dtype):
    """All numbers of 16 bits, and NaN; or float32 around every middle of two of 8 bits."""
    if dtype != torch.float32:
        return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = []
    for kept in QUANTIZED:
        known = torch.arange(256, dtype=torch.uint8).view(kept).float()
        known = known[known.isfinite()].sort().values
        middles = (known[1:] + known[:-1]) / 2
        found += [known, middles]
        found += [middles.nextafter(torch.tensor(limit)) for limit in (-torch.inf, torch.inf)]
    extremes = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -3.4e38, torch.inf, -torch.inf, torch.nan])
    return torch.cat([*found, extremes])


@pytest.mark.parametrize("kept", QUANTIZED, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_is_rounded_to_the_nearest(dtype, kept, device):
    numbers = every_number(dtype)
    wanted = nearest(
        numbers.double().nan_to_num(0.0, np.inf, -np.inf).clamp(-1e6, 1e6).numpy(), kept
    )
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 128)])
    rows = numbers.view(-1, 1, 128).to(device)
    for write in (write_kv, torch_twins.write_kv):
        caches = [empty_cache(len(rows), 1, 1, 128, kept, device) for _ in "kv"]
        write(rows, -rows, *caches, torch.arange(len(rows), device=device))
        got, negated = (cache.flatten().cpu().float()[: len(wanted)].numpy() for cache in caches)
        nan = numbers[: len(wanted)].isnan().numpy()
        np.testing.assert_array_equal(got[~nan], wanted[~nan])
        np.testing.assert_array_equal(negated[~nan], -wanted[~nan])
        # int8 has no NaN.
        assert (np.isnan(got[nan]) if kept != torch.int8 else got[nan] == 0).all()


@pytest.mark.parametrize("kept", QUANTIZED, ids=str)
def test_each_head_has_its_scale(kept, device):
    rows = torch.randn(5, 3, 80, device=device).to(torch.bfloat16)
    caches = [empty_cache(4, 2, 3, 80, kept, device) for _ in "kv"]
    key_scale = torch.tensor([0.01, 0.07, 3.0], device=device)
    check(
        rows, -rows, *caches, [7, -1, 0, 3, 4], key_scale=key_scale, value_scale=key_scale.flip(0)
    )
    check(rows, -rows, *caches, [7, -1, 0, 3, 4], value_scale=key_scale)


def test_a_scale_left_out_or_swapped_is_noticed(device):
    rows = torch.randn(2, 2, 16, device=device)
    scale = torch.tensor([0.5, 0.25], device=device)
    found = []
    for scales in ({}, {"key_scale": scale}, {"key_scale": scale.flip(0)}, {"value_scale": scale}):
        caches = [empty_cache(2, 1, 2, 16, QUANTIZED[0], device) for _ in "kv"]
        write_kv(rows, rows, *caches, torch.arange(2, device=device), **scales)
        found.append([cache.float() for cache in caches])
    keys = [key for key, _ in found]
    assert not any(torch.equal(keys[1], keys[i]) for i in (0, 2, 3))
    assert torch.equal(keys[0], keys[3])
    assert not torch.equal(found[0][1], found[3][1])


def test_what_is_written_is_what_attention_reads(device):
    """Quantised by one kernel, restored by the other: within half of the last bit."""
    positions = torch.zeros(3, dtype=torch.int32, device=device)
    value = torch.randn(3, 2, 32, device=device)
    scale = torch.tensor([0.02, 0.3], device=device)
    for kept, bound in zip(QUANTIZED, (2**-4, 2**-3, None), strict=True):
        caches = [empty_cache(3, 1, 2, 32, kept, device) for _ in "kv"]
        slots = torch.arange(3, device=device)
        write_kv(value, value, *caches, slots, key_scale=scale, value_scale=scale)
        work = unshared_work_list([1, 1, 1], device=device)
        tables = slots.int()[:, None]
        arguments = (torch.zeros_like(value), *caches, tables, work, positions)
        out = paged_attention(*arguments, scale=1.0, key_scale=scale, value_scale=scale)
        off = (out - value).abs()
        # int8 is even: half a step, as far as 127 of them reach.
        step = (
            scale[:, None] / 2 if bound is None else bound * value.abs() + scale[:, None] * 2**-10
        )
        assert (off <= step * 1.0001)[value.abs() < 127 * scale[:, None]].all()
        assert off.max() > 0


def test_a_step_of_one_token_compiles_nothing_new(device, monkeypatch):
    """The stride of an axis of length 1 may be anything; 1 would make it another kernel."""
    seen = []
    load = radixkv_kernels.kv.load_kernel

    class Recording:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **keywords):
                integers = [x for x in arguments if isinstance(x, int)][1:]
                seen.append([(x == 1, x % 16 == 0) for x in integers])
                self.kernel[grid](*arguments, **keywords)

            return launch

    monkeypatch.setattr(radixkv_kernels.kv, "load_kernel", lambda *args: Recording(load(*args)))
    for tokens in (1, 2, 3):
        rows = torch.randn(2, 16, tokens, device=device).permute(2, 0, 1).contiguous()
        if tokens == 1:
            rows = rows.as_strided(rows.shape, (1, 16, 1))
        caches = [empty_cache(4, 1, 2, 16, torch.float32, device) for _ in "kv"]
        write_kv(rows, rows, *caches, torch.arange(tokens, device=device))
        assert torch.equal(caches[0][:tokens, 0], rows)
    assert seen[0] == seen[1] == seen[2]
