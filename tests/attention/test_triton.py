"""TritonBackend, in the interpreter where there is no GPU, against the float64 reference."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import radixkv_kernels.attention
import radixkv_kernels.kv
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
from steps import SHARE_ALL, TOLERANCE, Shape, Step, attend, forest, lone, with_cached_rows

from radixkv.attention import (
    CostModel,
    KVStore,
    LayerShape,
    ReferenceBackend,
    Row,
    Span,
    TritonBackend,
    make_batch,
    plan_reads,
    triton_backend,
)
from radixkv.errors import ConfigError

pytestmark = pytest.mark.interpreted

# Shares what can be shared, and cuts what is left at every second tile of the interpreter's.
CUTS = CostModel(per_item=0, tile=16, programs=1000)
FIXED = CostModel(per_item=0, tile=16, split=32)
UNSHARED = CostModel(per_item=10**9, tile=16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _poisoned(poisoned: None) -> None:
    """Outputs, partials and stores are NaN at first."""


def check(step: Step, attention: Any = None, *costs: CostModel) -> None:
    """The reference's values, and the same store."""
    attention = attention or attend()
    expected, reference = step.run(ReferenceBackend, attention)
    for cost in costs or (CUTS,):
        found, backend = step.run(partial(TritonBackend, cost=cost), attention, cost)
        error = float((found - expected).norm() / expected.norm())
        assert error < TOLERANCE[step.shape.dtype], (cost, error)
        for name in ("keys", "values"):
            ours, theirs = getattr(backend.store, name)[0], getattr(reference.store, name)[0]
            assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("groups", "key_dim", "value_dim"), [(1, 16, 16), (3, 80, 80), (7, 24, 12)]
)
def test_head_shapes(groups: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(1, groups, key_dim, value_dim, dtype)
    check(Step.of(forest(groups, 4, depth=2, rows=4), 4, shape))


@pytest.mark.parametrize(("size", "depth"), [(1, 2), (2, 4), (16, 0), (16, 3)])
def test_forests(size: int, depth: int) -> None:
    step = Step.of(forest(depth, size, depth=depth, rows=5), size, Shape(1, 3))
    check(step, attend(), CUTS, SHARE_ALL, UNSHARED, FIXED)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_lengths(length: int) -> None:
    for queries in {1, length}:
        check(Step.of([lone(length, 16, queries)], 16, Shape(1, 2)))


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("span", [Span(window=3), Span(window=9), Span(chunk=5)], ids=str)
def test_windows_and_chunks(queries: int, span: Span) -> None:
    rows = forest(5, 4, depth=2, rows=4, queries=(queries,))
    check(Step.of(rows, 4, Shape(1, 2, 8, 8)), attend(span=span), CUTS, FIXED)


def test_softcap_and_sinks() -> None:
    step = Step.of(forest(8, 4, depth=2, rows=4, queries=(1, 5)), 4, Shape(2, 2))
    sinks = torch.linspace(-3, 4, 4).to(torch.bfloat16)
    check(step, attend(softcap=2.0, sinks=sinks))
    check(step, attend(sinks=sinks, span=Span(window=5)))


@pytest.mark.parametrize("seed", range(6))
def test_everything_at_once(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 4, 16])
    dim, dtype = rng.choice([8, 24]), rng.choice(list(TOLERANCE))
    shape = Shape(1, rng.choice([1, 2, 3]), dim, rng.choice([dim, 12]), dtype)
    rows = forest(seed, size, depth=rng.randint(0, 3), rows=rng.randint(1, 5))
    step = Step.of(rows, size, shape, seed)
    if seed % 2:
        step = with_cached_rows(step, [rng.random() < 0.5 for _ in rows])
    span = Span(rng.choice([0, 3, size, 2 * size + 1]), rng.choice([0, 0, 5]))
    check(step, attend(span=span, softcap=rng.choice([0.0, 2.0])))


@pytest.mark.parametrize("keep", [[False] * 4, [True, False, True, False]], ids=str)
def test_rows_that_only_ask_write_nothing(keep: list[bool]) -> None:
    rows = forest(11, 4, depth=2, rows=4, queries=(1, 3))
    check(with_cached_rows(Step.of(rows, 4, Shape(1)), keep))


