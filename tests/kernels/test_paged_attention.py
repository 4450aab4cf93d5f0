"""paged_attention: kernel and torch twin against a float64 reference that knows no blocks."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import radixkv_kernels.attention
import torch
from attention_scenes import (
    TOLERANCE,
    Geometry,
    Node,
    attend,
    batch,
    check,
    error,
    leaves,
    make_scene,
    random_forest,
    reference,
    twin,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from radixkv_kernels import TO_THE_END, Tile, build_work_list, paged_attention, unshared_work_list

# A capped logit's exponential may overflow, to the right limit; only the interpreter warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")

DTYPES = list(TOLERANCE)
QUANTIZED = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
SMALL = Tile(16, 16, 4, 1)

GEOMETRIES = {
    "one head": Geometry(1, 1, 16, 16, 16, torch.float32),
    "group of 3, D 64": Geometry(3, 2, 64, 64, 16, torch.float16),
    "group of 5, D 80": Geometry(5, 1, 80, 80, 32, torch.float16),
    "group of 7, D 96": Geometry(7, 1, 96, 96, 64, torch.bfloat16),
    "four heads, no groups": Geometry(1, 4, 32, 32, 16, torch.float32),
    "one KV head for 20": Geometry(20, 1, 128, 128, 16, torch.bfloat16),
    "MLA": Geometry(4, 1, 192, 128, 16, torch.float16),
    "D 256": Geometry(2, 1, 256, 256, 16, torch.float32),
    "D 512": Geometry(2, 1, 512, 512, 16, torch.bfloat16),
    "D 320": Geometry(1, 1, 320, 272, 16, torch.float16, torch.float8_e4m3fn),
    "values wider than keys": Geometry(3, 1, 24, 40, 16, torch.float32),
    "blocks of 3": Geometry(2, 1, 16, 16, 3, torch.float32),
    "blocks of 1": Geometry(2, 1, 16, 16, 1, torch.float16),
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("split", [0.0, 1.0], ids=["whole", "split"])
def test_every_geometry(geometry, split, device):
    size = geometry.block_size
    forest = [Node(size * (32 // size), [Node(5), Node(17)]), Node(20)]
    check(make_scene(1, geometry, forest, [1, 3, 1], device=device, split=split))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_around_a_block(dtype, device):
    geometry = Geometry(3, 2, 32, 32, 16, dtype)
    check(batch([1, 15, 16, 17, 33], [1, 1, 1, 1, 1], geometry, device=device))
    check(batch([1, 15, 16, 17, 33], [1, 15, 2, 17, 4], geometry, device=device, split=1.0))


@given(data=st.data(), seed=st.integers(0, 2**32))
# Without shrinking, which takes minutes in the interpreter: what fails is printed, seed and all.
@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_forest(data, seed, device):
    rng = random.Random(seed)
    dtype = data.draw(st.sampled_from(DTYPES))
    cache_dtypes = [None, None, *QUANTIZED]
    geometry = Geometry(
        data.draw(st.integers(1, 7)),
        data.draw(st.integers(1, 2)),
        data.draw(st.integers(16, 256)),
        data.draw(st.integers(16, 256)),
        data.draw(st.sampled_from([16, 32, 64])),
        dtype,
        data.draw(st.sampled_from(cache_dtypes)),
    )
    forest = random_forest(rng, data.draw(st.integers(0, 4)), geometry.block_size)
    sizes = [leaf.length for leaf in leaves(forest)]
    num_queries = [rng.choice([1, 1, 1, 0, min(size, 9), size]) for size in sizes]
    if not any(num_queries):
        num_queries[0] = 1
    scene = make_scene(
        seed,
        geometry,
        forest,
        num_queries,
        device=device,
        share=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        split=data.draw(st.sampled_from([0.0, 0.5])),
        shuffle=data.draw(st.booleans()),
        to_the_end=data.draw(st.booleans()),
    )
    options = {}
    for name, strategy in {
        "window": st.integers(1, 70),
        "chunk": st.integers(1, 70),
        "softcap": st.floats(0.5, 50),
    }.items():
        if data.draw(st.integers(0, 3)) == 0:
            options[name] = data.draw(strategy)
    for name in ("sinks", "alibi_slopes"):
        if data.draw(st.integers(0, 3)) == 0:
            options[name] = torch.rand(geometry.heads).to(device)
    # Rows that sit out, as a graph's padding does.
    if data.draw(st.booleans()):
        scene.positions[rng.randrange(len(scene.positions))] = -1
    rows = 16 if max(num_queries) * geometry.group <= 32 else 64
    check(scene, tile=Tile(rows, data.draw(st.sampled_from([16, 32])), 4, 1), **options)


@pytest.mark.parametrize("window", range(1, 36))
def test_window_edges(window, device):
    # Of a split in the middle, and of tiles of 16: the window's edge passes every offset.
    scene = batch([35], [4], Geometry(2, 1), device=device)
    scene.reads = [(0, 4, 0, 0, 19), (0, 4, 0, 19, TO_THE_END)]
    check(scene, window=window, tile=SMALL)


@pytest.mark.parametrize("chunk", [1, 2, 7, 15, 16, 17, 31, 32, 34, 35, 36])
def test_chunk_edges(chunk, device):
    scene = batch([35], [6], Geometry(2, 1), device=device)
    scene.reads = [(0, 6, 0, 0, 30), (0, 6, 0, 30, TO_THE_END)]
    check(scene, chunk=chunk, tile=SMALL)


def test_prefill_and_decode_share_a_run(device):
    forest = [Node(32, [Node(1), Node(20), Node(16, [Node(3), Node(40)])]), Node(9)]
    scene = make_scene(3, Geometry(), forest, [1, 20, 1, 33, 9], device=device)
    # The run of 32 is read by four sequences at once, the queries of two of them many.
    assert [read[1] for read in scene.reads if read[3:] == (0, 32)] == [1 + 20 + 1 + 33]
    check(scene)
    check(scene, window=11)


def test_queries_inside_a_shared_run(device):
    # A run that two sequences prefill: its causal mask is by position, like any other.
    scene = batch([24], [24], device=device)
    scene = replace(scene, reads=[(0, 24, 0, 0, 16), (0, 24, 0, 16, 24)])
    check(scene)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [0.05, 1.0, 30.0])
def test_softcap_far_beyond_its_cap(dtype, cap, device):
    geometry = Geometry(2, 1, 32, 32, 16, dtype, logit_scale=4000.0 * cap)
    scene = batch([40, 5], [2, 1], geometry, device=device)
    logits = torch.einsum(
        "hd,khd->hk", scene.query[0].double().cpu(), scene.keys[0].expand(-1, 2, -1)
    )
    assert (logits * scene.scale / cap).abs().max() > 1000
    # On the way to 1 an exponential overflows, of which only the interpreter warns.
    with np.errstate(over="ignore"):
        check(scene, softcap=cap)


def test_softcap_far_above_the_logits(device):
    # 1 - 2 / (exp + 1) alone loses the digits of a small tanh: this failed in float32.
    check(batch([40, 5], [2, 1], device=device), softcap=300.0)


def test_large_logits_without_a_cap(device):
    scene = batch([40, 5], [2, 1], Geometry(logit_scale=3000.0), device=device)
    check(scene, tile=SMALL)
    scene.reads = [(0, 2, 0, 0, 21), (0, 2, 0, 21, TO_THE_END), (2, 1, 1, 0, 5)]
    check(scene, tile=SMALL)


def test_sinks_larger_and_smaller_than_all_logits(device):
    scene = batch([20, 1], [2, 1], Geometry(4, 1), device=device, split=1.0)
    for sinks in ([-200.0, -1.0, 1.0, 200.0], [-math.inf, 0.0, 0.0, 90.0]):
        check(scene, sinks=torch.tensor(sinks, device=device))


# Each is told by what goes wrong without it.
FEATURES = {
    "window": {"window": 9},
    "chunk": {"chunk": 12},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": torch.tensor([1.0, -1.0, 2.0])},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.2])},
    "bidirectional": {"causal": False},
}


def feature_scene(device, **cutting):
    return batch([30, 17], [5, 1], device=device, to_the_end=False, **cutting)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("split", [0.0, 1.0], ids=["whole", "split"])
@pytest.mark.parametrize("call", [attend, twin], ids=lambda call: call.__name__)
def test_a_feature_switched_off_is_noticed(feature, split, call, device):
    scene = feature_scene(device, split=split)
    options = {
        name: setting.to(device) if isinstance(setting, torch.Tensor) else setting
        for name, setting in FEATURES[feature].items()
    }
    wanted, _ = reference(scene, **options)
    assert error(call(scene, **options)[0], wanted) < TOLERANCE[torch.float32]
    assert error(call(scene)[0], wanted) > 0.02


@pytest.mark.parametrize("call", [attend, twin], ids=lambda call: call.__name__)
@pytest.mark.parametrize("cache_dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("scale", ["key_scale", "value_scale"])
def test_a_scale_left_out_is_noticed(call, cache_dtype, scale, device):
    geometry = Geometry(2, 2, 32, 32, 16, torch.float16, cache_dtype)
    scene = batch([30, 17], [5, 1], geometry, device=device)
    wanted, _ = reference(scene)
    assert error(call(scene)[0], wanted) < TOLERANCE[torch.float16]
    assert error(call(scene, **{scale: None})[0], wanted) > 0.02
    swapped = scene.scales[scale].flip(0)
    assert error(call(scene, **{scale: swapped})[0], wanted) > 0.02


@pytest.mark.parametrize("call", [attend, twin], ids=lambda call: call.__name__)
def test_an_order_left_out_is_noticed(call, device):
    scene = batch([30, 17, 8], [5, 1, 2], device=device, shuffle=True)
    wanted, _ = reference(scene)
    assert error(call(scene)[0], wanted) < TOLERANCE[torch.float32]
    assert error(call(scene, replace(scene.work(), order=None))[0], wanted) > 0.02


@pytest.mark.parametrize("query_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", QUANTIZED, ids=str)
def test_quantized_caches(query_dtype, cache_dtype, device):
    geometry = Geometry(3, 2, 80, 64, 16, query_dtype, cache_dtype)
    check(batch([40, 17, 1], [3, 1, 1], geometry, device=device, split=1.0))


@pytest.mark.parametrize(("dtype", "nans"), [(torch.float8_e4m3fn, 2), (torch.float8_e5m2, 6)])
def test_float8_decoded_by_hand(dtype, nans, device, monkeypatch):
    """Where the hardware lacks it (sm_80): each of the 256 numbers, exactly, and NaN for NaN."""
    monkeypatch.setattr(radixkv_kernels.attention, "target_of", lambda device: "sm_80")
    numbers = torch.arange(256, dtype=torch.uint8, device=device).view(dtype)
    # An infinity times the zero weight of a row that is padding would be warned of.
    numbers = torch.where(numbers.float().isinf(), 0.0, numbers.float()).to(dtype)
    cache = numbers.view(16, 1, 1, 16)
    tables = torch.arange(16, dtype=torch.int32, device=device)[:, None]
    query, positions = torch.zeros(16, 1, 16, device=device), torch.zeros_like(tables[:, 0])
    work = unshared_work_list([1] * 16, device=device)
    got = paged_attention(
        query, torch.zeros_like(cache), cache, tables, work, positions, scale=1.0, tile=SMALL
    )
    assert torch.equal(got.flatten().nan_to_num(777.0), numbers.float().nan_to_num(777.0))
    assert int(got.isnan().sum()) == nans
    geometry = Geometry(3, 1, 32, 32, 16, torch.float16, dtype)
    check(batch([40, 17], [3, 1], geometry, device=device), tile=SMALL)


def test_rows_that_see_nothing_are_zero(device):
    scene = batch([30, 17], [5, 1], device=device, split=1.0)
    scene.positions[[1, 5]] = -1
    _, wanted_lse = reference(scene)
    assert (wanted_lse[[1, 5]] == -math.inf).all()
    out, lse = attend(scene)
    assert (out[[1, 5]] == 0).all()
    assert (lse[[1, 5]] == -1e30).all()
    check(scene)
    check(scene, sinks=torch.tensor([1.0, -1.0, 2.0], device=device))
    check(scene, window=7)
    scene = feature_scene(device)
    scene.positions[[1, 5]] = -1
    check(scene, causal=False)


def test_splits_in_which_a_window_leaves_nothing(device):
    scene = batch([50, 50], [1, 2], device=device)
    scene.reads = [
        (first, count, row, start, start + 10 if start < 40 else TO_THE_END)
        for first, count, row in ((0, 1, 0), (1, 2, 1))
        for start in range(0, 50, 10)
    ]
    check(scene, window=5)
    check(scene, chunk=7)


@pytest.mark.parametrize("option", ["window", "chunk"])
def test_blocks_that_all_queries_have_left_behind_are_not_used(option, device):
    scene = batch([50], [2], device=device)
    # As if they were freed and somebody else's by now: only keys from 32 on are left.
    scene.block_tables[0, :2] = scene.block_tables[0, -1]
    check(scene, **{option: 16})


def test_empty_runs(device):
    scene = batch([20, 9], [1, 3], device=device)
    # Of no key at all: shared, before the first key and behind the last.
    scene.reads += [(0, 4, 0, 0, 0), (0, 4, 1, 9, 9), (0, 1, 0, 20, TO_THE_END)]
    scene.reads = [
        (first, count, row, start, min(end, 20) if (first, start) == (0, 0) else end)
        for first, count, row, start, end in scene.reads
    ]
    check(scene)


def test_a_token_that_no_item_serves_is_left_alone(device):
    scene = batch([20, 9, 4], [1, 3, 1], device=device, split=1.0)
    scene.reads = [read for read in scene.reads if read[0] != 1]
    for call in (attend, twin):
        out, _ = call(scene)
        assert out.isnan().flatten(1).all(1).tolist() == [False, True, True, True, False]


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_row_of_nan_fails_alone(device):
    scene = batch([20, 9], [4, 1], device=device)
    scene.query[2] = torch.nan
    out, _ = attend(scene)
    assert out.isnan().flatten(1).any(1).tolist() == [False, False, True, False, False]


def test_neighbours_change_no_bit(device):
    """A row alone, in a full tile, at another place in it, merged or not: the same bits."""
    forest = [Node(32, [Node(7), Node(20), Node(3)])]
    scene = make_scene(5, Geometry(3, 2, 48, 40), forest, [1, 12, 1], device=device, share=0.0)
    together, lse = attend(scene, tile=SMALL, window=21)
    for token, (row, position) in enumerate(
        zip(scene.sequence_of, scene.positions.tolist(), strict=True)
    ):
        alone = build_work_list([(token, 1, row, 0, TO_THE_END)], len(scene.query), device=device)
        out, own_lse = attend(scene, alone, tile=SMALL, window=21)
        assert torch.equal(out[token], together[token]), (token, position)
        assert torch.equal(own_lse[token], lse[token])


def test_splits_at_the_same_keys_give_the_same_bits(device):
    """Who shares a run, which item comes first, and where partials lie changes nothing."""
    forest = [Node(32, [Node(7), Node(20), Node(3)])]
    scene = make_scene(5, Geometry(3, 2, 48, 40), forest, [1, 12, 1], device=device)
    apart = [
        (first, count, row, start, end)
        for first, count, row in ((0, 1, 0), (1, 12, 1), (13, 1, 2))
        for start, end in ((0, 32), (32, TO_THE_END))
    ]
    shared, lse = attend(scene, tile=SMALL, window=37)
    for reads in (apart, apart[::-1], scene.reads[::-1]):
        work = build_work_list(reads, len(scene.query), device=device)
        out, own_lse = attend(scene, work, tile=SMALL, window=37)
        assert torch.equal(out, shared)
        assert torch.equal(own_lse, lse)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_merge_of_one_partial_is_what_the_item_would_have_written(sinks, device):
    scene = batch([30, 17], [5, 1], Geometry(3, 2), device=device)
    options = {"sinks": 9 * torch.randn(6, device=device)} if sinks else {}
    direct = scene.work()
    assert direct.num_partials == 0
    items = direct.items.clone()
    items[:, 5] = items[:, 0]
    every = torch.arange(7, dtype=torch.int32, device=device)
    merged = replace(direct, items=items, merge_ptr=every, merge_idx=every[:6].contiguous())
    for got, wanted in zip(
        attend(scene, merged, **options), attend(scene, direct, **options), strict=True
    ):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8, 9])
def test_any_number_of_partials_is_merged(parts, device):
    """Four are loaded at a time; those behind the last are nobody's."""
    scene = batch([40, 33], [1, 2], Geometry(3, 2), device=device)
    bounds = [*range(0, 3 * parts, 3), TO_THE_END]
    scene.reads = [
        (first, count, row, *bounds[i : i + 2])
        for first, count, row in ((0, 1, 0), (1, 2, 1))
        for i in range(parts)
    ]
    check(scene, tile=SMALL)
    check(scene, tile=SMALL, sinks=torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0, 1.0], device=device))


