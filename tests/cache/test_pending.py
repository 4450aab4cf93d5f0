"""Promises: what a step being scheduled will compute, and what if it does not."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import cached, compute, make_cache, shape
from store import FakeStore, write_of

from radixkv.cache import CopyOrder, PrefixCache, Sequence
from radixkv.errors import OutOfBlocksError, RadixKVError, RequestError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


def promise(cache: PrefixCache, tokens: list[int], **how: Any) -> Sequence:
    sequence = cache.acquire(tokens)
    cache.commit(sequence, pending=True, **how)
    cache.check()
    return sequence


def test_requests_of_one_step_share_what_one_of_them_computes() -> None:
    cache = make_cache()
    first = promise(cache, A + B + [5])
    second = cache.acquire(A + B + [6])
    assert second.num_cached == 8
    assert second.table[:2] == first.table[:2]
    cache.commit(second, pending=True)
    cache.check()
    cache.settle()
    cache.check()
    assert first.promised_from is first.num_settled is second.num_settled is None
    cache.abort()
    assert not first.withdrawn, "what was settled does not fail any more"
    cache.release(first)
    cache.release(second)
    assert cache.match(A + B) == 8


def test_tokens_inside_a_promised_block_are_copied_late_and_alone() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5, 6, 7], include_open=True)
    second = cache.acquire([*A, 5, 6, 8, 8])
    assert second.num_cached == 6
    assert cache.allocator.pending >= {second.table[1]}
    store = FakeStore(cache)
    writes = [write_of(cache, second, 6, 8)]
    cache.commit(second, pending=True)
    orders = cache.take_copies()
    assert orders == [CopyOrder(first.table[1], second.table[1], True, 2)]
    first_writes = [store.cache.block_size]  # first's own slots, as its commit promised them
    assert first_writes
    values = FakeStore(cache)
    values.slots[first.table[0]] = 1
    values.slots[first.table[1]] = 2
    values.run(orders, writes)
    assert values.slots[second.table[1], :2].tolist() == [2, 2]
    assert values.slots[second.table[1], 2:].tolist() == writes[0].values.tolist()
    cache.settle()
    cache.check()


@pytest.mark.parametrize("forked", [False, True])
def test_a_late_copy_ends_where_its_holder_writes_anew(forked: bool) -> None:
    """Truncated and written again within the step: the copy, made after the writes, undid them."""
    cache = make_cache()
    first = promise(cache, [*A, 5, 6, 7], include_open=True)
    second = cache.acquire([*A, 5, 6])
    if forked:
        other, second = second, second.fork()
        second.truncate(5)
        cache.release(other)
    else:
        second.truncate(5)
    second.append(9)
    writes = [write_of(cache, second, 5, 6)]
    cache.commit(second, pending=True)
    orders = cache.take_copies()
    assert orders == [CopyOrder(first.table[1], second.table[1], True, 1)]
    store = FakeStore(cache)
    store.slots[first.table[1]] = 2
    store.run(orders, writes)
    assert store.slots[second.table[1], :2].tolist() == [2, writes[0].values[0]]
    cache.settle()
    cache.check()


def test_a_copy_of_a_late_copy_goes_back_to_the_first_source() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5, 6, 7], include_open=True)
    second = cache.acquire([*A, 5, 6, 8])
    third = second.fork()
    cache.release(second)
    assert cache.take_copies() == [CopyOrder(first.table[1], third.table[1], True, 2)]
    cache.check()
    cache.settle()
    assert not third.withdrawn


def test_a_copy_of_more_than_a_late_copy_is_late_too() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5, 6], include_open=True)
    second = promise(cache, [*A, 5, 7], include_open=True)
    third = cache.acquire([*A, 5, 7, 8])
    assert cache.take_copies() == [
        CopyOrder(first.table[1], second.table[1], True, 1),
        CopyOrder(second.table[1], third.table[1], True, 2),
    ]
    cache.release(second)
    assert third.withdrawn
    assert third.num_computed == 0
    cache.check()


def test_only_the_late_copy_that_reaches_too_far_is_shortened() -> None:
    cache = make_cache(num_blocks=32)
    first = promise(cache, [*A, 5, 6, 7], include_open=True)
    second, third = cache.acquire([*A, 5, 6]), cache.acquire([*A, 5, 6, 8])
    full, private = cache.acquire([3] * 4), cache.acquire([4] * 5)
    full.append(9)  # begins a block
    private.append(9)  # goes on in one that nothing is copied into
    third.append(9)  # goes on behind what is copied
    second.truncate(5)
    second.append(9)
    assert cache.take_copies() == [
        CopyOrder(first.table[1], second.table[1], True, 1),
        CopyOrder(first.table[1], third.table[1], True, 2),
    ]
    cache.check()


def test_an_early_copy_stays_early() -> None:
    cache = make_cache()
    cached(cache, A + B)
    promise(cache, C + D)
    sequence = cache.acquire([*A, 2, 9])
    assert cache.take_copies() == [CopyOrder(1, sequence.table[1], False, 1)]
    assert sequence.num_settled is None


def test_a_failed_step_is_withdrawn_with_all_built_on_it() -> None:
    cache = make_cache(num_blocks=32)
    cached(cache, A)
    first = promise(cache, A + B + C)
    below = promise(cache, A + B + C + D)
    beside = promise(cache, [*A, 2, 2, 8])
    stranger = promise(cache, [9] * 4)
    settled = compute(cache, A)
    cache.abort()
    cache.check()
    assert cache.match(A + B + C + D) == 4
    assert cache.match([9] * 4) == 0
    computed = [s.num_computed for s in (first, below, beside, stranger, settled)]
    assert computed == [4, 4, 4, 0, 4]
    assert [s.withdrawn for s in (first, below, beside, stranger)] == [True] * 4
    assert not settled.withdrawn
    assert settled.cacheable
    assert cache.take_copies() == [], "late copies are forgotten"
    assert cache.counters.blocks_withdrawn == 4
    assert not cache.allocator.pending
    assert [s.num_settled for s in (first, below, beside, stranger)] == [None] * 4
    for sequence in (first, below, beside, stranger, settled):
        cache.release(sequence)
    cache.check()
    assert cache.stats().cached_only == 1


def test_early_copies_outlive_a_failed_step() -> None:
    cache = make_cache()
    cached(cache, A + B)
    sequence = cache.acquire([*A, 2, 9])
    promise(cache, C)
    cache.abort()
    assert cache.take_copies() == [CopyOrder(1, sequence.table[1], False, 1)]


def test_aborting_nothing_does_nothing() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    cache.abort()
    cache.settle()
    assert not sequence.withdrawn
    assert cache.match(A) == 4
    cache.check()


def test_a_second_chunk_that_fails_leaves_the_first() -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B + C)
    cache.commit(sequence, 6, pending=True)
    cache.settle()
    cache.commit(sequence, 12, pending=True)
    assert cache.match(A + B + C) == 12
    cache.abort()
    cache.check()
    assert cache.match(A + B + C) == 4
    assert sequence.num_computed == 6


def test_a_promise_that_goes_on_another_keeps_what_was_settled_before() -> None:
    """Tokens 4 and 5 of its second block are computed; the step computes 6 and 7, then others'."""
    cache = make_cache()
    first = cache.acquire(A + B + C)
    cache.commit(first, 6)
    cache.commit(first, 8, pending=True)
    promise(cache, A + B + C)
    assert cache.reuse(first) == 4
    assert (first.num_computed, first.num_settled) == (12, 6)
    cache.check()


