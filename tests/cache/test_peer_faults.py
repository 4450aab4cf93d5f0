"""Ways in which others' prefix caches broke; the numbers are those of the list we keep.

Kinds that need an engine, kernels or a server are tested there: 9, 14, 17 to 20.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import cached, compute, make_cache
from store import FakeStore, write_of

from radixkv.cache import EPHEMERAL, PrefixCache, Retention, Sequence, chain_hashes, namespace_hash
from radixkv.cache.node import RadixNode
from radixkv.errors import CacheInvariantError, OutOfBlocksError, SequenceClosedError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


def only_the_tree_holds(cache: PrefixCache) -> None:
    cache.check()
    assert cache.pool.num_free + cache.tree.num_evictable == cache.pool.num_blocks
    cache.reset()
    cache.check()
    assert cache.pool.num_free == cache.pool.num_blocks


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("include_open", [False, True])
@pytest.mark.parametrize("outputs", [0, 1, 15, 16, 17])
def test_01_a_sequence_that_ends_mid_block(length: int, include_open: bool, outputs: int) -> None:
    cache = make_cache(num_blocks=12, block_size=16)
    for _ in range(3):
        sequence = compute(cache, [1] * length, include_open=include_open)
        for token in range(outputs):
            sequence.append(token)
            cache.commit(sequence, include_open=include_open)
            cache.check()
        cache.release(sequence)
        cache.check()
        full = (length + outputs) // 16
        assert cache.stats().cached_only >= full
    only_the_tree_holds(cache)


def test_02_finished_and_aborted_in_one_step() -> None:
    cache = make_cache()
    sequence = cache.acquire(A + B)
    cache.commit(sequence, pending=True)
    cache.release(sequence)
    cache.abort()
    with pytest.raises(SequenceClosedError):
        cache.release(sequence)
    only_the_tree_holds(cache)


def test_02_a_block_freed_twice_in_one_list() -> None:
    cache = make_cache()
    table = cache.pool.allocate(1)
    with pytest.raises(CacheInvariantError, match="double free"):
        cache.pool.release(table + table)
    assert cache.pool.refs[table[0]] == 1


def test_03_two_live_requests_with_one_prompt() -> None:
    cache = make_cache()
    store = FakeStore(cache)
    twins = [cache.acquire([*A, *B, 5]) for _ in range(3)]
    for twin in twins:
        store.run([], [write_of(cache, twin, 0, 9)])
        cache.commit(twin, include_open=True)
        cache.check()
    assert twins[0].table == twins[1].table == twins[2].table
    store.poison_free()
    for twin in twins:
        store.verify(twin)
        cache.release(twin)
        cache.check()
    only_the_tree_holds(cache)


def test_04_insert_longer_then_match_again_then_finish() -> None:
    cache = make_cache()
    short = compute(cache, A + B)
    longer = compute(cache, A + B + C + [9])
    again = cache.acquire(A + B + C)
    short.extend(C)
    cache.commit(short)
    assert short.table == again.table
    for sequence in (longer, short, again):
        cache.release(sequence)
        cache.check()
    only_the_tree_holds(cache)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_05_a_prefix_of_exactly_a_block(blocks: int, more: int, size: int) -> None:
    length = blocks * size + more
    if not length:
        return
    cache = make_cache(block_size=size)
    store = FakeStore(cache)
    first = cache.acquire([1] * length)
    store.run([], [write_of(cache, first, 0, length)])
    cache.commit(first, include_open=True)
    cache.release(first)
    second = cache.acquire([1] * (blocks * size) + [2])
    store.run(cache.take_copies())
    assert second.num_cached == min(length, blocks * size)
    store.verify(second)
    cache.check()


def test_05_a_full_hit_recomputes_nothing() -> None:
    said: list[Any] = []
    cache = make_cache(events=said.append)
    cached(cache, A + B)
    sequence = cache.acquire(A + B)
    assert sequence.num_cached == 8
    cache.release(sequence)
    cached(cache, A + B + C)
    root = namespace_hash(())
    chain = chain_hashes(root, np.array(A + B + C, np.int32).tobytes(), 16)
    assert [name for event in said for name in event.hashes] == chain


def test_06_a_chunk_that_was_shown_then_aborted() -> None:
    cache = make_cache()
    store = FakeStore(cache)
    sequence = cache.acquire(A + B)
    cache.commit(sequence, 4, pending=True)
    waiting = cache.acquire(A + C)
    assert waiting.num_cached == 4
    cache.abort()
    assert cache.match(A + B) == 0
    assert waiting.withdrawn
    store.verify(waiting)
    cache.release(sequence)
    cache.release(waiting)
    only_the_tree_holds(cache)


def test_06_kv_that_turned_out_to_be_garbage() -> None:
    cache = make_cache()
    sequence = compute(cache, A + B)
    reader = cache.acquire(A + B + C)
    cache.withdraw(sequence, 0)
    assert cache.match(A) == 0
    cache.release(reader)
    assert cache.match(A) == 0
    cache.release(sequence)
    only_the_tree_holds(cache)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("a", "bc"), ("ab", "c")),
        (("lora",), ("lora", "")),
        (("lora", ""), ("", "lora")),  # an adapter's name is no salt
        (("a", "b"), ("a/b",)),
        ((), ("",)),
    ],
)
def test_07_namespaces_are_not_concatenated(left: tuple[str, ...], right: tuple[str, ...]) -> None:
    cache = make_cache()
    cached(cache, A + B, namespace=left)
    assert cache.match(A + B, right) == 0
    assert cache.match(A + B, left) == 8
    assert namespace_hash(left) != namespace_hash(right)


def test_07_events_name_blocks_with_their_namespace() -> None:
    said: list[Any] = []
    cache = make_cache(events=said.append)
    cached(cache, A, namespace=("salt",))
    cached(cache, A)
    assert said[0].hashes != said[1].hashes
    assert said[0].namespace == ("salt",)


@pytest.mark.parametrize("block_hash", [lambda block: sum(block) & 0xFF, lambda block: 0])
def test_08_hash_collisions(block_hash: Callable[[bytes], int]) -> None:
    rng = random.Random(8)
    cache = make_cache(num_blocks=400, block_size=2, block_hash=block_hash)
    shown: list[list[int]] = []
    for _ in range(1000):
        base = rng.choice(shown)[: rng.randint(0, 8)] if shown else []
        prompt = base + [rng.randrange(1000) for _ in range(rng.randint(1, 6))]
        sequence = cache.acquire(prompt)
        path = sequence.node.path() if sequence.node is not None else []
        tokens = b"".join(bytes(node.tokens) for node in path)
        full = sequence.num_tree_blocks * 8
        assert tokens[:full] == sequence.data[:full], "another prompt's KV"
        cache.commit(sequence)
        cache.release(sequence)
        shown = [*shown[-40:], prompt]
    cache.check()


def test_10_the_last_node_itself_is_held() -> None:
    cache = make_cache(num_blocks=4)
    cached(cache, A + B)
    sequence = cache.acquire(A + B)
    with pytest.raises(OutOfBlocksError):
        cache.acquire(C + D + [9])
    assert cache.match(A + B) == 8
    cache.release(sequence)
    cache.release(cache.acquire(C + D + [9]))
    only_the_tree_holds(cache)


def test_10_nothing_stays_held_that_a_match_ended_inside() -> None:
    cache = make_cache()
    cached(cache, A + B + C)
    sequence = cache.acquire(A + B[:2])
    assert cache.stats().held_and_cached == 1
    cache.release(sequence)
    assert cache.stats().held_and_cached == 0
    assert all(node.pins == 0 for node in cache.tree.nodes())
    only_the_tree_holds(cache)


def test_11_a_pool_that_is_exactly_full() -> None:
    cache = make_cache(num_blocks=3)
    cached(cache, A + B + C)
    assert cache.pool.num_free == 0
    sequence = cache.acquire([*A, *B, 9])
    assert sequence.num_cached == 8
    cache.check()
    assert sequence.table[:2].tolist() == [0, 1]
    cache.release(sequence)
    cached(cache, A + B + D)
    assert cache.match(A + B + D) == 12


def test_12_a_failed_admission_leaves_nothing_to_go_stale() -> None:
    cache = make_cache(num_blocks=4)
    store = FakeStore(cache)
    cached(cache, A + B)
    blocker = cache.acquire([8] * 8)
    with pytest.raises(OutOfBlocksError):
        cache.acquire(A + B + C)
    cache.release(blocker)
    cache.allocator.release(cache.allocator.allocate(4))
    sequence = cache.acquire(A + B + C)
    assert sequence.num_cached == 0
    store.verify(sequence)
    cache.check()


def test_13_forks_release_what_they_retained() -> None:
    cache = make_cache(num_blocks=40)
    first = compute(cache, [*A, *B, 5], include_open=True)
    branches = [first]
    for number in range(12):
        branches.append(branches[number % len(branches)].fork())
        branches[-1].append(number)
        cache.check()
    random.Random(0).shuffle(branches)
    for branch in branches:
        cache.release(branch)
        cache.check()
    only_the_tree_holds(cache)


@pytest.mark.parametrize("again", [1, 5])
def test_15_a_retry_is_not_counted(again: int) -> None:
    cache = make_cache(num_blocks=3)
    cached(cache, A)
    blocker = cache.acquire([8] * 8)
    before = (cache.counters.queries, cache.counters.query_tokens, cache.counters.hit_tokens)
    clock = cache.tree.clock
    for _ in range(again):
        with pytest.raises(OutOfBlocksError):
            cache.acquire(A + B + C)
    now = (cache.counters.queries, cache.counters.query_tokens, cache.counters.hit_tokens)
    assert (now, cache.tree.clock) == (before, clock)
    cache.release(blocker)
    cache.release(cache.acquire(A + B))
    cache.release(cache.acquire(A + B, resumed=True))
    assert cache.counters.hit_tokens == 4


def test_16_one_off_requests_go_before_the_hot_prefix() -> None:
    cache = make_cache(num_blocks=8)
    cached(cache, A + B)
    for number in range(30):
        cached(cache, [50 + number] * 8, retention=EPHEMERAL)
    assert cache.match(A + B) == 8


def test_16_a_partial_match_does_not_refresh_the_rest() -> None:
    cache = make_cache(num_blocks=4)
    cached(cache, A + B)
    cached(cache, C)
    cached(cache, A)
    cache.allocator.release(cache.allocator.allocate(2))
    assert (cache.match(A + B), cache.match(C)) == (4, 4)


def test_21_split_nodes_own_their_arrays() -> None:
    cache = make_cache(num_blocks=600, block_size=16)
    cached(cache, [1] * 8000)
    (node,) = cache.tree.nodes()
    cache.release(cache.acquire([1] * 16))
    upper, lower = sorted(cache.tree.nodes(), key=lambda n: n.start)
    assert lower is node
    assert (len(upper.tokens), len(upper.blocks)) == (64, 1)
    assert sys.getsizeof(upper.tokens) < 200
    assert sys.getsizeof(upper.blocks) < 200
    assert isinstance(upper.tokens, bytearray)


def test_21_evicted_nodes_are_not_kept_alive() -> None:
    cache = make_cache(num_blocks=3, eviction="priority")
    gc.collect()
    before = sum(type(thing) is RadixNode for thing in gc.get_objects())
    for number in range(200):
        hint = Retention(priority=number % 3, expires_at=1e12)
        cached(cache, [number] * 8, retention=hint)
        cache.release(cache.acquire([number] * 4))
    gc.collect()
    after = sum(type(thing) is RadixNode for thing in gc.get_objects())
    assert after - before <= 5, "nodes that left the tree are still there"
    assert len(cache.tree.queue._expiry) <= 3


@pytest.mark.parametrize("stage", range(7))
def test_22_cancelled_at_every_stage(stage: int) -> None:
    cache = make_cache(num_blocks=24)
    cached(cache, A)

    def stages(sequence: Sequence) -> list[Callable[[], Any]]:
        return [
            lambda: None,
            lambda: cache.commit(sequence, max(sequence.num_computed, 6), pending=True),
            cache.settle,
            lambda: cache.commit(sequence, include_open=True),
            lambda: sequence.append(7),
            lambda: cache.commit(sequence, pending=True, include_open=True),
            cache.settle,
        ]

    for _ in range(3):
        sequence = cache.acquire([*A, *B, 5, 6])
        for action in stages(sequence)[: stage + 1]:
            action()
            cache.check()
        cache.release(sequence)
        cache.settle()
        cache.check()
        assert not cache.sequences
    only_the_tree_holds(cache)


def test_22_two_thousand_requests_of_which_a_third_are_cancelled() -> None:
    rng = random.Random(22)
    cache = make_cache(num_blocks=40)
    live: list[Sequence] = []
    for _ in range(2000):
        try:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 24))]
            live.append(cache.acquire(prompt))
            cache.commit(live[-1], rng.randint(live[-1].num_computed, len(prompt)), pending=True)
        except OutOfBlocksError:
            pass
        if rng.random() < 0.3 and live:
            cache.release(live.pop(rng.randrange(len(live))))
        (cache.abort if rng.random() < 0.05 else cache.settle)()
        for sequence in [s for s in live if s.withdrawn or rng.random() < 0.4]:
            live.remove(sequence)
            cache.release(sequence)
    for sequence in live:
        cache.release(sequence)
    assert cache.stats().nodes > 0
    only_the_tree_holds(cache)
