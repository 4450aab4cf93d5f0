"""PrefixCache and RadixTree: what is shared, split, evicted, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers import cached, compute, make_cache, shape

from radixkv.cache import EPHEMERAL, CopyOrder, Removal, Retention
from radixkv.errors import ConfigError, OutOfBlocksError, RequestError, SequenceClosedError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


# -- matching ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (A + B + C, 12),
        (A + B + C + D, 12),
        (A + B, 8),
        (A + B[:3], 7),
        (A + B[:3] + [9], 7),
        (A + B + C[:1] + [9, 9, 9], 9),
        (A[:1], 1),
        ([9], 0),
        ([], 0),
        (np.array(A + B + [9]), 8),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-",
)
def test_a_match_is_exact_to_the_token(asked: Any, found: int) -> None:
    cache = make_cache()
    cached(cache, A + B + C)
    before = (cache.tree.clock, shape(cache), cache.stats())
    assert cache.match(asked) == found
    assert (cache.tree.clock, shape(cache), cache.stats()) == before


def test_a_match_goes_on_into_open_ends_and_children() -> None:
    cache = make_cache()
    cached(cache, A + B + [7, 8], include_open=True)
    assert cache.match(A + B + [7, 8, 9]) == 10
    assert cache.match(A + B + [7]) == 9
    cached(cache, A + C + [7], include_open=True)
    assert shape(cache) == [(0, 4), (1, 5), (1, 6)]
    assert cache.match(A + B + [7, 8]) == 10
    assert cache.match(A + C + [7, 8]) == 9
    assert cache.match(A + B[:2] + C) == 6


def test_namespaces_do_not_see_each_other() -> None:
    cache = make_cache()
    cached(cache, A, namespace=("a", "bc"))
    assert cache.match(A, ("a", "bc")) == 4
    assert cache.match(A, ("ab", "c")) == cache.match(A) == 0
    cached(cache, A)
    assert cache.stats().cached_only == 2
    assert set(cache.tree.roots) == {("a", "bc"), ()}


def test_a_namespace_is_forgotten_with_its_last_block() -> None:
    cache = make_cache(num_blocks=2)
    for number in range(50):
        cached(cache, A, namespace=(str(number),))
    assert len(cache.tree.roots) == 2


@pytest.mark.parametrize("namespace", ["a", ["a"], (1,)], ids=str)
def test_a_bad_namespace_is_refused(namespace: Any) -> None:
    cache = make_cache()
    with pytest.raises(RequestError):
        cache.match(A, namespace)
    with pytest.raises(RequestError):
        cache.acquire(A, namespace)
    cache.check()


# -- acquiring -----------------------------------------------------------------------------------


def test_acquire_shares_what_is_cached() -> None:
    cache = make_cache()
    cached(cache, A + B)
    sequence = cache.acquire([*A, *B, 5])
    assert (sequence.num_cached, sequence.num_computed) == (8, 8)
    assert (sequence.num_tokens, sequence.num_blocks, sequence.num_tree_blocks) == (9, 3, 2)
    assert sequence.block_table.tolist() == [0, 1, 2]
    assert sequence.slots(6, 9).tolist() == [6, 7, 8]
    assert cache.take_copies() == []


def test_acquire_copies_the_tokens_before_a_divergence() -> None:
    cache = make_cache()
    cached(cache, A + B)
    sequence = cache.acquire([*A, 2, 2, 9])
    assert sequence.num_cached == 6
    assert cache.take_copies() == [CopyOrder(1, sequence.table[1], False, 2)]
    assert cache.counters.copied_tokens == 2
    assert cache.take_copies() == []


def test_each_copied_token_is_counted() -> None:
    cache = make_cache()
    cached(cache, A + B)
    cache.acquire([*A, 2, 2, 9])
    cache.acquire([*A, 2, 2, 2, 9])
    assert cache.counters.copied_tokens == 2 + 3


def test_tokens_shorter_than_a_block_are_not_looked_up_by_hash() -> None:
    """A hash that collides would find a child of which no full block matches."""
    cache = make_cache(block_hash=lambda block: 7)
    cached(cache, A + B)
    cached(cache, A + C)
    sequence = cache.acquire([*A, 2, 2])
    assert (sequence.num_cached, sequence.num_tree_blocks) == (6, 1)
    assert shape(cache) == [(0, 4), (1, 4), (1, 4)]
    cache.check()


def test_acquire_splits_so_that_the_rest_can_go_first() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, A + B + C)
    assert shape(cache) == [(0, 12)]
    sequence = cache.acquire(A)
    assert shape(cache) == [(0, 4), (1, 8)]
    assert cache.counters.splits == 1
    assert cache.stats().held_and_cached == 1
    other = cache.acquire([9] * 20)
    cache.check()
    assert cache.match(A + B + C) == 4
    cache.release(other)
    cache.release(sequence)


@pytest.mark.parametrize("tokens", [[], np.array([], np.int64)], ids=str)
def test_a_sequence_needs_a_token(tokens: Any) -> None:
    with pytest.raises(RequestError, match=r"^a sequence needs at least one token$"):
        make_cache().acquire(tokens)


@pytest.mark.parametrize("setting", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None])
def test_sizes_are_whole_and_positive(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        make_cache(**{setting: value})


def test_a_prompt_that_does_not_fit_now_changes_nothing() -> None:
    cache = make_cache(num_blocks=4)
    cached(cache, A + B)
    held = cache.acquire([8, 8])
    clock, stats = cache.tree.clock, cache.stats()
    for _ in range(3):
        with pytest.raises(OutOfBlocksError) as caught:
            cache.acquire(A + C + D + [9])
        error = caught.value
        assert (error.needed, error.free, error.evictable, error.held) == (3, 1, 1, 2)
    assert (cache.tree.clock, cache.stats()) == (clock, stats)
    assert "3 blocks are needed, but only 1 are free and 1 can be evicted" in str(error)
    cache.release(held)
    cache.check()


def test_blocks_can_be_left_for_others_to_go_on() -> None:
    cache = make_cache(num_blocks=4)
    cached(cache, A)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.acquire(A + B, spare_blocks=3)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (4, 3, 0)
    sequence = cache.acquire(A + B, spare_blocks=2)
    assert (sequence.num_blocks, cache.pool.num_free) == (2, 2)


def test_what_was_matched_is_not_evicted_for_the_rest() -> None:
    cache = make_cache(num_blocks=3)
    cached(cache, A)
    cached(cache, B)
    sequence = cache.acquire(A + C + D)
    cache.check()
    assert sequence.num_cached == 4
    assert cache.match(B) == 0
    assert cache.counters.blocks_evicted == 1


def test_all_that_is_matched_and_held_by_nobody_counts_as_held() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, A + B + C)
    cached(cache, A + D)
    cached(cache, A + B)  # three nodes on the path of A + B + C
    clock = cache.tree.clock
    with pytest.raises(OutOfBlocksError) as caught:
        cache.acquire(A + B + C + [9] * 16)
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (4, 2, 1, 3)
    assert cache.tree.clock == clock, "refused before anything was used"
    running = cache.acquire(A)
    with pytest.raises(OutOfBlocksError) as caught:
        cache.acquire(A + B + C + [9] * 16)
    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held) == (4, 2, 1, 3)
    taken = cache.acquire(A + B + C + [9] * 12)
    assert (taken.num_cached, cache.match(A + D)) == (12, 4)
    cache.release(running)
    cache.check()


def test_what_was_matched_is_let_go_if_allocating_fails() -> None:
    cache = make_cache(num_blocks=2)
    cached(cache, A)
    cached(cache, B)

    def stop(_: Removal) -> None:
        raise KeyboardInterrupt

    cache.watch_removals(stop)
    with pytest.raises(KeyboardInterrupt):
        cache.acquire(A + C)
    cache.check()
    assert cache.stats().cached_only == 2


def test_a_large_pool_evicts_nothing_while_what_is_free_suffices() -> None:
    cache = make_cache(num_blocks=512)
    cached(cache, A)
    cache.allocator.release(cache.allocator.allocate(cache.pool.num_free))
    assert (cache.counters.blocks_evicted, cache.match(A)) == (0, 4)
    cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 1))
    assert (cache.counters.blocks_evicted, cache.match(A)) == (1, 0)


def test_the_block_copied_from_may_be_evicted_for_the_copy() -> None:
    cache = make_cache(num_blocks=1)
    cached(cache, A)
    sequence = cache.acquire([1, 1, 9])
    assert sequence.num_cached == 2
    assert sequence.table.tolist() == [0]
    assert cache.take_copies() == [], "it is the very block"
    cache.check()


def test_the_source_of_a_copy_may_go_elsewhere_in_the_table() -> None:
    cache = make_cache(num_blocks=3)
    cached(cache, A)
    cached(cache, C)
    sequence = cache.acquire([1, 1, 9, 9, *D, *D])
    assert sequence.num_cached == 2
    assert sequence.table.tolist() == [1, 0, 2]
    assert cache.take_copies() == [CopyOrder(0, 1, False, 2)]
    cache.check()


def test_recency_is_refreshed_for_what_was_used_alone() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, A + B + [7], include_open=True)
    cached(cache, C)
    cached(cache, A)  # refreshes A, but neither B nor its open end
    blocks = cache.allocator.allocate(cache.pool.num_free + 2)
    assert (cache.match(A + B), cache.match(C)) == (4, 4)
    cache.allocator.release(blocks)


def test_an_open_end_used_in_part_is_not_refreshed() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, [*A, 7, 7], include_open=True)
    cached(cache, C)
    cached(cache, [*A, 7, 9])
    cache.check()
    cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 1))
    assert (cache.match([*A, 7, 7]), cache.match(C)) == (4, 4)


def test_an_open_end_used_to_its_end_is_refreshed() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, [*A, 7, 7], include_open=True)
    cached(cache, C)
    sequence = cache.acquire([*A, 7, 7])
    cache.release(sequence)
    cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 1))
    assert (cache.match([*A, 7, 7]), cache.match(C)) == (6, 0)


@pytest.mark.parametrize("asked", [[7, 8], [7, 8, 5]], ids=str)
def test_an_open_end_set_apart_that_is_used_to_its_end_is_refreshed(asked: list[int]) -> None:
    cache = make_cache()
    for end in ([7, 8], [7, 9]):
        cached(cache, A + end, include_open=True)
    sequence = cache.acquire(A + asked)
    used, other = sorted(cache.tree.open_nodes.values(), key=lambda node: bytes(node.tokens))
    assert (used.hits, other.hits) == (1, 0)
    assert used.last_used > other.last_used
    cache.release(sequence)
    cache.check()


def test_splits_are_counted() -> None:
    cache = make_cache(num_blocks=32)
    cached(cache, A + B + C)
    cached(cache, A)
    cached(cache, A + B)
    cached(cache, [*A, *B, *C, 7, 7], include_open=True)
    assert cache.counters.splits == 2
    cached(cache, [*A, *B, *C, 7, 8])
    cached(cache, [9, 9, 9, 9, 5, 5], include_open=True)
    cached(cache, [9, 9, 9, 9, 5, 6])
    assert cache.counters.splits == 4, "open ends that were set apart count too"


def test_what_was_released_last_goes_last() -> None:
    cache = make_cache(num_blocks=2)
    first, second = compute(cache, A), compute(cache, B)
    cache.release(second)
    cache.release(first)
    cache.allocator.release(cache.allocator.allocate(1))
    assert (cache.match(A), cache.match(B)) == (4, 0)


def test_of_equally_recent_leaves_the_older_goes_first() -> None:
    cache = make_cache()
    sequence = compute(cache, A + B)
    for tokens in (C, D):
        sequence.truncate(4)
        sequence.extend(tokens)
        cache.commit(sequence)
    sequence.truncate(4)
    leaves = cache.tree.queue.nodes()
    assert len({node.last_used for node in leaves}) == 1
    assert [node.tokens[0] for node in leaves] == [2, 3, 4]


def test_eviction_takes_from_the_tail() -> None:
    cache = make_cache(num_blocks=8)
    cached(cache, A + B + C + [7], include_open=True)
    for left in (12, 8, 4, 0):
        cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 1))
        cache.check()
        assert cache.match(A + B + C + [7]) == left
    assert cache.counters.blocks_evicted == 4
    assert cache.stats().nodes == 0


def test_evicted_tokens_are_counted_in_whole_numbers() -> None:
    cache = make_cache(num_blocks=2)
    cached(cache, [*A, 7], include_open=True)
    cache.allocator.release(cache.allocator.allocate(2))
    assert str(cache.counters.tokens_evicted) == "5"


def test_eviction_goes_on_to_the_parent() -> None:
    cache = make_cache(num_blocks=6)
    cached(cache, A + B)
    cached(cache, A + C)
    assert shape(cache) == [(0, 4), (1, 4), (1, 4)]
    cache.allocator.release(cache.allocator.allocate(6))
    cache.check()
    assert cache.counters.blocks_evicted == 3
    assert not cache.tree.roots


# -- committing ----------------------------------------------------------------------------------


def test_only_what_is_computed_is_visible() -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B + [9])
    assert cache.match(A) == 0
    cache.commit(sequence, 3)
    assert cache.match(A) == 0
    cache.commit(sequence, 7)
    assert cache.match(A + B) == 4
    cache.commit(sequence)
    assert cache.match(A + B + [9]) == 8
    assert sequence.num_computed == 9
    assert cache.counters.blocks_stored == 2


@pytest.mark.parametrize("stop", [3, 10, -1])
def test_what_cannot_be_committed(stop: int) -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B + [9])
    cache.commit(sequence, 4)
    with pytest.raises(RequestError, match=f"cannot commit {stop} of 9 tokens, of which 4 are"):
        cache.commit(sequence, stop)
    cache.check()


def test_a_conversation_is_one_edge_that_grows() -> None:
    cache = make_cache(num_blocks=32)
    tokens: list[int] = []
    for turn in range(5):
        tokens += [turn, 9, 9, 9, 9]
        cached(cache, tokens, include_open=True)
    assert shape(cache) == [(0, 25)]
    assert cache.counters.splits == 0


def test_twins_keep_one_copy() -> None:
    cache = make_cache()
    first, second = cache.acquire(A + B), cache.acquire(A + B)
    cache.commit(first)
    cache.commit(second)
    assert first.table == second.table
    assert cache.counters.blocks_deduplicated == 2
    assert cache.stats().held_and_cached == 2
    cache.check()
    cache.release(first)
    cache.check()
    cache.release(second)
    assert cache.stats().cached_only == 2


def test_all_blocks_given_up_for_a_twins_are_counted() -> None:
    cache = make_cache()
    twins = [cache.acquire(A + B) for _ in range(3)]
    for twin in twins:
        cache.commit(twin)
    assert cache.counters.blocks_deduplicated == 2 + 2


def test_a_twin_takes_no_more_than_it_has_computed() -> None:
    cache = make_cache()
    first, second = cache.acquire(A + B), cache.acquire(A + B)
    cache.commit(first)
    cache.commit(second, 4)
    assert (second.num_tree_blocks, second.num_computed) == (1, 4)
    assert second.table[1] != first.table[1]
    cache.check()


def test_being_shown_by_a_twin_too_is_a_use() -> None:
    cache = make_cache()
    first, second = cache.acquire([*A, 7]), cache.acquire([*A, 7])
    cache.commit(first)
    node = first.node
    assert node is not None
    clock = node.last_used
    cache.commit(second, include_open=True)
    assert (node.hits, node.last_used > clock) == (1, True)


def test_twins_that_diverge_share_what_they_can() -> None:
    cache = make_cache()
    first, second = cache.acquire(A + B + C), cache.acquire(A + B + D)
    cache.commit(first)
    cache.commit(second)
    assert shape(cache) == [(0, 8), (2, 4), (2, 4)]
    assert first.table[:2] == second.table[:2]
    assert first.table[2] != second.table[2]
    cache.check()


def test_twins_with_an_open_end_keep_one_of_it_too() -> None:
    cache = make_cache()
    first, second = cache.acquire([*A, 7]), cache.acquire([*A, 7])
    cache.commit(first, include_open=True)
    cache.commit(second, include_open=True)
    assert first.table == second.table
    assert cache.counters.blocks_deduplicated == 2
    cache.check()
    assert cache.stats().held_and_cached == 2
    cache.release(first)
    cache.release(second)
    cache.check()


def test_an_open_end_that_nobody_holds_is_adopted() -> None:
    cache = make_cache()
    first, second = cache.acquire([*A, 7]), cache.acquire([*A, 7])
    cache.commit(first, include_open=True)
    theirs = first.table[:]
    cache.release(first)
    assert cache.stats().cached_only == 2
    cache.commit(second, include_open=True)
    assert second.table == theirs
    assert cache.stats().cached_only == 0
    cache.check()


def test_an_open_end_is_superseded_by_a_longer_one() -> None:
    cache = make_cache()
    cached(cache, [*A, 7], include_open=True)
    cached(cache, [*A, 7, 8], include_open=True)
    assert shape(cache) == [(0, 6)]
    compute(cache, [*A, 7], include_open=True)
    assert shape(cache) == [(0, 4), (1, 2)], "the longer one is not used, nor superseded"
    cached(cache, [*A, 7, 8, 8, 8, 5], include_open=True)
    assert shape(cache) == [(0, 4), (1, 5)]


def test_different_open_ends_stand_side_by_side() -> None:
    cache = make_cache()
    cached(cache, [*A, 7, 8], include_open=True)
    cached(cache, [*A, 7, 9], include_open=True)
    cached(cache, [*A, 6], include_open=True)
    assert shape(cache) == [(0, 4), (1, 1), (1, 2), (1, 2)]
    cached(cache, [*A, 7, 8, 8, 8])
    assert shape(cache) == [(0, 4), (1, 1), (1, 2), (1, 4)]
    cached(cache, [*A, 6, 6], include_open=True)
    assert shape(cache) == [(0, 4), (1, 2), (1, 2), (1, 4)]


def test_branches_of_one_node_share_an_open_end_or_stand_side_by_side() -> None:
    cache = make_cache()
    first = compute(cache, A)
    same, shorter, other = first.fork(), first.fork(), first.fork()
    first.extend([5, 6])
    cache.commit(first, include_open=True)
    assert shape(cache) == [(0, 6)]
    same.extend([5, 6])
    cache.commit(same, include_open=True)
    assert same.table == first.table
    shorter.append(5)
    cache.commit(shorter, include_open=True)
    assert shape(cache) == [(0, 6)]
    other.extend([5, 7])
    cache.commit(other, include_open=True)
    assert shape(cache) == [(0, 4), (1, 2), (1, 2)]
    assert {node.blocks.typecode for node in cache.tree.nodes()} == {"i"}
    cache.check()


def test_an_open_end_below_the_root() -> None:
    cache = make_cache()
    cached(cache, [7], include_open=True)
    assert shape(cache) == [(0, 1)]
    cached(cache, [7, 8], include_open=True)
    assert shape(cache) == [(0, 2)]
    assert len(cache.tree.roots) == 1
    cached(cache, [7, 8, 8, 8])
    assert shape(cache) == [(0, 4)]


def test_an_open_end_is_shown_at_the_end_of_the_tokens_alone() -> None:
    cache = make_cache()
    sequence = cache.acquire([*A, 7, 8])
    cache.commit(sequence, 5, include_open=True)
    assert cache.match([*A, 7, 8]) == 4
    cache.commit(sequence, include_open=True)
    cache.commit(sequence, include_open=True)
    assert cache.match([*A, 7, 8]) == 6


# -- reusing -------------------------------------------------------------------------------------


def test_reuse_takes_over_what_others_computed() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B + C + [5, 6])
    cached(cache, A + B + [3, 3])
    assert cache.reuse(waiting) == 8
    assert (waiting.num_computed, waiting.num_cached) == (8, 8)
    assert cache.reuse(waiting) == 0
    cached(cache, A + B + C + [5], include_open=True)
    assert cache.reuse(waiting) == 5
    assert waiting.num_computed == 13
    (order,) = cache.take_copies()
    assert (order.target, order.num_tokens) == (waiting.table[3], 1)
    assert cache.counters.hit_tokens == 8 + 8 + 5, "the second and the third prompt, and ours"
    cache.check()


def test_reuse_goes_on_into_the_open_end_of_ones_own_node() -> None:
    cache = make_cache(eviction="priority")
    other = compute(cache, A + B)
    waiting = cache.acquire(A + B + [5, 6, 7])
    wanted = waiting.retention = Retention(priority=2)
    other.extend([5, 6])
    cache.commit(other, include_open=True)
    assert shape(cache) == [(0, 10)]
    node = cache.tree.open_nodes[other.table[2]]
    clock, hits = node.last_used, node.hits
    assert cache.reuse(waiting) == 2
    assert cache.take_copies() == [CopyOrder(other.table[2], waiting.table[2], False, 2)]
    assert (node.last_used > clock, node.hits) == (True, hits + 1)
    assert node.retention is wanted
    assert cache.counters.copied_tokens == 2
    assert cache.reuse(waiting) == 0
    assert cache.take_copies() == [], "no more than it has"
    cache.check()


def test_an_open_end_of_ones_own_node_that_is_reused_in_part_is_not_refreshed() -> None:
    cache = make_cache()
    first = compute(cache, A)
    waiting = cache.acquire([*A, 5, 7])
    first.extend([5, 6])
    cache.commit(first, include_open=True)
    node = cache.tree.open_nodes[first.table[1]]
    clock = node.last_used
    assert cache.reuse(waiting) == 1
    assert node.last_used == clock
    cache.check()


def test_reuse_of_no_more_than_it_has_copies_and_refreshes_nothing() -> None:
    cache = make_cache()
    waiting = cache.acquire([*A, 5, 6, 7, 8, 9])
    cache.commit(waiting, 6)
    cached(cache, [*A, 5, 6], include_open=True)
    cache.take_copies()
    clock = cache.tree.clock
    assert cache.reuse(waiting) == 0
    assert cache.take_copies() == []
    assert cache.tree.clock == clock


def test_reuse_of_full_blocks_copies_nothing() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B)
    cached(cache, A)
    assert cache.reuse(waiting) == 4
    assert cache.counters.copied_tokens == 0


def test_after_a_reset_a_waiting_sequence_takes_nothing_over() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B)
    cache.reset()
    assert waiting.cacheable is False
    cached(cache, A + B)
    assert cache.reuse(waiting) == 0
    cache.check()


def test_reuse_in_the_middle_of_a_block() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B)
    cache.commit(waiting, 2)
    cached(cache, [1, 1, 9, 9])
    assert cache.reuse(waiting) == 0, "no more than it has"
    cached(cache, [1, 1, 1, 9])
    assert cache.reuse(waiting) == 1
    assert cache.counters.copied_tokens == 2 + 1
    cached(cache, A)
    assert cache.reuse(waiting) == 1
    assert waiting.num_tree_blocks == 1
    cache.check()


def test_reuse_of_all_tokens() -> None:
    cache = make_cache()
    waiting = cache.acquire(A + B)
    cached(cache, A + B)
    assert cache.reuse(waiting) == 8
    assert cache.reuse(waiting) == 0
    cache.check()


def test_reuse_leaves_a_shared_block_alone() -> None:
    cache = make_cache()
    waiting = compute(cache, [*A, 7], include_open=True)
    assert cache.reuse(waiting) == 0
    cached(cache, [*A, 7, 8], include_open=True)
    assert cache.reuse(waiting) == 0
    waiting.truncate(2)
    assert cache.reuse(waiting) == 0
    cache.check()


# -- forking and releasing -----------------------------------------------------------------------


def test_a_fork_shares_every_block() -> None:
    cache = make_cache()
    first = cache.acquire([*A, 5])
    cache.commit(first)
    second = first.fork()
    assert second.table == first.table
    assert second.tokens.tolist() == first.tokens.tolist()
    assert (second.num_computed, second.num_cached) == (5, 5)
    assert cache.counters.forks == 1
    assert cache.stats().sequences == 2
    assert cache.take_copies() == []
    second.append(6)
    assert cache.take_copies() == [CopyOrder(first.table[1], second.table[1], False, 1)]
    assert cache.counters.copies_on_write == 1
    first.append(7)
    assert cache.take_copies() == [], "the last holder writes in place"
    assert second.tokens.tolist() == [*A, 5, 6]
    cache.check()


def test_a_fork_before_the_prompt_is_computed_gets_blocks_of_its_own() -> None:
    cache = make_cache()
    first = cache.acquire(A + B + [9])
    cache.commit(first, 6)
    second = first.fork()
    assert second.table[:1] == first.table[:1]
    assert not set(second.table[1:]) & set(first.table[1:])
    assert cache.take_copies() == [CopyOrder(first.table[1], second.table[1], False, 2)]
    assert second.num_computed == 6
    cache.check()
    cache.commit(first)
    cache.commit(second)
    assert second.table[:2] == first.table[:2]
    cache.check()


def test_a_fork_between_two_blocks_copies_nothing_and_inherits_the_hint() -> None:
    cache = make_cache()
    first = cache.acquire(A + B, retention=EPHEMERAL)
    cache.commit(first, 4)
    second = first.fork()
    assert second.table[1] != first.table[1]
    assert cache.take_copies() == []
    assert second.retention is EPHEMERAL


def test_each_fork_and_each_copy_on_write_is_counted() -> None:
    cache = make_cache()
    first = compute(cache, [*A, 5])
    for number in range(1, 4):
        first.fork().append(6)
        assert (cache.counters.forks, cache.counters.copies_on_write) == (number, number)


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    cache = make_cache(num_blocks=3)
    first = cache.acquire(A + B)
    with pytest.raises(OutOfBlocksError):
        first.fork()
    cache.check()
    assert len(cache.sequences) == 1
    assert cache.counters.forks == 0


def test_a_released_sequence_is_closed() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    cache.release(sequence)
    calls: list[Any] = [
        sequence.fork,
        lambda: sequence.append(1),
        lambda: sequence.extend([1]),
        lambda: sequence.truncate(1),
        lambda: cache.release(sequence),
        lambda: cache.commit(sequence),
        lambda: cache.reuse(sequence),
        lambda: cache.withdraw(sequence, 0),
    ]
    for call in calls:
        message = "^the sequence was released; acquire or fork a new one$"
        with pytest.raises(SequenceClosedError, match=message):
            call()
    assert sequence.closed
    assert cache.match(A) == 4
    cache.check()


# -- resetting -----------------------------------------------------------------------------------


def test_after_a_reset_nothing_computed_before_is_seen() -> None:
    cache = make_cache()
    cached(cache, B, namespace=("x",))
    running = compute(cache, [*A, 5], include_open=True)
    cache.reset()
    cache.check()
    assert cache.stats().nodes == 0
    assert (cache.match(A), cache.match(B, ("x",))) == (0, 0)
    assert running.num_computed == 5
    assert not running.cacheable
    assert not running.withdrawn
    running.append(6)
    cache.commit(running, include_open=True)
    branch = running.fork()
    assert cache.reuse(branch) == 0
    branch.extend([7] * 9)
    cache.commit(branch)
    assert cache.match(A) == 0
    cached(cache, A)
    assert cache.match(A) == 4
    cache.release(running)
    cache.release(branch)
    cache.check()
    assert cache.counters.blocks_withdrawn == 3
    assert cache.pool.num_free == 15


def test_a_reset_reaches_what_was_not_shown_yet() -> None:
    cache = make_cache()
    running = cache.acquire(A)
    cache.commit(running, 2)
    cache.reset()
    cache.commit(running)
    assert cache.match(A) == 0
    cache.check()


# -- counting ------------------------------------------------------------------------------------


def test_prompt_tokens_are_counted_once() -> None:
    cache = make_cache(num_blocks=32)
    cached(cache, A + B)
    counters = cache.counters
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (1, 8, 0)
    sequence = cache.acquire(A + C)
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (2, 16, 4)
    cache.release(sequence)
    again = cache.acquire(A + C, resumed=True)
    cached(cache, A + C)
    assert cache.reuse(again) == 4
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (3, 24, 8)
    branch = again.fork()
    branch.extend(D)
    cached(cache, A + C + D)
    assert cache.reuse(branch) == 4
    assert counters.hit_tokens == 8 + 8, "of the prompt that was acquired, not of the branch"


def test_a_resumed_prompt_that_takes_over_from_the_start_counts_no_hits() -> None:
    cache = make_cache()
    again = cache.acquire(A + B, resumed=True)
    cached(cache, A)
    assert cache.reuse(again) == 4
    assert (cache.counters.query_tokens, cache.counters.hit_tokens) == (4, 0)


def test_found_output_tokens_are_no_hits() -> None:
    cache = make_cache(num_blocks=32)
    sequence = compute(cache, A)
    sequence.extend(B + C)
    cached(cache, A + B + C)
    hits = cache.counters.hit_tokens
    assert cache.reuse(sequence) == 8
    assert cache.counters.hit_tokens == hits
    sequence.truncate(2)
    sequence.extend(D)
    assert sequence.num_counted == 2


def test_stats_add_up() -> None:
    cache = make_cache(num_blocks=8)
    assert cache.stats().hit_rate == 0
    cached(cache, A + B)
    running = compute(cache, A + C + [5, 6])
    stats = cache.stats()
    assert (stats.num_blocks, stats.block_size) == (8, 4)
    assert (stats.free, stats.held_only, stats.cached_only, stats.held_and_cached) == (4, 1, 1, 2)
    assert (stats.sequences, stats.nodes, stats.cached_tokens) == (1, 3, 12)
    assert str(stats.cached_tokens) == "12"
    assert stats.hit_rate == pytest.approx(4 / 18)
    assert stats.counters == cache.counters
    assert stats.counters is not cache.counters
    cache.release(running)
    assert cache.stats().held_only == 0


def test_every_block_is_somewhere() -> None:
    cache = make_cache(num_blocks=9, block_size=2)
    live = [compute(cache, [number % 2] * 3, include_open=number > 1) for number in range(3)]
    stats = cache.stats()
    total = stats.free + stats.held_only + stats.cached_only + stats.held_and_cached
    assert total == 9
    assert Counter(block for s in live for block in s.table)[live[0].table[0]] == 2


def test_spare_blocks_are_left_over() -> None:
    cache = make_cache(6)
    with pytest.raises(OutOfBlocksError) as refused:
        cache.acquire(list(range(16)), spare_blocks=3)
    assert refused.value.needed == 7
    assert cache.counters.queries == 0
    sequence = cache.acquire(list(range(16)), spare_blocks=2)
    assert cache.pool.num_free == 2
    cache.release(sequence)