def test_two_promises_of_one_step_fail_together() -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B)
    cache.commit(sequence, 4, pending=True)
    cache.commit(sequence, 8, pending=True)
    assert (sequence.num_settled, sequence.promised_from) == (0, 0)
    cache.abort()
    assert cache.match(A) == 0
    assert sequence.num_computed == 0


def test_an_empty_promise_is_none() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    cache.commit(sequence, pending=True)
    assert sequence.promised_from is None
    assert not cache.allocator.pending
    sequence.append(5)


@pytest.mark.parametrize(
    "change",
    [
        lambda sequence: sequence.append(1),
        lambda sequence: sequence.extend([1]),
        lambda sequence: sequence.truncate(1),
    ],
)
def test_a_promised_sequence_is_not_changed(change: Any) -> None:
    cache = make_cache()
    sequence = promise(cache, [*A, 5])
    message = "^the sequence was committed as pending: settle or abort it first$"
    with pytest.raises(RadixKVError, match=message):
        change(sequence)
    cache.settle()
    change(sequence)
    cache.check()


@pytest.mark.parametrize(
    "use",
    [
        lambda sequence: sequence.append(1),
        lambda sequence: sequence.truncate(0),
        lambda sequence: sequence.fork(),
        lambda sequence: sequence._cache.commit(sequence),
        lambda sequence: sequence._cache.reuse(sequence),
    ],
)
def test_a_withdrawn_sequence_is_only_good_for_release(use: Any) -> None:
    cache = make_cache()
    sequence = compute(cache, [*A, 5])
    cache.withdraw(sequence, 2)
    assert (sequence.num_computed, sequence.num_cached) == (2, 0)
    message = "^the sequence was withdrawn: release it, acquire its tokens anew$"
    with pytest.raises(RadixKVError, match=message):
        use(sequence)
    cache.withdraw(sequence, 0)
    assert sequence.num_computed == 0
    cache.release(sequence)
    cache.check()