def test_partials_without_a_key_change_no_bit(device):
    """A run that only others see leaves one: where it stands among the others must not matter."""
    scene = batch([64], [1], Geometry(3, 2), device=device)
    seen = [(0, 1, 0, start, start + 8) for start in range(24, 64, 8)]
    out, lse = attend(replace(scene, reads=seen), window=40, tile=SMALL)
    for empty in (1, 2, 3):
        unseen = [(0, 1, 0, 8 * i, 8 * i + 8) for i in range(empty)]
        other, other_lse = attend(replace(scene, reads=unseen + seen), window=40, tile=SMALL)
        assert torch.equal(other, out)
        assert torch.equal(other_lse, lse)


def test_no_number_of_tokens_compiles_anything_new(device, monkeypatch):
    """What the JIT looks at of each integer: whether it is 1, and whether 16 divides it."""
    seen = []
    load = radixkv_kernels.attention.load_kernel

    class Recording:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **keywords):
                integers = [x for x in arguments if isinstance(x, int)]
                if len(integers) > 2:
                    # The block tables' stride is not looked at.
                    integers.pop(8)
                seen.append([(x == 1, x % 16 == 0) for x in integers])
                self.kernel[grid](*arguments, **keywords)

            return launch

    monkeypatch.setattr(
        radixkv_kernels.attention, "load_kernel", lambda *args: Recording(load(*args))
    )
    monkeypatch.setattr(radixkv_kernels.attention, "interpreted", lambda kernel: True)
    for tokens in (1, 2, 3):
        scene = batch([40] * tokens, [1] * tokens, Geometry(3, 2), device=device)
        scene.reads = [
            (row, 1, row, *keys) for row in range(tokens) for keys in ((0, 8), (8, TO_THE_END))
        ]
        if tokens == 1:
            # As a view may have it.
            scene.query = scene.query.as_strided(scene.query.shape, (1, 16, 1))
        check(scene)
    assert len(seen) == 2 * 3
    attends, merges = seen[::2], seen[1::2]
    assert len(attends[0]) == 10
    assert len(merges[0]) == 2
    assert attends[0] == attends[1] == attends[2]
    assert merges[0] == merges[1] == merges[2]


