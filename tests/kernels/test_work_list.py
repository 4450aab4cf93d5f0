"""Work lists: which reads need partials, in which order they merge, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from radixkv_kernels import DIRECT, TO_THE_END, build_work_list, unshared_work_list


def lists(work):
    return work.items.tolist(), work.merge_ptr.tolist(), work.merge_idx.tolist()


def test_a_shared_run_and_three_tails():
    reads = [(0, 3, 1, 0, 32), (0, 1, 0, 32, TO_THE_END), (1, 2, 1, 32, TO_THE_END)]
    items, merge_ptr, merge_idx = lists(build_work_list([*reads, (3, 4, 2, 0, 40)], 7))
    # The last read's queries need no other, so it writes them itself.
    assert items == [
        [0, 3, 1, 0, 32, 0],
        [0, 1, 0, 32, TO_THE_END, 3],
        [1, 2, 1, 32, TO_THE_END, 4],
        [3, 4, 2, 0, 40, DIRECT],
    ]
    assert merge_ptr == [0, 2, 4, 6, 6, 6, 6, 6]
    assert merge_idx == [0, 3, 1, 4, 2, 5]


def test_partials_merge_in_the_order_of_their_keys():
    reads = [(0, 1, 0, 20, 30), (0, 1, 0, 0, 10), (0, 1, 0, 10, 20)]
    _, merge_ptr, merge_idx = lists(build_work_list(reads, 1))
    assert merge_ptr == [0, 3]
    assert merge_idx == [1, 2, 0]


def test_one_shared_query_makes_all_of_an_items_queries_partial():
    items, merge_ptr, merge_idx = lists(build_work_list([(0, 3, 0, 0, 9), (2, 1, 0, 9, 12)], 3))
    assert [item[5] for item in items] == [0, 3]
    assert merge_ptr == [0, 1, 2, 4]
    assert merge_idx == [0, 1, 2, 3]


def test_dtypes_and_sizes():
    work = build_work_list([(0, 3, 0, 0, 9), (2, 1, 0, 9, 12)], 4, order=[3, 0, 2, 1])
    tensors = (work.items, work.num_items, work.merge_ptr, work.merge_idx, work.order)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)
    assert work.num_items.tolist() == [2]
    assert work.order.tolist() == [3, 0, 2, 1]
    assert (work.num_queries, work.num_partials, work.max_queries) == (4, 4, 3)


def test_nothing():
    work = build_work_list([], 3)
    assert lists(work) == ([], [0, 0, 0, 0], [])
    assert work.max_queries == 1


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ([(0, 0, 0, 0, 9)], "read 0 has queries outside the list"),
        ([(0, 1, 0, 0, 9), (3, 2, 0, 0, 9)], r"read 1 has queries outside the list: \[3, 2"),
        ([(-1, 2, 0, 0, 9)], "has queries outside"),
        ([(0, 1, 0, 9, 8)], "no valid range of keys"),
        ([(0, 1, 0, -1, 8)], "no valid range of keys"),
        ([(0, 1, 0, 0, 2**31)], "no valid range of keys"),
        ([(0, 1, -1, 0, 9)], "negative table row"),
        ([(0, 2, 0, 0, 9), (1, 2, 0, 8, 12)], "query 1 would see a key twice"),
        ([(0, 2, 0, 9, 9), (1, 2, 0, 8, 12), (1, 1, 0, 0, 9)], "query 1 would see a key twice"),
        ([(0, 1, 0, 0, TO_THE_END), (0, 1, 0, 9, 12)], "query 0 would see a key twice"),
    ],
)
def test_refuses(reads, message):
    with pytest.raises(ValueError, match=message):
        build_work_list(reads, 4)


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_refuses_an_order_that_is_none(order):
    with pytest.raises(ValueError, match="order must name 4 tokens, each once"):
        build_work_list([(0, 4, 0, 0, 9)], 4, order=order)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_partial_is_merged_once_by_the_query_it_belongs_to(data):
    num_queries = data.draw(st.integers(1, 9))
    # Disjoint stretches of keys, each for some range of queries: no query sees a key twice.
    reads = []
    for stretch in range(data.draw(st.integers(0, 5))):
        first = data.draw(st.integers(0, num_queries - 1))
        count = data.draw(st.integers(1, num_queries - first))
        reads.append((first, count, 0, stretch * 10, stretch * 10 + data.draw(st.integers(0, 10))))
    reads = data.draw(st.permutations(reads))
    items, merge_ptr, merge_idx = lists(build_work_list(reads, num_queries))
    assert [tuple(item[:5]) for item in items] == reads
    owner = {}
    for first, count, _, start, _, partial in items:
        served = [sum(f <= q < f + c for f, c, *_ in reads) for q in range(first, first + count)]
        assert (partial == DIRECT) == (max(served) == 1)
        for i in range(count if partial != DIRECT else 0):
            assert partial + i not in owner
            owner[partial + i] = (first + i, start)
    assert sorted(merge_idx) == sorted(owner)
    for query in range(num_queries):
        merged = [owner[i] for i in merge_idx[merge_ptr[query] : merge_ptr[query + 1]]]
        assert all(q == query for q, _ in merged)
        assert merged == sorted(merged)


def test_unshared_rows():
    assert lists(unshared_work_list([1, 0, 3])) == (
        [[0, 1, 0, 0, TO_THE_END, DIRECT], [1, 3, 2, 0, TO_THE_END, DIRECT]],
        [0, 0, 0, 0, 0],
        [],
    )


def test_unshared_rows_are_cut_at_multiples():
    items, merge_ptr, _ = lists(unshared_work_list([1, 2], lengths=[33, 16], split=16))
    assert [item[:5] for item in items] == [
        [0, 1, 0, 0, 16],
        [0, 1, 0, 16, 32],
        [0, 1, 0, 32, TO_THE_END],
        [1, 2, 1, 0, TO_THE_END],
    ]
    assert [item[5] for item in items] == [0, 1, 2, DIRECT]
    assert merge_ptr == [0, 3, 3, 3]
    assert unshared_work_list([1], lengths=[0], split=16).items.tolist()[0][3:5] == [0, TO_THE_END]


@pytest.mark.parametrize("lengths", [None, [3]])
def test_cutting_needs_lengths(lengths):
    with pytest.raises(ValueError, match="split needs lengths"):
        unshared_work_list([1, 1], lengths=lengths, split=16)


def test_padding_leaves_the_work_as_it_was():
    work = build_work_list([(0, 2, 0, 0, 9), (1, 1, 0, 9, 12)], 2, order=[1, 0])
    room = work.padded(5, 4, 8, 7)
    assert room.items.shape == (5, 6)
    assert room.num_items.tolist() == [2]
    assert room.items[:2].tolist() == work.items.tolist()
    assert room.merge_ptr.tolist() == [*work.merge_ptr.tolist(), 3, 3]
    assert room.merge_idx[:3].tolist() == work.merge_idx.tolist()
    assert room.order.tolist() == [1, 0, 0, 0]
    assert (room.num_queries, room.num_partials, room.max_queries) == (4, 8, 7)


def test_replacing_work_keeps_the_buffers():
    room = build_work_list([(0, 2, 0, 0, 9), (1, 1, 0, 9, 12)], 2).padded(5, 4, 8, 3)
    before = [tensor.data_ptr() for tensor in (room.items, room.num_items, room.merge_ptr)]
    room.copy_(build_work_list([(0, 3, 0, 0, 9)], 3))
    assert room.num_items.tolist() == [1]
    assert room.items[0].tolist() == [0, 3, 0, 0, 9, DIRECT]
    assert room.merge_ptr.tolist() == [0, 0, 0, 0, 0]
    assert before == [tensor.data_ptr() for tensor in (room.items, room.num_items, room.merge_ptr)]


@pytest.mark.parametrize(
    ("reads", "num_queries"),
    [
        ([(0, 1, 0, 0, 9), (1, 1, 0, 0, 9), (2, 1, 0, 0, 9)], 3),
        ([(0, 2, 0, 0, 9), (0, 2, 0, 9, 12)], 3),
        ([(0, 3, 0, 0, 9)], 4),
        ([(0, 3, 0, 0, 9)], 3),
    ],
    ids=["items", "partials", "queries", "queries of an item"],
)
def test_work_that_does_not_fit(reads, num_queries):
    room = build_work_list([(0, 2, 0, 0, 9)], 3).padded(2, 3, 3, 2)
    with pytest.raises(ValueError, match="do not fit into"):
        room.copy_(build_work_list(reads, num_queries))


def test_orders_do_not_mix():
    room = build_work_list([(0, 2, 0, 0, 9)], 2)
    with pytest.raises(ValueError, match="only one of the work lists has an order"):
        room.copy_(build_work_list([(0, 2, 0, 0, 9)], 2, order=[1, 0]))
