"""The backends against ReferenceBackend, which reads key by key in float64."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from steps import TOLERANCE, Shape, Step, attend, check, forest, lone, with_cached_rows

from radixkv.attention import (
    FULL,
    KVStore,
    LayerAttention,
    LayerShape,
    ReferenceBackend,
    Row,
    Span,
    TorchBackend,
    make_batch,
)
from radixkv.attention.batch import table_slots


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# --- One value worked out by hand, so that the reference stands on something. ---


def test_the_reference_computes_a_known_value() -> None:
    store = KVStore([LayerShape(1, 1, 1)], 2, 2, torch.float64)
    store.keys[0].flatten()[[3, 2]] = torch.tensor([0.0, np.log(3.0)], dtype=torch.float64)
    store.values[0].flatten()[[3, 2]] = torch.tensor([4.0, 8.0], dtype=torch.float64)
    rows = [Row(np.array([1, 0], np.int32), 2, 1)]
    # Position 0 is slot 2, position 1 slot 3, position 2 slot 0.
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    new_key, new_value = one * np.log(4.0), one * 16.0
    for kind in (ReferenceBackend, TorchBackend):
        plain = LayerAttention(0, 1.0)
        out = kind(store).forward(plain, make_batch(rows, 2), one, new_key, new_value)
        # Weights 3, 1 and 4 on values 8, 4 and 16.
        assert float(out) == pytest.approx((3 * 8 + 4 + 4 * 16) / 8)
        sink = replace(plain, sinks=torch.tensor([np.log(8.0)]))
        out = kind(store).forward(sink, make_batch(rows, 2), one, new_key, new_value)
        assert float(out) == pytest.approx((3 * 8 + 4 + 4 * 16) / 16)
        window = replace(plain, span=Span(window=2))
        out = kind(store).forward(window, make_batch(rows, 2), one, new_key, new_value)
        assert float(out) == pytest.approx((4 + 4 * 16) / 5)
        chunk = replace(plain, span=Span(chunk=2))
        out = kind(store).forward(chunk, make_batch(rows, 2), one, new_key, new_value)
        assert float(out) == pytest.approx(16)
        cap = replace(plain, softcap=1e-9)
        out = kind(store).forward(cap, make_batch(rows, 2), one, new_key, new_value)
        assert float(out) == pytest.approx((8 + 4 + 16) / 3)


# --- Shapes. ---


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3, 7])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (80, 80), (24, 12), (8, 40)])
def test_head_shapes(groups: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(2, groups, key_dim, value_dim, dtype)
    check(Step.of(forest(groups, 4, depth=2, rows=5), 4, shape), attend())


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("depth", range(5))
def test_forests(size: int, depth: int) -> None:
    for seed in range(3):
        rows = forest(seed, size, depth=depth, rows=2 + 2 * depth)
        step = Step.of(rows, size, Shape(1, 3))
        check(step, attend())
        assert bool(step.batch().plan.runs)


@pytest.mark.parametrize("size", [1, 2, 16])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_short_lengths(length: int, size: int) -> None:
    for queries in {1, length // 2 or 1, length}:
        check(Step.of([lone(length, size, queries)], size, Shape()), attend())


def test_many_decodes_of_all_lengths_are_batched() -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 2, 63, 64, 65, 128, 129, 255, 256, 257, 300]
    blocks = iter(rng.permutation(500).astype(np.int32))
    rows = []
    for length in lengths:
        table = np.array([next(blocks) for _ in range(-(-length // 4))], np.int32)
        rows.append(Row(table, length - 1, 1))
    # Long views go alone: tables that run forwards.
    rows.append(Row(np.arange(500, 575, dtype=np.int32), 299, 1))
    check(Step.of(rows, 4, Shape()), attend())


@pytest.mark.parametrize("queries", [1, 9])
def test_a_table_that_only_ends_as_if_it_were_consecutive(queries: int) -> None:
    row = Row(np.array([1, 4, 3, 2, 5], np.int32), 20 - queries, queries)
    check(Step.of([row], 4, Shape()), attend())


# --- What a query sees. ---


@pytest.mark.parametrize("queries", [1, 6])
def test_windows_at_every_offset(queries: int) -> None:
    rows = forest(5, 4, depth=2, rows=4, queries=(queries,))
    step = Step.of(rows, 4, Shape(1, 2, 8, 8))
    longest = max(row.stop for row in rows)
    for window in range(1, longest + 2):
        check(step, attend(span=Span(window=window)))


@pytest.mark.parametrize("queries", [1, 6])
def test_chunks_at_every_offset(queries: int) -> None:
    rows = forest(6, 4, depth=2, rows=4, queries=(queries,))
    step = Step.of(rows, 4, Shape(1, 2, 8, 8))
    longest = max(row.stop for row in rows)
    for chunk in range(1, longest + 2):
        check(step, attend(span=Span(chunk=chunk)))


@pytest.mark.parametrize("span", [Span(window=40), Span(chunk=700), Span(window=650)], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_whole_tiles_of_keys_out_of_sight(span: Span, softcap: float) -> None:
    """Some queries see none of the first 512 keys of a shared run, some none of it at all."""
    common = np.arange(100, 50, -1, dtype=np.int32)
    rows = [
        Row(np.concatenate([common, np.arange(n, n + 20, dtype=np.int32)]), start, queries)
        for n, start, queries in [(110, 800, 100), (140, 990, 30), (170, 805, 1), (200, 1100, 1)]
    ]
    step = Step.of(rows, 16, Shape(1, 2, 8, 8))
    batch = step.batch()
    assert len(batch.plan.runs) == 1
    check(step, attend(span=span, softcap=softcap))


def test_first_visible_key() -> None:
    positions = np.array([0, 3, 4, 9])
    assert FULL.first_visible(positions).tolist() == [0, 0, 0, 0]
    assert Span(window=3).first_visible(positions).tolist() == [0, 1, 2, 7]
    assert Span(chunk=4).first_visible(positions).tolist() == [0, 0, 4, 8]
    assert Span(window=3, chunk=4).first_visible(positions).tolist() == [0, 1, 4, 8]


# --- Logits. ---


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("cap", "scale"), [(2.0, 0.3), (30.0, 1.0), (0.05, 3.0)])
def test_softcap(cap: float, scale: float, dtype: torch.dtype) -> None:
    step = Step.of(forest(7, 4, depth=2, rows=5), 4, Shape(dtype=dtype))
    if cap < 1:
        # Far out on the cap: an exponential of these overflows.
        largest = float((step.query.abs().float() @ step.key[:, 0].float().T).max()) * scale / cap
        assert largest > 100
    check(step, attend(scale=scale, softcap=cap))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("queries", [(1,), (1, 5)], ids=["decodes", "mixed"])
def test_sinks(dtype: torch.dtype, queries: tuple[int, ...]) -> None:
    shape = Shape(2, 3, dtype=dtype)
    step = Step.of(forest(8, 4, depth=2, rows=5, queries=queries), 4, shape)
    for sinks in (torch.linspace(-3, 4, 6), torch.full((6,), -100.0)):
        for span in (FULL, Span(window=5)):
            check(step, attend(sinks=sinks.to(dtype), span=span))
    plain, _ = step.run(TorchBackend, attend())
    none, _ = step.run(TorchBackend, attend(sinks=torch.full((6,), -100.0)))
    all_of_it, _ = step.run(TorchBackend, attend(sinks=torch.full((6,), 100.0)))
    assert torch.allclose(none, plain, atol=TOLERANCE[dtype])
    assert float(all_of_it.abs().max()) < 1e-30


@pytest.mark.parametrize("large", [60.0, 3e4])
def test_large_logits_do_not_overflow(large: float) -> None:
    step = Step.of(forest(9, 4, depth=2, rows=5), 4, Shape())
    for kind in (TorchBackend, ReferenceBackend):
        out, _ = step.run(kind, attend(scale=large))
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("seed", range(60))
def test_everything_at_once(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4, 16])
    dtype = rng.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    dim = rng.choice([8, 24, 80])
    groups = rng.choice([1, 2, 3, 7])
    shape = Shape(rng.choice([1, 2]), groups, dim, rng.choice([dim, 12]), dtype)
    rows = forest(seed, size, depth=rng.randint(0, 4), rows=rng.randint(1, 7))
    span = Span(rng.choice([0, 0, 1, 3, size, 2 * size + 1]), rng.choice([0, 0, 0, 5, size]))
    sinks = torch.randn(shape.heads) if rng.random() < 0.3 else None
    softcap = rng.choice([0.0, 0.0, 2.0])
    step = Step.of(rows, size, shape, seed)
    if rng.random() < 0.3:
        # Each row finds what it asks with in the store, as another wrote it.
        step = with_cached_rows(step, [rng.random() < 0.5 for _ in rows])
    check(step, attend(scale=rng.choice([0.3, 1.0]), span=span, softcap=softcap, sinks=sinks))


# --- What is written, copied, and not. ---


@pytest.mark.parametrize("keep", [[False] * 4, [True, False, True, False]], ids=str)
def test_rows_that_only_ask_write_nothing(keep: list[bool]) -> None:
    rows = forest(11, 4, depth=2, rows=4, queries=(1, 3))
    step = with_cached_rows(Step.of(rows, 4, Shape()), keep)
    check(step, attend())
    _, backend = step.run(TorchBackend, attend())
    changed = (backend.store.keys[0].flatten(0, 1) != step.keys).any(-1).any(-1)
    changed &= ~backend.store.keys[0].flatten(0, 1).isnan().any(-1).any(-1)
    wrote = sorted(changed.nonzero().flatten().tolist())
    expected = [
        table_slots(row.table, row.start, row.stop, 4).tolist()
        for row, kept in zip(rows, keep, strict=True)
        if kept
    ]
    assert wrote == sorted(slot for slots in expected for slot in slots)


def test_a_row_reads_what_another_writes_in_the_same_step() -> None:
    # The second row's prefix, block 3, is computed by the first row in this very step.
    first = Row(np.array([3, 5], np.int32), 0, 6)
    second = Row(np.array([3, 7], np.int32), 4, 3)
    step = Step.of([first], 4, Shape(), 1)
    both = Step.of([first, second], 4, Shape(), 1)
    nothing = torch.full_like(both.keys, torch.nan)
    both = replace(both, keys=nothing, values=nothing[..., : both.values.shape[-1]].clone())
    assert step.batch().plan.runs == ()
    check(both, attend())


def test_copies_come_after_the_writes_and_one_after_the_other() -> None:
    # Row 0 writes block 3; its first two slots are copied to block 9, and from there to block 11.
    writer = Row(np.array([3], np.int32), 0, 4)
    reader = Row(np.array([9], np.int32), 2, 2)
    again = Row(np.array([11], np.int32), 2, 1)
    rows = [reader, again, writer]
    step = Step.of(rows, 4, Shape(), 2)
    nothing = torch.full_like(step.keys, torch.nan)
    copies = (([12, 13], [36, 37]), ([36, 37], [44, 45]))
    step = replace(step, keys=nothing, values=nothing.clone(), copies=copies)
    check(step, attend())
    _, backend = step.run(TorchBackend, attend())
    cache = backend.store.keys[0]
    assert torch.equal(cache[9, :2], cache[3, :2])
    assert torch.equal(cache[11, :2], cache[3, :2])
    assert bool(cache[3].isfinite().all())


def test_a_layer_that_reads_anothers_keys_writes_none() -> None:
    rows = forest(12, 4, depth=2, rows=4, queries=(1, 5))
    step = with_cached_rows(Step.of(rows, 4, Shape()), [False] * 4)
    expected, _ = step.run(ReferenceBackend, attend())
    backend = TorchBackend(step.store())
    before = backend.store.keys[0].clone()
    out = backend.forward(attend(), step.batch(), step.query, None, None)
    assert float((out.double() - expected).norm() / expected.norm()) < 2e-6
    assert torch.equal(before.nan_to_num(9), backend.store.keys[0].nan_to_num(9))


# --- What callers may hand over. ---


def test_strided_queries_keys_and_values() -> None:
    step = Step.of(forest(13, 4, depth=1, rows=4, queries=(1, 6)), 4, Shape())
    expected, _ = step.run(TorchBackend, attend())
    swapped = {
        name: getattr(step, name).transpose(0, 2).contiguous().transpose(0, 2)
        for name in ("query", "key", "value")
    }
    assert all(x.stride(-1) != 1 for x in swapped.values())
    found, _ = replace(step, **swapped).run(TorchBackend, attend())
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_model_in_float32_over_a_store_in_half_the_width() -> None:
    step = Step.of(forest(14, 4, depth=1, rows=4), 4, Shape(dtype=torch.bfloat16))
    expected, _ = step.run(TorchBackend, attend())
    wide = [x.float() for x in (step.query, step.key, step.value)]
    out = TorchBackend(step.store()).forward(attend(), step.batch(), *wide)
    assert out.dtype == torch.float32
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-2


def test_steps_in_and_out_of_inference_mode_take_turns() -> None:
    step = Step.of(forest(15, 4, depth=2, rows=5), 4, Shape())
    backend = TorchBackend(step.store())
    with torch.inference_mode():
        first = backend.forward(attend(), step.batch(), step.query, step.key, step.value)
    with torch.no_grad():
        second = backend.forward(attend(), step.batch(), step.query, step.key, step.value)
    assert torch.equal(first, second)


def test_layers_of_a_step_share_a_layout_and_spans_do_not() -> None:
    step = Step.of(forest(16, 4, depth=2, rows=5), 4, Shape())
    backend, batch = TorchBackend(step.store()), step.batch()
    one = backend.forward(attend(), batch, step.query, step.key, step.value)
    windowed = attend(span=Span(window=3))
    other = backend.forward(windowed, batch, step.query, step.key, step.value)
    again = backend.forward(attend(), batch, step.query, step.key, step.value)
    assert set(batch.prepared) == {FULL, Span(window=3)}
    assert torch.equal(one, again)
    assert float((one - other).abs().max()) > 1e-2
