"""NativeBackend: the compiled operator against the float64 reference, and when torch takes over."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from steps import TOLERANCE, Shape, Step, attend, check, forest, lone

from radixkv import native
from radixkv.attention import (
    FULL,
    KVStore,
    LayerShape,
    NativeBackend,
    ReferenceBackend,
    Row,
    Span,
    TorchBackend,
    choose_backend,
    make_batch,
)
from radixkv.attention.native_backend import WorkItems, fits

BF16 = torch.bfloat16

pytestmark = pytest.mark.skipif(
    not native.has_attention(), reason="the compiled operators are not built on this machine"
)


@pytest.fixture(autouse=True, params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 7, 16, 40])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), (64, 64), (96, 64), (256, 128)])
def test_head_shapes(groups: int, key_dim: int, value_dim: int) -> None:
    shape = Shape(2, groups, key_dim, value_dim, BF16)
    check(Step.of(forest(groups, 4, depth=2, rows=5), 4, shape), attend(scale=0.1))


@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3, 5, 7, 16])
@pytest.mark.parametrize("kv_heads", [1, 3, 5, 18])
def test_few_rows_of_several_heads_lie_in_one_tile(
    kv_heads: int, groups: int, queries: int
) -> None:
    """Sets of heads that fill a tile, some that leave lanes free, and more than one set.

    Scores grow with the position in one row, so that what was gathered of earlier chunks shrinks.
    """
    shape = Shape(kv_heads, groups, 64, 96, BF16)
    rows = [
        row._replace(table=row.table + 20 * i)
        for i, row in enumerate(lone(length, 16, queries) for length in (5, 40, 150, 260))
    ]
    step = Step.of(rows, 16, shape)
    check(step, attend(scale=0.1))
    # Blocks lie backwards.
    step.keys *= torch.linspace(3, 0.2, len(step.keys))[:, None, None]
    check(step, attend(scale=0.2))


@pytest.mark.parametrize("size", [1, 2, 16, 32])
@pytest.mark.parametrize("depth", range(5))
def test_forests(size: int, depth: int) -> None:
    rows = forest(depth, size, depth=depth, rows=2 + 2 * depth)
    check(Step.of(rows, size, Shape(3, 3, 64, 64, BF16)), attend(scale=0.1))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129])
def test_lengths_around_tiles_and_chunks(length: int) -> None:
    for queries in {1, length // 2 or 1, length}:
        check(Step.of([lone(length, 16, queries)], 16, Shape(2, 3, 32, 32, BF16)), attend())


@pytest.mark.parametrize("queries", [1, 6])
def test_windows_and_chunks_at_every_offset(queries: int) -> None:
    rows = forest(5, 4, depth=2, rows=4, queries=(queries,))
    step = Step.of(rows, 4, Shape(1, 2, 32, 32, BF16))
    for width in range(1, max(row.stop for row in rows) + 2):
        check(step, attend(span=Span(window=width)))
        check(step, attend(span=Span(chunk=width)))


def test_long_runs_of_many_queries_are_cut_and_merged() -> None:
    """More keys than a task takes, more rows of a head, and a prefill beside the decodes."""
    common = np.arange(100, dtype=np.int32)[::-1]
    free = iter(range(100, 320))
    rows = [
        Row(np.array([*common, *(next(free) for _ in range(2))], np.int32), 1610 + i % 7, 1)
        for i in range(50)
    ]
    rows.append(Row(np.array([*common, *(next(free) for _ in range(20))], np.int32), 1600, 310))
    step = Step.of(rows, 16, Shape(2, 3, 32, 32, BF16))
    assert len(step.batch().plan.runs) == 1
    check(step, attend(scale=0.2))
    check(step, attend(scale=0.2, span=Span(window=700)))


@pytest.mark.parametrize("first", [497, 505, 511])
@pytest.mark.parametrize("span", [FULL, Span(window=530)])
def test_queries_on_both_sides_of_a_cut_between_keys(first: int, span: Span) -> None:
    """Where keys are cut, a tile of queries may begin before the keys that it ends among."""
    step = Step.of([lone(first + 30, 16, 30)], 16, Shape(2, 3, 64, 64, BF16))
    check(step, attend(scale=0.1, span=span))
    check(Step.of([lone(first + 30, 16, 30)], 16, Shape(1, 1, 256, 256, BF16)), attend(scale=0.1))


def test_sinks() -> None:
    step = Step.of(forest(8, 4, depth=2, rows=5), 4, Shape(2, 3, 32, 32, BF16))
    for sinks in (torch.linspace(-3, 4, 6), torch.full((6,), -100.0)):
        check(step, attend(sinks=sinks.to(BF16)))
        check(step, attend(sinks=sinks.to(BF16), span=Span(window=5)))


@pytest.mark.parametrize("scale", [60.0, 3e4])
def test_large_logits_do_not_overflow(scale: float) -> None:
    step = Step.of(forest(9, 4, depth=2, rows=5), 4, Shape(1, 2, 32, 32, BF16))
    expected, _ = step.run(TorchBackend, attend(scale=scale))
    found, _ = step.run(NativeBackend, attend(scale=scale))
    assert float((found - expected).norm() / expected.norm()) < 2 * TOLERANCE[BF16]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]), st.integers(0, 3), st.integers(1, 4))
def test_any_forest(seed: int, size: int, depth: int, groups: int) -> None:
    rows = forest(seed, size, depth=depth, rows=6, queries=(1, 1, 2, 5, 33))
    check(Step.of(rows, size, Shape(2, groups, 32, 64, BF16), seed), attend())


@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_not_a_number_stays_one_in_its_own_sequence(where: str) -> None:
    rows = [lone(40, 16, 3), Row(np.array([9, 8, 7], np.int32), 40, 3)]
    step = Step.of(rows, 16, Shape(2, 2, 32, 32, BF16))
    getattr(step, where)[1, 0, 5] = torch.nan
    found, _ = step.run(NativeBackend, attend())
    assert bool(found[1].isnan().any())
    other = step.batch().plan.order.tolist().index(1) * 3
    assert other == 3
    assert bool(found[other:].isfinite().all())


def test_queries_in_any_strides() -> None:
    step = Step.of([lone(40, 16, 7)], 16, Shape(2, 2, 32, 32, BF16))
    expected, _ = step.run(ReferenceBackend, attend())
    step.query = step.query.transpose(0, 2).contiguous().transpose(0, 2)
    assert step.query.stride(-1) != 1
    found, _ = step.run(NativeBackend, attend())
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE[BF16]


def test_one_key_head_in_any_stride() -> None:
    """Of an axis of one, the stride is whatever a model's own operators leave there."""
    step = Step.of([lone(40, 16, 7)], 16, Shape(1, 3, 32, 32, BF16))
    for name in ("key", "value"):
        given = getattr(step, name)
        other = torch.empty_strided(given.shape, (32, 7 * 32, 1), dtype=BF16)
        setattr(step, name, other.copy_(given))
    check(step, attend())


