"""copy_blocks: a snapshot, whatever the pairs; Triton, the torch twin and a naive loop agree."""

import numpy as np
import pytest
import radixkv_kernels.kv
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radixkv_kernels import copy_blocks, torch_twins

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64]


def random_cache(shape, dtype, device):
    """Every bit pattern, NaNs and their payloads included."""
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return raw.view(dtype).to(device)


def raw(cache):
    return cache.view(torch.uint8).cpu().numpy()


def walled(cache):
    """A copy with a block of zeros on either side, where a stray write shows."""
    room = cache.new_zeros(cache.shape[0] + 2, *cache.shape[1:])
    room.view(torch.uint8)[1:-1] = cache.view(torch.uint8)
    return room


def check(caches, pairs, ids=list):
    expected = []
    for cache in caches:
        before, after = raw(cache).copy(), raw(cache).copy()
        for source, target in pairs:
            after[target] = before[source]
        expected.append(after)
    sources, targets = ids([s for s, _ in pairs]), ids([t for _, t in pairs])
    for copy in (copy_blocks, torch_twins.copy_blocks):
        rooms = [walled(cache) for cache in caches]
        assert copy([room[1:-1] for room in rooms], sources, targets) is None
        for room, wanted in zip(rooms, expected, strict=True):
            np.testing.assert_array_equal(raw(room)[1:-1], wanted)
            assert not raw(room)[[0, -1]].any()


PAIRS = {
    "none": [],
    "one": [(0, 3)],
    "one source, many targets": [(2, 0), (2, 1), (2, 5)],
    "swap": [(0, 1), (1, 0)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "chain from its end": [(2, 3), (1, 2), (0, 1)],
    "cycle of three": [(0, 2), (2, 4), (4, 0)],
    "cycle with a tail": [(0, 1), (1, 0), (1, 4), (5, 3)],
    "onto itself": [(2, 2)],
    "onto itself and away": [(2, 2), (2, 0)],
    "reversed": [(i, 5 - i) for i in range(6)],
}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_snapshot(pairs, block_size, device):
    key = random_cache((6, block_size, 2, 80), torch.bfloat16, device)
    value = random_cache((6, block_size, 2, 40), torch.float32, device)
    check([key, value], pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_every_geometry(dtype, block_size, head_dim, device):
    check([random_cache((4, block_size, 1, head_dim), dtype, device)], [(0, 3), (3, 1)])


@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_any_pairs(data, seed, device):
    torch.manual_seed(seed)
    blocks = data.draw(st.integers(1, 9))
    block = st.integers(0, blocks - 1)
    pairs = data.draw(st.lists(st.tuples(block, block), unique_by=lambda pair: pair[1]))
    shapes = st.tuples(st.just(blocks), *[st.integers(1, top) for top in (4, 3, 130)])
    caches = data.draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=2))
    check([random_cache(shape, dtype, device) for shape, dtype in caches], pairs)


@pytest.mark.parametrize("ids", [np.array, torch.tensor, tuple], ids=lambda ids: ids.__name__)
def test_ids_of_any_kind(ids, device):
    check([random_cache((4, 2, 1, 8), torch.float32, device)], [(0, 1), (3, 2)], ids)


def test_empty_caches(device):
    check([], [(0, 1)])
    check([torch.empty(0, 2, 1, 8, device=device)], [])
    check([torch.empty(2, 0, device=device)], [(0, 1)])


def test_a_view_that_starts_at_an_odd_element(device):
    whole = random_cache((1, 4 * 6 + 1), torch.float16, device).flatten()
    before = whole.clone()
    copy_blocks([whole[1:].view(4, 2, 1, 3)], [0], [2])
    before[1 + 12 : 1 + 18] = before[1:7].clone()
    assert torch.equal(whole.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize(
    ("pairs", "launches"),
    [([(0, 1), (2, 3)], 1), ([(0, 1), (1, 2)], 2), ([(0, 1), (2, 2)], 1), ([(2, 2)], 0)],
)
def test_stages_only_when_it_must(pairs, launches, device, monkeypatch):
    seen = []
    launch = radixkv_kernels.kv._copy_rows
    monkeypatch.setattr(
        radixkv_kernels.kv, "_copy_rows", lambda *args: (seen.append(args), launch(*args))
    )
    copy_blocks([random_cache((4, 2, 1, 8), torch.float32, device)], *zip(*pairs, strict=True))
    assert len(seen) == launches