def test_launches_no_more_than_it_must(device, monkeypatch):
    merges = []
    merge = radixkv_kernels.attention._merge
    monkeypatch.setattr(
        radixkv_kernels.attention, "_merge", lambda *args: (merges.append(1), merge(*args))
    )
    attend(batch([20, 9], [1, 3], device=device))
    assert not merges
    attend(batch([20, 9], [1, 3], device=device, split=1.0))
    assert len(merges) == 1


def test_fixed_buffers_with_room_to_spare(device):
    """As a CUDA graph keeps them: surplus programs exit, and the next work replaces this one."""
    room = None
    for seed, split in ((0, 1.0), (1, 0.0), (2, 1.0)):
        scene = batch([20, 9], [1, 3], device=device, seed=seed, split=split, shuffle=True)
        work = scene.work()
        if room is None:
            room = work.padded(16, 8, 24, 5)
            # What a surplus program would write, if it did not exit.
            surplus = torch.tensor([0, 1, 0, 0, 5, -1], dtype=torch.int32, device=device)
            room.items[int(room.num_items) :] = surplus
        else:
            room.copy_(work)
        spare = torch.full((4, *scene.query.shape[1:]), torch.nan, device=device)
        padded = replace(
            scene,
            query=torch.cat([scene.query, spare]),
            positions=torch.cat([scene.positions, scene.positions.new_full((4,), -1)]),
        )
        out, lse = attend(padded, room, tile=SMALL)
        wanted, wanted_lse = attend(scene, work, tile=SMALL)
        assert torch.equal(out[:4], wanted)
        assert torch.equal(lse[:4], wanted_lse)
        assert out[4:].isnan().all()
        assert torch.equal(twin(padded, room)[0][:4], twin(scene, work)[0])