def test_without_leave_to_use_tiles_torch_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.radixkv, "allow_tiles", lambda: False)
    assert not native.has_attention()
    assert type(choose_backend(KVStore([LayerShape(1, 32, 32)], 1, 16, BF16))) is TorchBackend


def test_what_the_operator_lacks_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("the operator was called")

    monkeypatch.setattr(torch.ops.radixkv, "paged_attention", forbidden)
    check(Step.of([lone(40, 16)], 16, Shape(2, 2, 32, 32, BF16)), attend(softcap=3.0))
    check(Step.of([lone(40, 16)], 16, Shape(2, 2, 80, 80, BF16)), attend())
    with pytest.raises(AssertionError, match="was called"):
        check(Step.of([lone(40, 16)], 16, Shape(2, 2, 32, 32, BF16)), attend())


def test_which_layers_fit() -> None:
    assert fits(LayerShape(2, 64, 64), 6)
    assert fits(LayerShape(1, 256, 32), 128)
    assert not fits(LayerShape(1, 64, 64), 129)
    assert not fits(LayerShape(2, 80, 64), 6)
    assert not fits(LayerShape(2, 64, 80), 6)
    assert not fits(LayerShape(2, 288, 64), 6)


@pytest.mark.parametrize(("dtype", "kind"), [(BF16, NativeBackend), (torch.float32, TorchBackend)])
def test_the_backend_follows_from_the_store(dtype: torch.dtype, kind: type[TorchBackend]) -> None:
    assert type(choose_backend(KVStore([LayerShape(1, 32, 32)], 1, 16, dtype))) is kind


# What is read is worked out before any of it is touched.
NO_STORE: Any = None


