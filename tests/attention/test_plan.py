"""The plan: every key that a row may read is read exactly once, by a shared run or by its tail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from forests import forests, grown

from radixkv.attention import AttentionPlan, CostModel, Row, SharedRun, make_batch, plan_attention
from radixkv.attention.plan import Int32Array

SHARE_ALL = CostModel(per_item=0)


def reads(plan: AttentionPlan, rows: list[Row], size: int) -> list[list[tuple[int, int]]]:
    """By row in the caller's order: (position, block) of all that its runs and its tail read."""
    found: list[list[tuple[int, int]]] = [[] for _ in rows]
    for place, index in enumerate(plan.order.tolist()):
        row = rows[index]
        first = int(plan.tail_blocks[place]) * size
        for position in range(first, row.start):
            found[index].append((position, int(row.table[position // size])))
    for run in plan.runs:
        through = rows[int(plan.order[run.first_row])].table
        for place in range(run.first_row, run.last_row):
            for position in range(run.first_block * size, run.last_block * size):
                found[int(plan.order[place])].append((position, int(through[position // size])))
    return found


def check_coverage(plan: AttentionPlan, rows: list[Row], size: int) -> None:
    assert sorted(plan.order.tolist()) == list(range(len(rows)))
    for row, found in zip(rows, reads(plan, rows, size), strict=True):
        expected = [(kv, int(row.table[kv // size])) for kv in range(row.start)]
        assert sorted(found) == expected
    for run in plan.runs:
        assert run.last_row - run.first_row >= 2
        assert run.last_block > run.first_block
    assert plan.blocks_saved() >= 0


def plan_of(rows: list[Row], size: int, pays: int) -> AttentionPlan:
    tables = [row.table for row in rows]
    shareable = [row.start // size for row in rows]
    return plan_attention(
        tables, shareable, [row.num_queries for row in rows], size, CostModel(per_item=pays)
    )


@settings(max_examples=300, deadline=None)
@given(forest=forests(), pays=st.sampled_from([0, 7, 40, 1000]))
def test_every_key_is_read_exactly_once(forest: tuple[list[Row], int], pays: int) -> None:
    rows, size = forest
    plan = plan_of(rows, size, pays)
    check_coverage(plan, rows, size)
    queries = [rows[index].num_queries for index in plan.order]
    for run in plan.runs:
        tokens = (run.last_block - run.first_block) * size
        assert (sum(queries[run.first_row : run.last_row]) - 1) * tokens > pays


@settings(max_examples=200, deadline=None)
@given(forest=forests())
def test_with_nothing_to_pay_every_block_in_common_is_read_once(
    forest: tuple[list[Row], int],
) -> None:
    rows, size = forest
    plan = plan_of(rows, size, 0)
    prefixes = [tuple(row.table[: row.start // size].tolist()) for row in rows]
    distinct = {prefix[: end + 1] for prefix in prefixes for end in range(len(prefix))}
    assert sum(map(len, prefixes)) - plan.blocks_saved() == len(distinct)
    batch = make_batch(rows, size, cost=SHARE_ALL)
    read, unshared = batch.kv_tokens()
    assert unshared == sum(row.stop for row in rows)
    assert unshared - read == plan.blocks_saved() * size
    assert 0 < read <= unshared


@settings(max_examples=150, deadline=None)
@given(forest=forests(), growth=st.lists(st.integers(0, 40), min_size=12, max_size=12))
def test_a_plan_still_covers_once_lengths_have_grown(
    forest: tuple[list[Row], int], growth: list[int]
) -> None:
    rows, size = forest
    plan = plan_of(rows, size, 0)
    later = grown(rows, growth, size)
    batch = make_batch(later, size, plan=plan)
    assert batch.plan is plan
    check_coverage(plan, later, size)
    expected = [later[index].start for index in plan.order]
    assert batch.positions.tolist() == expected


def table(*blocks: int) -> Int32Array:
    return np.array(blocks, np.int32)


def test_a_small_forest() -> None:
    tables = [table(1, 2, 9), table(5, 6), table(1, 2, 3), table(1, 2, 9, 7), table(1, 4)]
    plan = plan_attention(tables, [3, 2, 3, 4, 2], [1] * 5, 4, SHARE_ALL)
    assert plan.order.tolist() == [2, 0, 3, 4, 1]
    assert plan.runs == (SharedRun(0, 4, 0, 1), SharedRun(0, 3, 1, 2), SharedRun(1, 3, 2, 3))
    assert plan.tail_blocks.tolist() == [2, 3, 3, 1, 0]
    assert plan.blocks_saved() == 3 + 2 + 1


def test_a_run_that_does_not_pay_is_folded_into_its_children() -> None:
    tables = [table(1, 2, 3, 4), table(1, 2, 3, 5), table(1, 7)]
    plan = plan_attention(tables, [4, 4, 2], [1] * 3, 4, CostModel(per_item=10))
    # One block for three rows is 8 tokens saved, too few; three blocks for two rows are 12.
    assert plan.runs == (SharedRun(0, 2, 0, 3),)
    assert plan.tail_blocks.tolist() == [3, 3, 0]


def test_queries_count_not_rows() -> None:
    tables = [table(1, 2), table(1, 3)]
    few = plan_attention(tables, [1, 1], [1, 1], 16, CostModel(per_item=100))
    many = plan_attention(tables, [1, 1], [4, 4], 16, CostModel(per_item=100))
    assert few.runs == ()
    assert many.runs == (SharedRun(0, 2, 0, 1),)


def test_only_what_lies_before_the_first_query_is_shared() -> None:
    # Twins that compute their second block in this very step.
    rows = [Row(table(1, 2), 4, 3), Row(table(1, 2), 4, 3)]
    plan = make_batch(rows, 4, cost=SHARE_ALL).plan
    assert plan.runs == (SharedRun(0, 2, 0, 1),)
    assert plan.tail_blocks.tolist() == [1, 1]


def test_a_single_row_and_no_row_share_nothing() -> None:
    for tables in ([], [table(1, 2)]):
        plan = plan_attention(tables, [1] * len(tables), [1] * len(tables), 4, SHARE_ALL)
        assert plan.runs == ()
        assert plan.blocks_saved() == 0


def test_a_batch_lays_rows_out_in_the_plans_order() -> None:
    rows = [Row(table(5, 6), 4, 2), Row(table(1, 2), 3, 1), Row(table(1, 3), 2, 2)]
    batch = make_batch(rows, 4, cost=SHARE_ALL)
    assert batch.plan.order.tolist() == [1, 2, 0]
    assert batch.offsets.tolist() == [0, 1, 3, 5]
    assert batch.num_tokens == 5
    assert batch.positions.tolist() == [3, 2, 3, 4, 5]
    assert batch.slots.tolist() == [7, 6, 7, 24, 25]
    assert batch.written is None


def test_a_row_that_only_asks_has_no_slots() -> None:
    rows = [Row(table(5, 6), 4, 2), Row(table(1, 2), 3, 1)]
    batch = make_batch(rows, 4, keep=[False, True])
    assert batch.plan.order.tolist() == [1, 0]
    assert batch.written is not None
    assert batch.written.tolist() == [0]
    assert batch.slots.tolist() == [7]
    all_kept = make_batch(rows, 4, keep=[True, True])
    assert all_kept.written is None


@pytest.mark.parametrize("rows", [[], [Row(table(1), 0, 0)]], ids=["no row", "no query"])
def test_an_empty_step_is_an_error(rows: list[Any]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        make_batch(rows, 4)