def test_copies_come_after_the_writes_and_one_after_the_other() -> None:
    writer = Row(np.array([3], np.int32), 0, 4)
    rows = [Row(np.array([9], np.int32), 2, 2), Row(np.array([11], np.int32), 2, 1), writer]
    step = Step.of(rows, 4, Shape(1), 2)
    nothing = torch.full_like(step.keys, torch.nan)
    copies = (([12, 13], [36, 37]), ([36, 37], [44, 45]))
    check(replace(step, keys=nothing, values=nothing.clone(), copies=copies))


def test_a_layer_that_reads_anothers_keys_writes_none() -> None:
    rows = forest(12, 4, depth=2, rows=4, queries=(1, 5))
    step = with_cached_rows(Step.of(rows, 4, Shape(1)), [False] * 4)
    expected, _ = step.run(ReferenceBackend, attend())
    backend = TritonBackend(step.store(), cost=CUTS)
    before = backend.store.keys[0].clone()
    out = backend.forward(attend(), step.batch(CUTS), step.query, None, None)
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-6
    assert torch.equal(before.nan_to_num(9), backend.store.keys[0].nan_to_num(9))


def test_strided_queries_keys_and_values() -> None:
    step = Step.of(forest(13, 4, depth=1, rows=3, queries=(1, 6)), 4, Shape(1))
    swapped = {
        name: getattr(step, name).transpose(0, 2).contiguous().transpose(0, 2)
        for name in ("query", "key", "value")
    }
    check(replace(step, **swapped))


def test_a_model_in_float32_over_a_store_in_half_the_width() -> None:
    step = Step.of(forest(14, 4, depth=1, rows=3), 4, Shape(1, dtype=torch.bfloat16))
    expected, _ = step.run(ReferenceBackend, attend())
    wide = [x.float() for x in (step.query, step.key, step.value)]
    out = TritonBackend(step.store(), cost=CUTS).forward(attend(), step.batch(CUTS), *wide)
    assert out.dtype == torch.float32
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


def test_blocks_are_copied_in_all_layers_all_sources_first() -> None:
    store = KVStore([LayerShape(1, 8, 8), LayerShape(2, 8, 4)], 4, 2, torch.float32)
    for cache in (*store.keys, *store.values):
        cache.copy_(torch.arange(4.0)[:, None, None, None].expand_as(cache))
    backend = TritonBackend(store, cost=CUTS)
    backend.copy_blocks([])
    backend.copy_blocks([(0, 1), (1, 3)])
    for cache in (*store.keys, *store.values):
        assert cache[:, 0, 0, 0].tolist() == [0, 0, 2, 1]