def test_work_items_are_runs_and_tails() -> None:
    common = [9, 8]
    rows = [
        Row(np.array([*common, 3], np.int32), 10, 1),
        Row(np.array([*common, 5, 6], np.int32), 8, 5),
    ]
    batch = Step.of(rows, 4, Shape(1, 1, 32, 32, BF16)).batch()
    backend = NativeBackend(NO_STORE)
    reads = backend.reads(batch, FULL)
    assert reads.tables.tolist() == [9, 8, 3, 9, 8, 5, 6]
    assert reads.items.tolist() == [[0, 6, 0, 0, 8], [1, 5, 3, 8, 13], [0, 1, 0, 8, 11]]
    assert reads.positions.tolist() == [10, 8, 9, 10, 11, 12]
    assert backend.reads(batch, Span(window=3)).first.tolist() == [8, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("span", [FULL, Span(window=5), Span(chunk=4)])
def test_reads_of_rows_that_go_on_are_those_of_a_new_step(span: Span) -> None:
    rows = [Row(np.array([9, 8, *own], np.int32), 10, 1) for own in ([3], [5], [6])]
    batch = Step.of(rows, 4, Shape(1, 1, 32, 32, BF16)).batch()
    backend = NativeBackend(NO_STORE)
    backend.reads(batch, span)
    longer = {place: np.array([9, 8, 3 + place, place], np.int32) for place in range(3)}
    # Longer than there was room for at first.
    longest = {1: np.array([9, 8, 4, 1, *range(20, 40)], np.int32)}
    for taken in ({}, longer, {}, longest, {}):
        batch = batch.grown(taken)
        reads = backend.reads(batch, span)
        new = NativeBackend(NO_STORE).reads(make_batch(batch.rows, 4, plan=batch.plan), span)
        assert what_is_read(reads) == what_is_read(new)
        assert reads.positions.tolist() == new.positions.tolist()
        assert reads.first.tolist() == new.first.tolist()


def what_is_read(work: WorkItems) -> list[tuple[list[int], list[int]]]:
    """Of each item its queries and keys, and the blocks that it finds them in."""
    tables = work.tables.tolist()
    return [
        ([first, count, start, end], tables[row + start // 4 : row + -(-end // 4)])
        for first, count, row, start, end in work.items.tolist()
    ]


def test_the_operator_refuses_what_it_would_misread() -> None:
    keys = torch.zeros(4, 16, 2, 32, dtype=BF16)
    query = torch.zeros(1, 4, 32, dtype=BF16)
    item, table = torch.tensor([[0, 1, 0, 0, 1]], dtype=torch.int32), torch.zeros(4).int()
    place = torch.zeros(1, dtype=torch.int64)

    def call(**changes: torch.Tensor) -> None:
        given = {
            "query": query, "keys": keys, "values": keys, "items": item, "tables": table,
            "positions": place, "first": place,
        }  # fmt: skip
        torch.ops.radixkv.paged_attention(*(given | changes).values(), 1.0)

    call()
    for changes in (
        {"query": query.float()},
        {"keys": keys.float()},
        {"keys": keys.transpose(1, 2)},
        {"query": torch.zeros(1, 4, 48, dtype=BF16), "keys": torch.zeros(4, 16, 2, 48).to(BF16)},
        {"query": torch.zeros(1, 3, 32, dtype=BF16)},
        {"query": torch.zeros(1, 4, 16, dtype=BF16)},
        {"query": query[0]},
        {"values": keys[:, :, :1].contiguous()},
        {"values": keys[:2]},
        {"keys": keys[:, :, :0], "values": keys[:, :, :0]},
        {"items": item.long()},
        {"items": item[:, :4].contiguous()},
        {"positions": place.int()},
        {"first": torch.zeros(2, dtype=torch.int64)},
        {"tables": table.long()},
        {"tables": torch.zeros(8, dtype=torch.int32)[::2]},
    ):
        with pytest.raises(RuntimeError):
            call(**changes)


def test_copy_blocks_copies_all_layers_and_reads_all_sources_first() -> None:
    layers = [LayerShape(1, 32, 64), LayerShape(3, 64, 32)]
    backend = NativeBackend(KVStore(layers, 6, 4, BF16))
    expected = KVStore(layers, 6, 4, BF16)
    stores = [*backend.store.keys, *backend.store.values]
    for found, copy in zip(stores, [*expected.keys, *expected.values], strict=True):
        copy.copy_(found.normal_())
    pairs = [(1, 2), (2, 4), (4, 1), (0, 5)]
    backend.copy_blocks([])
    backend.copy_blocks(pairs)
    expected.copy_blocks(pairs)
    for found, copy in zip(stores, [*expected.keys, *expected.values], strict=True):
        assert torch.equal(found, copy)
    with pytest.raises(RuntimeError, match="block of 6"):
        backend.copy_blocks([(0, 6)])