def test_a_sequence_is_not_withdrawn_to_less_than_nothing() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    with pytest.raises(RequestError, match="to -1 tokens"):
        cache.withdraw(sequence, -1)
    assert not sequence.withdrawn


def test_withdrawing_reaches_all_who_hold_the_blocks() -> None:
    cache = make_cache(num_blocks=32)
    bad = compute(cache, A + B + [5])
    fork = bad.fork()
    below = compute(cache, A + B + C)
    beside = compute(cache, A + D)
    cache.withdraw(bad, 4)
    cache.check()
    assert cache.match(A + B) == 4
    assert cache.match(A + D) == 8
    assert [s.withdrawn for s in (bad, fork, below, beside)] == [True, True, True, False]
    assert [s.num_computed for s in (bad, fork, below)] == [4, 4, 4]
    assert below.num_cached == 4
    for sequence in (bad, fork, below, beside):
        cache.release(sequence)
    cache.check()
    assert cache.counters.blocks_withdrawn == 2


def test_withdrawing_what_only_tables_share() -> None:
    cache = make_cache()
    bad = compute(cache, [*A, 5, 6])
    fork = bad.fork()
    cache.withdraw(bad, 5)
    assert fork.withdrawn
    assert fork.num_computed == 4, "what it shares is not to be trusted, block by block"
    cache.check()


def test_who_was_withdrawn_before_is_withdrawn_further() -> None:
    cache = make_cache()
    bad = compute(cache, [*A, *B, 5])
    fork = bad.fork()
    cache.withdraw(bad, 8)
    assert (bad.num_computed, fork.num_computed) == (8, 8)
    cache.withdraw(bad, 4)
    assert (bad.num_computed, fork.num_computed) == (4, 4)
    cache.check()


def test_withdrawing_all_but_nothing_hides_the_open_end() -> None:
    cache = make_cache()
    sequence = compute(cache, [*A, 5, 6], include_open=True)
    cache.withdraw(sequence, 6)
    assert cache.match([*A, 5, 6]) == 4
    assert sequence.num_computed == 6
    cache.check()


def test_withdrawing_a_sequence_without_blocks_harms_nobody() -> None:
    cache = make_cache()
    empty = cache.acquire(A)
    opened = compute(cache, [5, 6], include_open=True)
    assert opened.table.tolist() == [1]
    empty.truncate(0)
    cache.withdraw(empty, 0)
    assert cache.match([5, 6]) == 2
    assert empty.withdrawn
    assert not opened.withdrawn
    cache.check()


def test_releasing_a_promise_withdraws_it() -> None:
    cache = make_cache(num_blocks=32)
    first = promise(cache, [*A, *B, 5, 6], include_open=True)
    second = promise(cache, [*A, *B, 5, 7, 7])
    third = promise(cache, [*A, *B, 5, 7, 7, 7, 8])
    stranger = promise(cache, D)
    cache.release(first)
    cache.check()
    assert (second.withdrawn, third.withdrawn, stranger.withdrawn) == (True, True, False)
    assert (second.num_computed, third.num_computed, stranger.num_computed) == (0, 0, 4)
    assert cache.match(A + B) == 0
    assert cache.take_copies() == []
    cache.settle()
    cache.check()
    assert cache.match(D) == 4
    for sequence in (second, third, stranger):
        cache.release(sequence)
    cache.check()


def test_releasing_who_only_leaned_on_a_promise_harms_nobody() -> None:
    cache = make_cache()
    first = promise(cache, [*A, *B, 5, 6], include_open=True)
    second = cache.acquire([*A, *B, 5, 7])
    target = second.table[2]
    cache.release(second)
    cache.check()
    assert not first.withdrawn
    assert cache.take_copies() == [], "the block may belong to another by then"
    assert target not in cache.allocator.pending
    settled = compute(cache, [9])
    assert settled.table[0] == target
    cache.abort()
    cache.check()
    assert first.withdrawn
    assert not settled.withdrawn, "its block was another's, who had left before the step failed"
    assert settled.num_computed == 1


