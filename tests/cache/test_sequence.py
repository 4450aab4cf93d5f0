"""Sequence: tokens, tables, copy-on-write, truncating."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import cached, compute, make_cache, shape

from radixkv.cache import CopyOrder, PrefixCache, Sequence
from radixkv.config import CacheConfig
from radixkv.errors import OutOfBlocksError, RequestError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


def test_what_can_be_read() -> None:
    cache = make_cache()
    sequence = cache.acquire([3, 1, 4, 1, 5], ("m",))
    assert sequence.namespace == ("m",)
    assert sequence.tokens.tolist() == [3, 1, 4, 1, 5]
    assert sequence.tokens.dtype == np.int32
    assert isinstance(sequence.table, array)
    assert sequence.table.typecode == "i"
    assert sequence.block_table.dtype == np.int32
    assert sequence.slots(0, 5).dtype == np.int64
    sequence.tokens[0] = 99
    sequence.block_table[0] = 99
    assert sequence.tokens[0] == 3
    assert sequence.table[0] == 0
    assert sequence.cacheable is True
    assert sequence.withdrawn is sequence.closed is False


def test_slots_follow_the_table() -> None:
    cache = make_cache(num_blocks=4, block_size=3)
    sequence = cache.acquire([0] * 8)
    sequence.table[:] = array("i", [2, 0, 3])
    assert sequence.slots(0, 8).tolist() == [6, 7, 8, 0, 1, 2, 9, 10]
    assert sequence.slots(4, 7).tolist() == [1, 2, 9]
    assert sequence.slots(8, 8).tolist() == []
    for start, stop in ((-1, 2), (3, 2), (0, 9)):
        with pytest.raises(RequestError, match="have no slots"):
            sequence.slots(start, stop)


def test_slots_are_counted_in_64_bits() -> None:
    sequence = make_cache().acquire([0] * 4)
    sequence.table[0] = 2**31 - 1
    assert sequence.slots(0, 4).tolist() == [4 * (2**31 - 1) + offset for offset in range(4)]


def test_an_empty_sequence_has_no_slots() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    sequence.truncate(0)
    assert sequence.slots(0, 0).tolist() == []
    assert (sequence.num_tokens, sequence.num_blocks, sequence.node) == (0, 0, None)
    sequence.append(5)
    cache.commit(sequence, include_open=True)
    cache.release(sequence)
    cache.check()


@pytest.mark.parametrize("token", [1.5, "a", None, 2**31, -(2**31) - 1])
def test_a_token_is_a_32_bit_integer(token: Any) -> None:
    cache = make_cache()
    sequence = cache.acquire([1])
    with pytest.raises(RequestError, match="32-bit integer"):
        sequence.append(token)
    with pytest.raises(RequestError):
        sequence.extend([token])
    assert sequence.tokens.tolist() == [1]
    cache.check()


def test_numpy_tokens_are_tokens() -> None:
    sequence = make_cache().acquire(np.array([1, 2], np.uint16))
    sequence.append(np.int64(3))  # type: ignore[arg-type]
    sequence.extend(np.array([4, 5]))
    sequence.extend([])
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5]


def test_growing_takes_blocks_when_it_must() -> None:
    cache = make_cache(block_size=2)
    sequence = cache.acquire([1])
    sequence.append(2)
    assert sequence.num_blocks == 1
    sequence.append(3)
    assert sequence.num_blocks == 2
    sequence.extend([4, 5, 6, 7])
    assert sequence.num_blocks == 4
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert cache.take_copies() == []
    cache.check()


GROWN: list[Callable[[Sequence], None]] = [
    lambda sequence: sequence.append(9),
    lambda sequence: sequence.extend([9, 9]),
    lambda sequence: sequence.extend([9] * 7),
]


@pytest.mark.parametrize("grow", GROWN)
def test_writing_into_a_shared_block_copies_it_first(grow: Callable[[Sequence], None]) -> None:
    cache = make_cache()
    first = compute(cache, [*A, 5, 6])
    second = first.fork()
    grow(second)
    cache.check()
    assert cache.take_copies() == [CopyOrder(first.table[1], second.table[1], False, 2)]
    assert first.table[1] != second.table[1]
    assert cache.pool.refs[first.table[1]] == cache.pool.refs[second.table[1]] == 1
    assert first.tokens.tolist() == [*A, 5, 6]


@pytest.mark.parametrize("grow", GROWN)
def test_writing_into_the_trees_open_block_copies_it_first(
    grow: Callable[[Sequence], None],
) -> None:
    cache = make_cache()
    sequence = compute(cache, [*A, 5, 6], include_open=True)
    shown = sequence.table[1]
    grow(sequence)
    cache.check()
    assert cache.take_copies() == [CopyOrder(shown, sequence.table[1], False, 2)]
    assert cache.match([*A, 5, 6]) == 6


@pytest.mark.parametrize("grow", GROWN)
def test_writing_into_a_full_block_of_the_tree_copies_it_first(
    grow: Callable[[Sequence], None],
) -> None:
    cache = make_cache()
    sequence = compute(cache, A + B)
    shown = sequence.table[1]
    sequence.truncate(6)
    assert sequence.num_tree_blocks == 2, "it still holds the block, all of it"
    grow(sequence)
    cache.check()
    assert cache.take_copies() == [CopyOrder(shown, sequence.table[1], False, 2)]
    assert sequence.num_tree_blocks == 1
    assert cache.match(A + B) == 8
    cache.commit(sequence, include_open=True)
    cache.check()
    assert cache.match([*A, 2, 2, 9]) == 7


@pytest.mark.parametrize("grow", GROWN)
def test_growing_that_does_not_fit_changes_nothing(grow: Callable[[Sequence], None]) -> None:
    cache = make_cache(num_blocks=3)
    first = compute(cache, [*A, 5, 6])
    second = first.fork()
    other = cache.acquire([8])
    with pytest.raises(OutOfBlocksError):
        grow(second)
    cache.check()
    assert second.table == first.table
    assert second.tokens.tolist() == [*A, 5, 6]
    assert cache.take_copies() == []
    cache.release(other)
    if len(A) == 4 and grow is GROWN[0]:
        grow(second)
        cache.check()


def test_a_full_pool_hides_our_open_end_before_it_evicts() -> None:
    cache = make_cache(num_blocks=3)
    cached(cache, C)
    sequence = compute(cache, [*A, 5], include_open=True)
    assert cache.pool.num_free == 0
    block = sequence.table[1]
    sequence.append(6)
    assert sequence.table[1] == block
    assert cache.take_copies() == []
    assert (cache.match(C), cache.match([*A, 5])) == (4, 4)
    assert cache.counters.blocks_evicted == 0
    cache.check()


def test_an_open_end_is_not_hidden_in_vain() -> None:
    cache = make_cache(num_blocks=2)
    sequence = compute(cache, [*A, 5], include_open=True)
    with pytest.raises(OutOfBlocksError):
        sequence.extend([6] * 4)
    assert cache.match([*A, 5]) == 5
    cache.check()


def test_an_open_end_that_another_holds_is_not_hidden() -> None:
    cache = make_cache(num_blocks=2)
    sequence = compute(cache, [*A, 5], include_open=True)
    sequence.fork()
    with pytest.raises(OutOfBlocksError):
        sequence.append(6)
    assert cache.match([*A, 5]) == 5


# -- truncating ----------------------------------------------------------------------------------


def test_truncating_gives_blocks_back() -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B + C)
    cache.commit(sequence, 8)
    sequence.truncate(9)
    assert (sequence.num_blocks, sequence.num_computed) == (3, 8)
    sequence.truncate(8)
    assert sequence.num_blocks == 2
    assert cache.pool.num_free == 14
    sequence.truncate(4)
    assert (sequence.num_blocks, sequence.num_tree_blocks, sequence.num_computed) == (1, 1, 4)
    assert shape(cache) == [(0, 4), (1, 4)]
    assert cache.stats().cached_only == 1
    assert cache.match(A + B) == 8
    cache.check()


def test_truncating_to_where_a_node_ends_splits_nothing() -> None:
    cache = make_cache()
    cached(cache, A + B)
    cached(cache, A + C)
    sequence = cache.acquire(A + B)
    splits = cache.counters.splits
    sequence.truncate(4)
    assert cache.counters.splits == splits
    cache.check()
    sequence.truncate(0)
    assert sequence.node is None
    cache.check()


@pytest.mark.parametrize("length", [-1, 9])
def test_what_cannot_be_truncated(length: int) -> None:
    sequence = make_cache().acquire(A + B)
    with pytest.raises(RequestError, match=f"cannot truncate 8 tokens to {length}"):
        sequence.truncate(length)


def test_truncating_to_the_same_length_changes_nothing() -> None:
    cache = make_cache()
    sequence = compute(cache, [*A, 5], include_open=True)
    sequence.truncate(5)
    assert (sequence.num_blocks, sequence.num_computed) == (2, 5)
    cache.check()


def test_truncating_inside_a_trees_block_then_forking_and_committing() -> None:
    cache = make_cache()
    sequence = compute(cache, A + B)
    sequence.truncate(6)
    branch = sequence.fork()
    cache.commit(branch, include_open=True)
    assert branch.table == sequence.table
    assert shape(cache) == [(0, 8)]
    branch.append(7)
    cache.check()
    sequence.truncate(5)
    cache.release(sequence)
    cache.check()
    cache.commit(branch, include_open=True)
    assert branch.tokens.tolist() == [*A, 2, 2, 7]
    assert cache.match([*A, 2, 2, 7]) == 7
    cache.release(branch)
    cache.check()


def test_truncating_inside_a_node_below_another() -> None:
    cache = make_cache()
    cached(cache, A + D)
    sequence = compute(cache, A + B + C)
    sequence.truncate(8)
    assert shape(cache) == [(0, 4), (1, 4), (1, 4), (2, 4)]
    assert sequence.node is not None
    assert (sequence.node.start, sequence.num_tree_blocks) == (1, 2)
    cache.check()


def test_a_hint_knows_what_is_left_after_truncating() -> None:
    cache = make_cache()
    cached(cache, A + B)
    sequence = cache.acquire(A + B)
    assert sequence.own_from == 2
    sequence.truncate(5)
    assert sequence.own_from == 1


def test_resuming_counts_once_and_refuses_other_tokens() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=6, block_size=4))
    sequence = cache.acquire(range(6))
    cache.commit(sequence)
    message = "^a sequence goes on only with a prompt that begins with its tokens$"
    with pytest.raises(RequestError, match=message):
        sequence.resume([0, 1, 2, 9, 4, 5, 6])
    for needed, spare in ((30, 0), (8, 5)):
        with pytest.raises(OutOfBlocksError):
            sequence.resume(range(needed), spare_blocks=spare)
    assert (sequence.num_tokens, sequence.num_blocks) == (6, 2)
    sequence.resume(range(9), spare_blocks=1)
    assert (sequence.num_tokens, sequence.num_cached, sequence.num_blocks) == (9, 6, 3)
    assert sequence.num_counted == 9
    cache.commit(sequence)
    sequence.resume(range(10), resumed=True)
    assert sequence.num_counted == 9
    counters = cache.counters
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (2, 15, 6)
    assert counters.held_tokens == 6
    cache.commit(sequence)
    sequence.resume(range(11))
    assert (counters.queries, counters.query_tokens, counters.hit_tokens) == (3, 26, 16)
    assert counters.held_tokens == 6 + 10
    cache.release(sequence)
    cache.check()


@pytest.mark.parametrize(
    ("start", "stop", "needed"),
    [(4, 4, 0), (5, 5, 0), (4, 5, 1), (5, 6, 1), (5, 8, 1), (6, 9, 2), (8, 13, 2)],
)
def test_resuming_asks_for_what_it_may_need(start: int, stop: int, needed: int) -> None:
    """A block that is not full may have to be copied before it is written."""
    cache = make_cache()
    sequence = compute(cache, range(start))
    with pytest.raises(OutOfBlocksError, match=f"^{needed + 100} blocks are") as caught:
        sequence.resume(range(stop), spare_blocks=100)
    assert caught.value.needed == needed + 100
    assert sequence.num_tokens == start


def test_resuming_may_take_the_last_block() -> None:
    cache = make_cache(num_blocks=2)
    sequence = compute(cache, range(4))
    sequence.resume(range(8))
    assert (sequence.num_blocks, cache.pool.num_free) == (2, 0)


def test_own_blocks_are_those_that_no_other_sequence_holds() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=16, block_size=4))
    sequence = cache.acquire(range(10))
    assert sequence.num_own_blocks == 3
    cache.commit(sequence, include_open=True)
    assert sequence.num_own_blocks == 3
    branch = sequence.fork()
    assert (sequence.num_own_blocks, branch.num_own_blocks) == (0, 0)
    branch.extend(range(5))
    cache.commit(branch)
    # The copied end and one more; the first two blocks are shared.
    assert (sequence.num_own_blocks, branch.num_own_blocks) == (1, 2)
    other = cache.acquire([*range(8), 50, 51, 52, 53, 54])
    assert (sequence.num_own_blocks, branch.num_own_blocks, other.num_own_blocks) == (1, 2, 2)
    for each in (other, branch):
        cache.release(each)
    assert sequence.num_own_blocks == 3
    cache.release(sequence)
    cache.check()