# --- What is launched, and what is made when. ---


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels launched, by name."""
    found: Counter[str] = Counter()

    class Counting:
        def __init__(self, kernel: Any, name: str) -> None:
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            def launch(*arguments: Any, **keywords: Any) -> None:
                found[self.name] += 1
                self.kernel[grid](*arguments, **keywords)

            return launch

    for module in (radixkv_kernels.attention, radixkv_kernels.kv):
        load = module.load_kernel

        def counting(name: str, kernel: str, device: torch.device, load: Any = load) -> Any:
            return Counting(load(name, kernel, device), kernel)

        monkeypatch.setattr(module, "load_kernel", counting)
        monkeypatch.setattr(radixkv_kernels.attention, "interpreted", lambda kernel: True)
    return found


@pytest.mark.parametrize(("cost", "merges"), [(UNSHARED, 0), (CUTS, 1)], ids=["plain", "shared"])
def test_a_layer_is_three_launches_at_most(
    launches: Counter[str], cost: CostModel, merges: int
) -> None:
    step = Step.of(forest(3, 4, depth=2, rows=4, queries=(1,)), 4, Shape(1))
    backend, batch = TritonBackend(step.store(), cost=cost), step.batch(cost)
    assert bool(batch.plan.runs) == bool(merges)
    for _ in range(2):
        launches.clear()
        backend.forward(attend(), batch, step.query, step.key, step.value)
        expected = {"write_kv_kernel": 1, "attend_kernel": 1, "merge_kernel": merges}
        assert launches == Counter(expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_keys_and_values_are_rounded_by_the_launch_that_writes_them(
    launches: Counter[str], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator of torch's before it: the kernel takes what the model made, of odd widths too."""
    step = Step.of(forest(3, 4, depth=2, rows=4, queries=(1,)), 4, Shape(2, 2, 17, 9))
    store = KVStore([LayerShape(2, 17, 9)], len(step.keys) // 4, 4, torch.float32, kv_dtype=kind)
    store.scales["key", 0] = torch.tensor([0.5, 3.0])
    expected = [store.kept("key", 0, step.key), store.kept("value", 0, step.value)]
    for cache in (*store.keys, *store.values):
        cache.zero_()
    batch = step.batch(CUTS)
    given: list[torch.Tensor] = []

    def writing(*arguments: Any, **keywords: Any) -> None:
        given.extend(arguments[:2])
        radixkv_kernels.write_kv(*arguments, **keywords)

    monkeypatch.setattr("radixkv.attention.triton_backend.write_kv", writing)
    monkeypatch.setattr(store, "kept", None)
    backend = TritonBackend(store, cost=CUTS)
    backend.forward(attend(), batch, step.query, step.key, step.value)
    assert launches["write_kv_kernel"] == 1
    assert given[0] is step.key
    assert given[1] is step.value
    for cache, wanted in zip((store.keys[0], store.values[0]), expected, strict=True):
        found = cache.view(torch.uint8).flatten(0, 1)[batch.slots]
        assert torch.equal(found, wanted.view(torch.uint8))


def test_work_lists_are_made_when_the_plan_or_its_cuts_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    def counting(*arguments: Any, **keywords: Any) -> Any:
        made.append(arguments[1])
        return plan_reads(*arguments, **keywords)

    monkeypatch.setattr("radixkv.attention.triton_backend.plan_reads", counting)
    store = KVStore([LayerShape(1, 8, 8)], 64, 4, torch.float32)
    store.keys[0].zero_()
    store.values[0].zero_()
    backend = TritonBackend(store, cost=FIXED)
    table = np.arange(40, dtype=np.int32)
    plan = None

    def decode(stop: int, queries: int = 1, layers: int = 2) -> None:
        nonlocal plan
        batch = make_batch([Row(table, stop - queries, queries)], 4, plan=plan, cost=FIXED)
        plan = batch.plan
        new = torch.zeros(queries, 1, 8)
        for _ in range(layers):
            for span in (Span(), Span(window=3)):
                backend.forward(attend(span=span), batch, torch.ones(queries, 2, 8), new, new)

    decode(30)
    assert made == [Span(), Span(window=3)]
    decode(31)
    decode(32)
    assert len(made) == 2
    decode(33)  # Beyond the first cut.
    assert len(made) == 4
    decode(34)
    assert len(made) == 4
    decode(36, queries=2)  # Other queries over the same rows.
    assert len(made) == 6
    plan = None
    decode(37)
    assert len(made) == 8


# --- Bits. ---


def rows_alone_and_together(dtype: torch.dtype) -> tuple[Step, list[Step]]:
    """A step of rows that share, and each of its rows as a step of its own."""
    common = list(range(20, 30))
    rows = [
        Row(np.array([*common, 40], np.int32), 42, 1),
        Row(np.array([*common, 50], np.int32), 40, 3),
        Row(np.array([*common[:9], 60, 61], np.int32), 37, 5),
        Row(np.array([70, 71], np.int32), 5, 2),
    ]
    step = Step.of(rows, 4, Shape(1, 2, 16, 16, dtype), 3)
    batch = step.batch(FIXED)
    alone = []
    for place, index in enumerate(batch.plan.order.tolist()):
        tokens = slice(int(batch.offsets[place]), int(batch.offsets[place + 1]))
        new = {name: getattr(step, name)[tokens] for name in ("query", "key", "value")}
        alone.append(replace(step, rows=[rows[index]], **new))
    return step, alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "attention", [attend(), attend(span=Span(window=30), softcap=3.0)], ids=["full", "window"]
)
def test_invariant_bits_do_not_depend_on_sharing_or_batch_mates(
    dtype: torch.dtype, attention: Any
) -> None:
    step, alone = rows_alone_and_together(dtype)
    triton = partial(TritonBackend, cost=FIXED)
    (run, *_) = step.batch(FIXED).plan.runs
    assert (run.last_row - run.first_row, run.last_block) == (3, 8)
    shared, _ = step.run(triton, attention, FIXED)
    unshared, _ = step.run(triton, attention, replace(FIXED, per_item=10**9))
    single = torch.cat([its.run(triton, attention, FIXED)[0] for its in alone])
    assert torch.equal(shared, unshared)
    assert torch.equal(shared, single)