def test_releasing_a_promise_on_top_of_a_promise_harms_nobody_below() -> None:
    cache = make_cache()
    first = promise(cache, A + B)
    second = promise(cache, A + B + C)
    cache.release(second)
    cache.check()
    assert not first.withdrawn
    assert cache.match(A + B + C) == 8
    cache.settle()
    cache.check()


def test_a_late_copy_stays_while_a_fork_holds_its_block() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5, 6], include_open=True)
    second = cache.acquire([*A, 5])
    third = second.fork()
    assert third.table == second.table
    cache.release(second)
    cache.check()
    assert cache.take_copies() == [CopyOrder(first.table[1], third.table[1], True, 1)]


def test_truncating_who_leans_cancels_the_late_copy() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5, 6], include_open=True)
    second = cache.acquire([*A, 5, 7])
    second.truncate(4)
    cache.check()
    assert second.num_settled == 0
    assert cache.take_copies() == []
    second.truncate(0)
    cache.check()
    cache.settle()
    assert not first.withdrawn


def test_a_twin_does_not_give_up_blocks_that_the_step_writes() -> None:
    cache = make_cache()
    first, second = cache.acquire([*A, 5]), cache.acquire([*A, 5])
    mine = second.table[:]
    cache.commit(first, include_open=True, pending=True)
    cache.commit(second, include_open=True, pending=True)
    assert second.table == mine
    assert second.num_tree_blocks == 0
    third = second.fork()
    assert third.table == mine
    assert cache.match([*A, 5]) == 5
    cache.check()
    cache.settle()
    cache.release(third)
    cache.commit(second, include_open=True)
    assert second.table == first.table
    cache.check()


def test_a_twin_keeps_the_very_blocks_that_the_step_writes() -> None:
    cache = make_cache()
    first, second = cache.acquire(A), cache.acquire(A)
    cache.commit(first)
    mine = second.table[:]
    cache.commit(second, pending=True)
    assert second.table == mine
    cache.check()


def test_twins_are_joined_whatever_else_the_step_computes() -> None:
    cache = make_cache()
    first, second = compute(cache, A), cache.acquire(A + B, resumed=True)
    twin = cache.acquire(A + B)
    promise(cache, C)
    cache.commit(second)
    cache.commit(twin)
    assert twin.table == second.table
    assert first.table == second.table[:1]
    cache.check()


def test_computed_blocks_are_not_given_up_for_a_promise() -> None:
    cache = make_cache()
    computed = cache.acquire([*A, 5])
    first = promise(cache, [*A, 5], include_open=True)
    mine = computed.table[:]
    cache.commit(computed, include_open=True)
    assert computed.table == mine
    cache.abort()
    assert first.withdrawn
    assert not computed.withdrawn
    cache.commit(computed, include_open=True)
    assert cache.match([*A, 5]) == 5
    cache.check()


def test_an_open_end_is_not_given_up_for_a_promise() -> None:
    cache = make_cache()
    cached(cache, A)
    computed = cache.acquire([*A, 5])
    promise(cache, [*A, 5], include_open=True)
    mine = computed.table[:]
    cache.commit(computed, include_open=True)
    assert computed.table == mine
    cache.check()


def test_reuse_within_a_step() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B + [5, 6])
    first = promise(cache, A + B + [5], include_open=True)
    assert cache.reuse(waiting) == 9
    assert cache.reuse(waiting) == 0, "a late copy will write there"
    assert waiting.num_settled == 0
    assert waiting.table[:2] == first.table[:2]
    cache.check()
    cache.abort()
    cache.check()
    assert waiting.withdrawn
    assert waiting.num_computed == 0


def test_reuse_leaves_promised_blocks_alone() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B)
    cached(cache, A)
    cache.commit(waiting, 2, pending=True)
    assert cache.reuse(waiting) == 0
    cache.settle()
    assert cache.reuse(waiting) == 2


def test_forks_of_a_promise_fall_with_it() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5])
    second = first.fork()
    assert second.table == first.table
    assert second.num_settled == 0
    second.append(6)
    assert cache.take_copies() == [CopyOrder(first.table[1], second.table[1], True, 1)]
    cache.check()
    cache.abort()
    assert second.withdrawn
    cache.check()


