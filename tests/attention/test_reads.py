"""The reads: every key that a query sees is read for it exactly once, however they are cut."""

from __future__ import annotations

import heapq
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import radixkv_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from forests import forests, grown

from radixkv.attention import (
    FULL,
    ON_A_CPU,
    AttentionBatch,
    CostModel,
    Reads,
    Row,
    Span,
    make_batch,
    plan_reads,
)
from radixkv.attention.cost import FEWEST_TILES, on_a_gpu
from radixkv.attention.reads import TO_THE_END

SHARE_ALL = CostModel(per_item=0)
SPANS = st.builds(Span, window=st.sampled_from([0, 0, 1, 5, 40]), chunk=st.sampled_from([0, 0, 7]))
COSTS = st.one_of(
    st.builds(
        CostModel,
        per_item=st.sampled_from([0, 40]),
        per_query=st.sampled_from([0, 3]),
        tile=st.sampled_from([1, 4]),
        programs=st.sampled_from([0, 1, 7, 100]),
    ),
    st.builds(CostModel, per_item=st.just(0), tile=st.just(4), split=st.sampled_from([4, 12])),
)


def visible(batch: AttentionBatch, span: Span) -> list[list[tuple[int, int]]]:
    """By query: (position, block) of all keys that it sees."""
    first = span.first_visible(batch.positions)
    size, found = batch.block_size, []
    for index, row in enumerate(batch.rows):
        for query in range(int(batch.offsets[index]), int(batch.offsets[index + 1])):
            keys = range(int(first[query]), int(batch.positions[query]) + 1)
            found.append([(kv, int(row.table[kv // size])) for kv in keys])
    return found


def read(batch: AttentionBatch, reads: Reads, span: Span) -> list[list[tuple[int, int]]]:
    """By query: (position, block) of what the reads give it, as far as it looks."""
    first = span.first_visible(batch.positions)
    size = batch.block_size
    found: list[list[tuple[int, int]]] = [[] for _ in range(batch.num_tokens)]
    for first_query, count, row, start, end in reads.items.tolist():
        for query in range(first_query, first_query + count):
            keys = range(max(start, first[query]), min(end, int(batch.positions[query]) + 1))
            found[query] += [(kv, int(batch.rows[row].table[kv // size])) for kv in keys]
    return [sorted(keys) for keys in found]


@settings(max_examples=250, deadline=None)
@given(forest=forests(), span=SPANS, cost=COSTS, most=st.sampled_from([0, 1, 3, 16]))
def test_every_visible_key_is_read_exactly_once(
    forest: tuple[list[Row], int], span: Span, cost: CostModel, most: int
) -> None:
    rows, size = forest
    batch = make_batch(rows, size, cost=cost)
    reads = plan_reads(batch, span, cost, kv_heads=2, max_queries=most)
    assert read(batch, reads, span) == visible(batch, span)
    assert batch.plan.blocks_saved() >= 0
    assert reads.last_for(batch)
    if most:
        assert reads.items[:, 1].max() <= most
    if cost.split:
        for run in batch.plan.runs:
            assert run.first_block * size % cost.split == run.last_block * size % cost.split == 0


@settings(max_examples=120, deadline=None)
@given(
    forest=forests(),
    span=SPANS,
    cost=COSTS,
    growth=st.lists(st.integers(0, 40), min_size=12, max_size=12),
)
def test_reads_of_a_plan_stay_right_as_rows_grow(
    forest: tuple[list[Row], int], span: Span, cost: CostModel, growth: list[int]
) -> None:
    rows, size = forest
    decoding = [Row(row.table, row.start, 1) for row in rows]
    first = make_batch(decoding, size, cost=cost)
    reads = plan_reads(first, span, cost)
    later = make_batch(grown(decoding, growth, size), size, plan=first.plan)
    assert read(later, reads, span) == visible(later, span)
    if cost.split and span == FULL and reads.last_for(later):
        again = plan_reads(later, span, cost)
        assert sorted(again.items.tolist()) == sorted(reads.items.tolist())


def lone(stop: int, queries: int = 1, first_block: int = 0, size: int = 16) -> Row:
    blocks = np.arange(first_block, first_block - (-stop // size), dtype=np.int32)
    return Row(blocks, stop - queries, queries)


def parts(rows: list[Row], cost: CostModel, kv_heads: int = 8, span: Span = FULL) -> list[int]:
    """How long the parts of each read are, in the order of their keys."""
    batch = make_batch(rows, 16, cost=cost)
    items = plan_reads(batch, span, cost, kv_heads=kv_heads).items
    ends = np.minimum(items[:, 4], [batch.rows[row].stop for row in items[:, 2]])
    return (ends - items[:, 3])[np.lexsort((items[:, 3], items[:, 2]))].tolist()


H100 = on_a_gpu(132, 64)


def test_one_long_row_is_cut_so_that_it_fills_the_processors() -> None:
    # 32,768 keys x 8 heads over 264 programs: 993 keys each, which is 16 tiles.
    assert H100.part(np.array([32768]), 8) == 1024
    assert parts([lone(32768)], H100) == [1024] * 32
    assert parts([lone(32768)], H100, kv_heads=1) == [128] * 256


def test_many_rows_fill_them_without_a_cut() -> None:
    rows = [lone(2048, first_block=1000 * i) for i in range(64)]
    assert parts(rows, H100) == [2048] * 64


def test_one_long_row_among_short_ones_is_cut() -> None:
    rows = [lone(512, first_block=10_000 + 100 * i) for i in range(12)] + [lone(32768)]
    found = parts(rows, H100)
    # What counts is the work: (32,768 + 12 x 512) x 8 over 264 are 1,179. Parts of that, and the
    # short rows in a second round, would take 1,728; parts of half of it fill two rounds of 640.
    assert H100.part(np.array([32768, *[512] * 12]), 8) == 640
    assert len(found) == 51 + 12
    assert set(found[:51]) == {640, 704}
    assert found[51:] == [512] * 12


def test_rows_that_fill_the_processors_one_and_a_bit_times_are_cut() -> None:
    """40 rows of 8 heads are 320 programs of 264: 56 would have a round of their own."""
    rows = [lone(8192, first_block=1000 * i) for i in range(40)]
    assert parts(rows, H100) == [2048] * 160


def finished(lengths: list[int], programs: int) -> int:
    """When the last is done of programs that take the next read, in this order, once free."""
    busy = [0] * programs
    for length in lengths:
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 17, 100, 129, 500, 1000, 3000, 8192, 32768]), min_size=1),
    kv_heads=st.sampled_from([1, 2, 8]),
    processors=st.sampled_from([1, 16, 132]),
)
def test_no_program_works_for_much_longer_than_its_share(
    lengths: list[int], kv_heads: int, processors: int
) -> None:
    """What the docs promise of the balance, of any lengths, as a GPU would start the programs."""
    cost = on_a_gpu(processors, 64)
    rows = [lone(length, first_block=3000 * i) for i, length in enumerate(lengths)]
    batch = make_batch(rows, 16, cost=cost)
    items = plan_reads(batch, FULL, cost, kv_heads=kv_heads).items
    ends = np.minimum(items[:, 4], [batch.rows[row].stop for row in items[:, 2]])
    each = (ends - items[:, 3]).repeat(kv_heads)
    assert each.sum() == sum(lengths) * kv_heads
    share = each.sum() / cost.programs
    longest = max(1.5 * share + 1.5 * 64, 1.5 * 64 * FEWEST_TILES) + 64
    assert each.max() <= longest
    assert finished(each.tolist(), cost.programs) <= share + longest
    # Cut evenly: no part is left over that is hardly worth a program.
    for row in range(len(rows)):
        own = (ends - items[:, 3])[items[:, 2] == row]
        assert len(own) == 1 or own.min() >= min(64, own.max() // 2)


@pytest.mark.parametrize("context", [1024, 4096, 8192, 32768])
@pytest.mark.parametrize("rows", [4, 16, 24, 40, 64, 96, 160, 256])
def test_decodes_of_one_length_keep_all_processors_at_work(rows: int, context: int) -> None:
    """The grid of `benchmarks/gpu_kernels.py`: less than a tenth of their time is lost."""
    batch = make_batch([lone(context, 1, 3000 * i) for i in range(rows)], 16)
    items = plan_reads(batch, FULL, H100, kv_heads=8, max_queries=16).items
    each = (np.minimum(items[:, 4], context) - items[:, 3]).repeat(8)
    assert each.sum() / (H100.programs * finished(each.tolist(), H100.programs)) > 0.9


def test_parts_are_no_shorter_than_two_tiles() -> None:
    assert H100.part(np.array([300]), 8) == 64 * FEWEST_TILES
    # Equal but for a tile: two, since 300 are nearer to 2 x 128 than to 3.
    assert parts([lone(300)], H100) == [128, 172]
    assert parts([lone(191)], H100) == [191]
    assert parts([lone(130)], H100) == [130]


def test_what_no_query_sees_is_not_read_and_does_not_count() -> None:
    batch = make_batch([lone(32768)], 16, cost=H100)
    items = plan_reads(batch, Span(window=1000), H100, kv_heads=8).items
    assert items[:, 3].min() == 32768 - 1000
    # 1,000 keys x 8 heads are little work: two tiles each.
    assert len(items) == 8
    assert parts([lone(32768)], H100, span=Span(window=1000)) == [104] + [128] * 7


def test_what_takes_longest_comes_first() -> None:
    rows = [lone(40, first_block=1000), lone(400, 3, first_block=2000), lone(200)]
    batch = make_batch(rows, 16)
    items = plan_reads(batch, FULL, ON_A_CPU, max_queries=2).items
    # Queries at 397 and 398, then that at 399; each read ends where its last query does.
    assert items.tolist() == [
        [4, 1, 2, 0, TO_THE_END],
        [2, 2, 2, 0, TO_THE_END],
        [0, 1, 0, 0, TO_THE_END],
        [1, 1, 1, 0, TO_THE_END],
    ]


def test_cuts_of_fixed_length_depend_on_nothing() -> None:
    fixed = CostModel(per_item=0, tile=16, split=64)
    alone = parts([lone(300)], fixed)
    assert alone == [64, 64, 64, 64, 44]
    assert parts([lone(300), lone(9000, first_block=1000)], fixed)[:5] == alone
    assert fixed.run_blocks(16) == 4
    assert fixed.run_blocks(24) == 8


def test_runs_end_at_cuts_of_fixed_length() -> None:
    common = np.arange(10, dtype=np.int32)
    rows = [Row(np.append(common, [100 + i]).astype(np.int32), 165, 1) for i in range(3)]
    fixed = CostModel(per_item=0, tile=16, split=64)
    (run,) = make_batch(rows, 16, cost=fixed).plan.runs
    assert (run.first_block, run.last_block) == (0, 8)
    (whole,) = make_batch(rows, 16, cost=SHARE_ALL).plan.runs
    assert whole.last_block == 10


@pytest.mark.parametrize(("queries", "least"), [(2, 129), (3, 97), (128, 65)])
def test_from_which_length_sharing_pays_on_a_gpu(queries: int, least: int) -> None:
    assert H100.sharing_pays(queries, least)
    assert not H100.sharing_pays(queries, least - 1)


def test_on_a_cpu_sharing_pays_from_a_thousand_reads_on() -> None:
    assert ON_A_CPU.sharing_pays(5, 251)
    assert not ON_A_CPU.sharing_pays(5, 250)


@pytest.mark.parametrize("cost", [H100, CostModel(per_item=0, tile=64, split=256)], ids=str)
def test_parts_are_made_anew_when_rows_have_outgrown_them(cost: CostModel) -> None:
    """A row that was short when it was planned must not be left to one program for good."""
    plan, reads, made = None, None, []
    for stop in range(100, 2000):
        batch = make_batch([lone(stop)], 16, plan=plan, cost=cost)
        plan = batch.plan
        if reads is None or not reads.last_for(batch):
            reads = plan_reads(batch, FULL, cost, kv_heads=8)
            made.append(stop)
        starts = sorted(reads.items[:, 3].tolist())
        lengths = [high - low for low, high in pairwise([*starts, stop])]
        if cost.split:
            assert lengths[:-1] == [256] * (len(lengths) - 1)
            assert lengths[-1] <= 256
        else:
            assert max(lengths) <= 128 + 64 + 128
    assert len(made) < 20


def test_the_numbers_are_the_kernels() -> None:
    assert TO_THE_END == radixkv_kernels.worklist.TO_THE_END