def test_an_invariant_backend_cuts_at_fixed_places_with_one_tile() -> None:
    backend = TritonBackend(KVStore([LayerShape(1, 8, 8)], 4, 4, torch.float32), invariant=True)
    assert backend.cost.split == 1024
    assert backend.cost.split % backend.cost.tile == 0


def test_an_invariant_backend_uses_one_tile_whatever_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles = []

    def recording(*arguments: Any, **keywords: Any) -> Any:
        tiles.append(keywords["tile"])
        return radixkv_kernels.paged_attention(*arguments, **keywords)

    monkeypatch.setattr("radixkv.attention.triton_backend.paged_attention", recording)
    monkeypatch.setattr("radixkv.attention.triton_backend.target_of", lambda _: "sm_90")
    for queries in (1, 40):
        step = Step.of([lone(60, 16, queries)], 16, Shape(1, 2))
        check(step, attend(), FIXED)
        check(step, attend(), CUTS)
    (few, free, many, _) = tiles
    assert few == many
    assert few.rows > 16
    assert free is None


def test_partial_outputs_take_no_more_memory_than_they_may(
    monkeypatch: pytest.MonkeyPatch, launches: Counter[str]
) -> None:
    """Queries take turns, and no bit changes: an invariant prefill would need gigabytes else."""
    step = Step.of(forest(4, 4, depth=2, rows=4, queries=(1, 9, 40)), 4, Shape(1, 2))
    expected, _ = step.run(partial(TritonBackend, cost=FIXED), attend(), FIXED)
    assert launches["attend_kernel"] == 1
    monkeypatch.setattr(triton_backend, "PARTIALS_AT_ONCE", 30 * 4 * 2 * (1 + 16))
    backend = TritonBackend(step.store(), cost=FIXED)
    batch = step.batch(FIXED)
    found = backend.forward(attend(), batch, step.query, step.key, step.value)
    assert torch.equal(found.double(), expected)
    works = backend.work_lists(batch, triton_backend.WorkKey(Span(), 2, 1))
    assert len(works) > 2
    assert max(work.num_partials for work in works) <= 30
    assert launches["attend_kernel"] == 1 + len(works)
    again = step.batch(FIXED)
    assert torch.equal(backend.forward(attend(), again, step.query, step.key, step.value), found)


@settings(max_examples=200, deadline=None)
@given(
    reads=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), min_size=1),
    most=st.integers(1, 40),
)
def test_turns_leave_every_query_its_reads(reads: list[tuple[int, int]], most: int) -> None:
    items = np.array(
        [(first, min(count, 12 - first), i, i, i + 1) for i, (first, count) in enumerate(reads)],
        np.int64,
    )
    before = items.copy()

    def served(lists: list[Any]) -> Counter[tuple[int, ...]]:
        return Counter(
            (query, *rest)
            for its in lists
            for first, count, *rest in its.tolist()
            for query in range(first, first + count)
        )

    turns = triton_backend.in_turns(items, 12, most)
    assert served(turns) == served([items])
    assert np.array_equal(items, before)
    for its in turns:
        queries = {q for first, count, *_ in its.tolist() for q in range(first, first + count)}
        assert its[:, 1].sum() <= most or len(queries) == 1
    # All reads of a query are in one list.
    owners = [{query for query, *_ in served([its])} for its in turns]
    assert sum(map(len, owners)) == len(set().union(*owners))


# --- What is refused. ---


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (
            LayerShape(1, 512, 64),
            torch.float32,
            "256 wide in torch.float32, but layer 1 has keys of 512 .* use dtype='bfloat16' or",
        ),
        (LayerShape(1, 576, 512), torch.bfloat16, "layer 1 has keys of 576 .*; use device='cpu'"),
        (LayerShape(1, 8, 8), torch.float64, "no keys and values in torch.float64"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(
    shape: LayerShape, dtype: torch.dtype, reason: str
) -> None:
    store = KVStore([LayerShape(1, 8, 8), shape], 1, 4, dtype)
    with pytest.raises(ConfigError, match=reason):
        TritonBackend(store)


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("this function needs Triton, which is not installed")

    monkeypatch.setattr("radixkv.attention.triton_backend.load_kernel", missing)
    store = KVStore([LayerShape(1, 8, 8)], 1, 4, torch.float32)
    with pytest.raises(ConfigError, match=r"cannot run on cpu: .* not installed"):
        TritonBackend(store)