def test_log_sum_exps_merge_what_lists_computed_apart(device):
    scene = batch([40], [3], Geometry(2, 2), device=device)
    whole, lse = attend(scene)
    halves = [
        attend(scene, build_work_list([(0, 3, 0, *keys)], 3, device=device))
        for keys in ((0, 21), (21, TO_THE_END))
    ]
    weights = [torch.exp2(part - lse) for _, part in halves]
    merged = sum(w[:, :, None] * out for w, (out, _) in zip(weights, halves, strict=True))
    assert torch.allclose(sum(weights), torch.ones_like(lse), atol=1e-6)
    assert torch.allclose(merged, whole, atol=1e-6)


def test_every_layout(device):
    """Queries cut from a fused projection, K and V in one tensor, an output with room around it."""
    scene = batch([30, 17], [5, 1], Geometry(3, 2, 32, 32), device=device)
    wanted, _ = attend(scene)
    fused = torch.full((6, 10, 32), torch.nan, device=device)
    fused[:, 2:8] = scene.query
    blocks = torch.full((len(scene.key_cache), 2, 16, 2, 32), torch.nan, device=device)
    blocks[:, 0], blocks[:, 1] = scene.key_cache, scene.value_cache
    by_head = scene.value_cache.transpose(1, 2).contiguous().transpose(1, 2)
    tables = torch.full((2, 9), 2**30, dtype=torch.int32, device=device)
    tables[:, : scene.block_tables.shape[1]] = scene.block_tables
    room = torch.full((6, 8, 40), torch.nan, device=device)
    for value_cache in (blocks[:, 1], by_head):
        out = room.clone()
        got = paged_attention(
            *(fused[:, 2:8], blocks[:, 0], value_cache, tables[:, : scene.block_tables.shape[1]]),
            *(scene.work(), scene.positions, out[:, 1:7, 4:36]),
            scale=scene.scale,
        )
        assert got.data_ptr() == out[:, 1:7, 4:36].data_ptr()
        assert torch.equal(got, wanted)
        assert int(out.isnan().sum()) == out.numel() - wanted.numel()


def test_nothing_to_do(device):
    scene = batch([20], [1], device=device)
    empty = build_work_list([], 1, device=device)
    assert attend(scene, empty)[0].isnan().all()
    nobody = replace(scene, query=scene.query[:0], positions=scene.positions[:0])
    out, lse = attend(nobody, build_work_list([], 0, device=device))
    assert out.shape == (0, 3, 16)
    assert lse.shape == (0, 3)


def test_takes_tensors_that_require_grad(device):
    scene = batch([20], [1], device=device)
    wanted, _ = attend(scene)
    tracked = replace(scene, query=scene.query.clone().requires_grad_())
    for call in (attend, twin):
        out, _ = call(tracked)
        assert not out.requires_grad
        assert error(out, wanted.double().cpu()) < 1e-6