def test_a_reset_in_the_middle_of_a_step() -> None:
    cache = make_cache()
    first = promise(cache, [*A, 5], include_open=True)
    cache.acquire([*A, 5, 6])
    cache.reset()
    cache.check()
    cache.settle()
    cache.check()
    assert not first.withdrawn
    assert first.num_computed == 5
    assert shape(cache) == []


def test_what_forks_share_waits_for_one_holder_when_its_pending_twin_is_evicted() -> None:
    """Found by the state machine: the second fork wanted to show what the first one holds too."""
    cache = make_cache(num_blocks=6)
    first, second = cache.acquire([*A, 5]), cache.acquire([*A, 5])
    for each in (first, second):
        cache.commit(each, pending=True)
    branch = second.fork()
    cache.release(first)
    other = cache.acquire([*B, *C, *D])  # Takes the only block of the tree, too.
    assert cache.match([*A, 5]) == 0
    third = second.fork()
    cache.check()
    assert branch.table == third.table == second.table
    assert second.num_tree_blocks == 0
    cache.settle()
    cache.commit(second, include_open=True)
    assert shape(cache) == [], "nor its open end, which would stand without what is before it"
    cache.check()
    for each in (branch, third, other):
        cache.release(each)
    cache.commit(second)
    assert second.num_tree_blocks == 1, "the last holder shows them"
    cache.release(second)
    cache.check()
    assert cache.match(A) == 4


def test_a_refused_fork_has_shown_what_was_computed() -> None:
    """Found by the state machine: its twin's blocks are the tree's, so its own were given back."""
    cache = make_cache(num_blocks=6)
    first, second = cache.acquire(A), cache.acquire(A)
    for each in (first, second):
        cache.commit(each, pending=True)
    cache.settle()
    second.extend(B + C + D + B)
    assert cache.pool.num_free == 0
    with pytest.raises(OutOfBlocksError) as refused:
        second.fork()
    assert (refused.value.needed, refused.value.free, refused.value.evictable) == (4, 1, 0)
    assert len(cache.sequences) == 2
    assert second.table[0] == first.table[0]
    assert cache.counters.blocks_deduplicated == 1
    cache.check()


@pytest.mark.parametrize("leave", ["truncate", "release"])
def test_a_copy_still_to_be_made_is_shown_by_nobody_who_can_leave_it(leave: str) -> None:
    """Found by the state machine: the step failed, and what it was to copy stayed visible."""
    cache = make_cache()
    writer = promise(cache, [1], include_open=True)
    reader = cache.acquire([1])
    assert cache.take_copies() == [CopyOrder(writer.table[0], reader.table[0], True, 1)]
    longer = promise(cache, [1, 2], include_open=True)  # Its end stands in place of the writer's.
    cache.release(longer)
    assert cache.match([1]) == 0
    cache.commit(reader, include_open=True, pending=True)
    if leave == "truncate":
        reader.truncate(0)
    else:
        cache.release(reader)
    cache.check()
    cache.abort()
    cache.check()
    assert cache.match([1]) == 0
    assert writer.withdrawn


def test_a_copied_end_is_shown_once_it_is_there() -> None:
    cache = make_cache()
    writer = promise(cache, [1], include_open=True)
    reader = cache.acquire([1])
    cache.release(promise(cache, [1, 2], include_open=True))
    cache.settle()
    cache.release(writer)
    cache.commit(reader, include_open=True)
    cache.release(reader)
    cache.check()
    assert cache.match([1]) == 1


def test_a_late_copy_is_dropped_alone() -> None:
    """Found by the state machine: the copy of an earlier holder, for a fork, went with it."""
    cache = make_cache()
    store = FakeStore(cache)
    known = cache.acquire([2])
    store.run([], [write_of(cache, known, 0, 1)])
    cache.commit(known, include_open=True)
    parent = cache.acquire([2, 3])
    fork = parent.fork()
    block = parent.table[0]
    assert cache.allocator._orders == [
        CopyOrder(known.table[0], block, False, 1),
        CopyOrder(block, fork.table[0], False, 1),
    ]
    writer = cache.acquire([1])
    writes = [write_of(cache, writer, 0, 1)]
    cache.commit(writer, include_open=True, pending=True)
    cache.release(parent)
    reader = cache.acquire([1])
    assert reader.table[0] == block
    cache.release(reader)
    cache.check()
    store.run(cache.take_copies(), writes)
    cache.settle()
    store.verify(fork)
