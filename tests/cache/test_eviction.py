"""Policies, the queue, hints that run out."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest
from helpers import cached, compute, make_cache, shape

from radixkv.cache import EPHEMERAL, FIFO, LRU, EvictionPolicy, PlainLRU, Priority, Retention
from radixkv.cache.eviction import EMPTY_ENTRIES, EvictionQueue
from radixkv.cache.node import RadixNode
from radixkv.cache.policies import POLICIES, Key, make_policy
from radixkv.cache.retention import DEFAULT_RETENTION, priority_at, stronger
from radixkv.errors import ConfigError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def leaf(serial: int, retention: Retention = DEFAULT_RETENTION) -> RadixNode:
    return RadixNode(None, bytearray(4), array("i", [0]), 0, serial, serial, retention)


# -- policies ------------------------------------------------------------------------------------


def test_policies_have_names() -> None:
    assert {"lru": LRU, "plain-lru": PlainLRU, "fifo": FIFO, "priority": Priority} == POLICIES
    assert isinstance(make_policy("fifo"), FIFO)
    own = LRU()
    assert make_policy(own) is own


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'mru' is not one of lru, plain-lru, fifo, priority"):
        make_cache(eviction="mru")


def test_a_hint_that_runs_out_while_its_leaf_is_put_in_is_not_for_ever() -> None:
    """Time goes on between two looks at the clock."""
    readings = iter([99.0, *[101.0] * 20])
    queue = EvictionQueue(Priority(), lambda: next(readings))
    hinted, plain = leaf(0, Retention(priority=3, expires_at=100.0)), leaf(1)
    queue.put(hinted)
    queue.put(plain)
    assert queue.victim() is hinted


def test_a_policy_must_have_a_key() -> None:
    with pytest.raises(TypeError, match="EvictionPolicy must define key"):
        EvictionPolicy().key(leaf(0), 0.0)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [D, B, C, A]),
        ("plain-lru", [B, C, D, A]),
        ("fifo", [A, B, C, D]),
        ("priority", [D, C, A, B]),
    ],
)
def test_who_goes_first(policy: str, order: list[list[int]]) -> None:
    cache = make_cache(num_blocks=4, eviction=policy)
    cached(cache, A)
    cached(cache, B, retention=Retention(priority=3))
    cached(cache, C)
    cached(cache, D, retention=EPHEMERAL)
    cached(cache, A)
    gone = []
    for _ in range(4):
        cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 1))
        cache.check()
        gone.append(
            next(
                tokens for tokens in (A, B, C, D) if tokens not in gone and not cache.match(tokens)
            )
        )
    assert gone == order


class ReversedLRU(EvictionPolicy):
    """Shortest idle first; hits weigh most."""

    name = "reversed"

    def key(self, node: RadixNode, now: float) -> Key:
        return (node.hits, -node.created)


def test_a_policy_of_ones_own() -> None:
    cache = make_cache(num_blocks=3, eviction=ReversedLRU())
    cached(cache, A)
    cached(cache, B)
    cached(cache, C)
    cached(cache, C)
    cache.allocator.release(cache.allocator.allocate(1))
    assert [cache.match(tokens) for tokens in (A, B, C)] == [4, 0, 4]


# -- the queue -----------------------------------------------------------------------------------


def test_a_leaf_is_queued_once() -> None:
    queue = EvictionQueue(LRU())
    node = leaf(1)
    queue.put(node)
    queue.put(node)
    assert len(queue) == 1
    assert queue.victim() is node
    queue.discard(node)
    queue.discard(node)
    assert len(queue) == 0
    assert node.entry is None


@pytest.mark.parametrize(
    ("leaves", "taken", "entries"),
    [
        (10, 10, 10),
        (EMPTY_ENTRIES + 2, EMPTY_ENTRIES, EMPTY_ENTRIES + 2),
        (EMPTY_ENTRIES + 2, EMPTY_ENTRIES + 1, 1),
        (200, 70, 200),
        (200, 100, 200),
        (200, 101, 99),
        (200, 102, 99),
    ],
)
def test_empty_places_are_dropped_when_they_are_most(leaves: int, taken: int, entries: int) -> None:
    queue = EvictionQueue(LRU())
    nodes = [leaf(serial) for serial in range(leaves)]
    for node in nodes:
        queue.put(node)
    for node in nodes[:taken]:
        queue.discard(node)
    assert len(queue._heap) == entries
    assert len(queue) == leaves - taken
    assert queue.nodes() == nodes[taken:]
    if taken < leaves:
        assert queue.victim() is nodes[taken]
        assert len(queue) == leaves - taken


def test_a_use_in_the_meantime_is_noticed() -> None:
    queue = EvictionQueue(LRU())
    nodes = [leaf(serial) for serial in range(4)]
    for node in nodes:
        queue.put(node)
    nodes[0].last_used = 10
    nodes[1].last_used = 9
    assert queue.nodes() == [nodes[2], nodes[3], nodes[1], nodes[0]]
    assert queue.victim() is nodes[2]
    queue.discard(nodes[2])
    queue.discard(nodes[3])
    assert queue.victim() is nodes[1]


def test_a_policy_without_a_steady_order_ends() -> None:
    class Dice(EvictionPolicy):
        name = "dice"
        rolls = iter(range(1000, 0, -1))

        def key(self, node: RadixNode, now: float) -> Key:
            return (next(self.rolls),)

    queue = EvictionQueue(Dice())
    nodes = [leaf(serial) for serial in range(3)]
    for node in nodes:
        queue.put(node)
    assert queue.victim() in nodes
    assert len(queue) == 3


def test_equal_keys_go_by_age() -> None:
    queue = EvictionQueue(LRU())
    nodes = [leaf(serial) for serial in (2, 1, 3)]
    for node in nodes:
        node.last_used = 5
        queue.put(node)
    assert [node.serial for node in queue.nodes()] == [1, 2, 3]
    assert queue.victim().serial == 1


def test_no_clock_is_read_for_a_hint_that_never_runs_out() -> None:
    class Told(EvictionPolicy):
        name = "told"

        def __init__(self) -> None:
            self.times: list[float] = []

        def key(self, node: RadixNode, now: float) -> Key:
            self.times.append(now)
            return (node.last_used,)

    policy = Told()
    queue = EvictionQueue(policy, Clock())
    lasting, passing = leaf(1), leaf(2, Retention(priority=1, expires_at=110.0))
    queue.put(lasting)
    assert queue.victim() is lasting
    assert policy.times == [0.0, 0.0]
    queue.discard(lasting)
    queue.put(passing)
    assert queue.victim() is passing
    assert policy.times[2:] == [100.0, 100.0]


def test_a_priority_runs_out() -> None:
    clock = Clock()
    queue = EvictionQueue(Priority(), clock)
    short, plain = leaf(1, Retention(priority=5, expires_at=110.0)), leaf(2)
    queue.put(short)
    queue.put(plain)
    assert queue.victim() is plain
    clock.now = 109.9
    assert queue.victim() is plain
    clock.now = 110.0
    assert queue.victim() is short
    assert queue.nodes() == [short, plain]


def test_a_negative_priority_runs_out_too() -> None:
    clock = Clock()
    queue = EvictionQueue(Priority(), clock)
    low, plain = leaf(2, Retention(priority=-5, expires_at=110.0)), leaf(1)
    queue.put(low)
    queue.put(plain)
    assert queue.victim() is low
    clock.now = 111.0
    assert queue.victim() is plain


def test_what_has_run_out_before_counts_for_nothing() -> None:
    clock = Clock()
    queue = EvictionQueue(Priority(), clock)
    late, plain = leaf(1, Retention(priority=5, expires_at=99.0)), leaf(2)
    queue.put(plain)
    queue.put(late)
    assert queue.victim() is late
    assert not queue._expiring


def test_two_hints_that_run_out_at_once() -> None:
    clock = Clock()
    queue = EvictionQueue(Priority(), clock)
    nodes = [leaf(serial, Retention(priority=serial, expires_at=110.0)) for serial in (1, 2)]
    for node in nodes * 2:
        queue.put(node)
    clock.now = 120.0
    assert queue.victim() is nodes[0]


def test_the_record_of_hints_does_not_grow_and_keeps_nobody_alive() -> None:
    clock = Clock()
    queue = EvictionQueue(Priority(), clock)
    node = leaf(1, Retention(priority=1, expires_at=1e9))
    for last_used in range(100):
        node.last_used = last_used
        queue.put(node)
    assert len(queue._expiring) == len(queue._expiry) == 1
    node.retention = Retention(priority=1, expires_at=2e9)
    queue.put(node)
    assert [expiry[0] for expiry in queue._expiring] == [2e9]
    queue.discard(node)
    assert not queue._expiring
    assert not queue._expiry


def test_a_priority_of_the_cache_runs_out() -> None:
    cache = make_cache(num_blocks=2, eviction="priority")
    clock = cache.tree.queue.clock = Clock()
    cached(cache, A, retention=Retention(priority=1, expires_at=110.0))
    cached(cache, B)
    clock.now = 111.0
    cached(cache, C)
    assert cache.match(A) == 0
    assert cache.match(B) == 4


# -- hints ---------------------------------------------------------------------------------------


ENDLESS = "an ephemeral sequence has no priority and no time to live"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"ephemeral": True, "priority": 1}, ENDLESS),
        ({"ephemeral": True, "expires_at": 5.0}, ENDLESS),
        ({"expires_at": math.nan}, "expires_at must be a reading of time.monotonic, not NaN"),
    ],
    ids=str,
)
def test_a_hint_makes_sense(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Retention(**bad)


def test_a_hint_for_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 50.0)
    assert Retention.for_seconds(7.5) == Retention(priority=1, expires_at=57.5)
    assert Retention.for_seconds(1, priority=4).priority == 4
    for seconds in (0, -1, math.nan):
        with pytest.raises(ConfigError, match="above 0 seconds"):
            Retention.for_seconds(seconds)


def test_a_priority_counts_until_its_time_has_come() -> None:
    hint = Retention(priority=3, expires_at=10.0)
    assert [priority_at(hint, now) for now in (9.9, 10.0, 10.1)] == [3, 0, 0]
    assert priority_at(Retention(priority=2), 1e12) == 2


def test_the_stronger_of_two_hints() -> None:
    plain, high = Retention(), Retention(priority=2)
    short, long = Retention(priority=2, expires_at=5.0), Retention(priority=2, expires_at=9.0)
    assert stronger(EPHEMERAL, plain, 0.0) is stronger(plain, EPHEMERAL, 0.0) is plain
    assert stronger(plain, high, 0.0) is stronger(high, plain, 0.0) is high
    assert stronger(short, long, 0.0) is long
    assert stronger(Retention(priority=9, expires_at=5.0), high, 6.0) is high, "9 has run out"


def test_a_hint_on_release_speaks_of_ones_own_blocks() -> None:
    cache = make_cache()
    cached(cache, A)
    cached(cache, A + B + C, end=EPHEMERAL)
    assert shape(cache) == [(0, 4), (1, 8)]
    nodes = {node.start: node for node in cache.tree.nodes()}
    assert not nodes[0].retention.ephemeral
    assert nodes[1].retention.ephemeral


def test_a_hint_splits_where_ones_own_begins() -> None:
    cache = make_cache()
    first = compute(cache, A)
    second = cache.fork(first)
    cache.release(first)
    second.extend(B)
    cache.commit(second)
    assert shape(cache) == [(0, 8)]
    cache.release(second, EPHEMERAL)
    cache.check()
    assert {n.start: n.retention.ephemeral for n in cache.tree.nodes()} == {0: False, 1: True}


def test_what_others_used_is_not_forgotten() -> None:
    cache = make_cache()
    first = compute(cache, A + B)
    cached(cache, A + B + C)
    cache.release(first, EPHEMERAL)
    assert not any(node.retention.ephemeral for node in cache.tree.nodes())


def test_what_others_hold_is_not_forgotten() -> None:
    cache = make_cache()
    first = compute(cache, A + B)
    second = first.fork()
    cache.release(first, EPHEMERAL)
    assert not any(node.retention.ephemeral for node in cache.tree.nodes())
    cache.release(second, EPHEMERAL)
    assert not any(node.retention.ephemeral for node in cache.tree.nodes()), "not its own"


def test_an_open_end_that_a_branch_holds_is_not_forgotten() -> None:
    cache = make_cache()
    first = compute(cache, [*A, 7], include_open=True)
    second = compute(cache, [*A, 8], include_open=True)
    third = second.fork()
    cache.release(second, EPHEMERAL)
    assert not any(node.retention.ephemeral for node in cache.tree.nodes())
    cache.release(third)
    cache.release(first)
    cache.check()


def test_only_what_was_not_used_is_forgotten_of_an_edge() -> None:
    cache = make_cache()
    cached(cache, A + B)
    cached(cache, A + B + C, end=EPHEMERAL)
    cached(cache, A + B + C + [5, 6], include_open=True)
    marks = {node.start: node.retention.ephemeral for node in cache.tree.nodes()}
    assert marks == {0: False, 2: False}
    cache.release(cache.acquire(A + B + C + [5, 6]), EPHEMERAL)
    assert not any(node.retention.ephemeral for node in cache.tree.nodes())


def test_what_is_forgotten_goes_before_what_is_older() -> None:
    cache = make_cache()
    cached(cache, C)
    cached(cache, A, end=EPHEMERAL)
    assert cache.tree.queue.victim().tokens[0] == 1


def test_a_parent_that_another_holds_is_not_forgotten() -> None:
    cache = make_cache()
    first = compute(cache, A)
    second = first.fork()
    first.extend(C)
    cache.commit(first)
    cache.release(first, EPHEMERAL)
    marks = {node.start: node.retention.ephemeral for node in cache.tree.nodes()}
    assert marks == {0: False, 1: True}
    cache.release(second)


def test_all_that_is_ones_own_is_forgotten() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    sequence.retention = Retention(priority=1)
    sequence.extend(B)
    cache.commit(sequence)
    cache.release(sequence, EPHEMERAL)
    cache.check()
    assert [node.retention for node in cache.tree.nodes()] == [EPHEMERAL, EPHEMERAL]


def test_an_open_end_set_apart_is_forgotten_with_its_branch() -> None:
    cache = make_cache()
    cached(cache, [*A, 7], include_open=True)
    second = compute(cache, [*A, 7, 8], include_open=True)
    third = compute(cache, [*A, 9])
    assert shape(cache) == [(0, 4), (1, 2)]
    cache.release(second, EPHEMERAL)
    marks = {node.start: node.retention.ephemeral for node in cache.tree.nodes()}
    assert marks == {0: False, 1: True}
    cache.release(third)
    cache.check()


def test_a_branch_that_lost_is_forgotten_with_its_open_end() -> None:
    cache = make_cache(num_blocks=8)
    first = compute(cache, A)
    loser = first.fork()
    first.extend(B)
    cache.commit(first)
    loser.extend([*C, 9])
    cache.commit(loser, include_open=True)
    cache.release(loser, EPHEMERAL)
    cache.release(first)
    cache.check()
    assert cache.tree.queue.victim().tokens[0] == 3
    cache.allocator.release(cache.allocator.allocate(cache.pool.num_free + 2))
    assert (cache.match(A + B), cache.match(A + C)) == (8, 4)


def test_a_parent_of_something_wanted_is_not_forgotten() -> None:
    cache = make_cache()
    first = compute(cache, A)
    second = first.fork()
    second.extend(B)
    cache.commit(second)
    cache.release(second)
    first.extend(C)
    cache.commit(first)
    cache.release(first, EPHEMERAL)
    cache.check()
    marked = [node for node in cache.tree.nodes() if node.retention.ephemeral]
    assert [node.tokens[0] for node in marked] == [3]


def test_a_stronger_hint_on_release_lets_all_its_blocks_stay() -> None:
    cache = make_cache(eviction="priority")
    cached(cache, A)
    cached(cache, A + B, end=Retention(priority=2))
    cached(cache, A)
    assert [node.retention.priority for node in cache.tree.nodes()] == [2, 2]
    cached(cache, A + B, end=Retention(priority=1))
    assert [node.retention.priority for node in cache.tree.nodes()] == [2, 2]


def test_a_hint_on_release_holds_for_the_whole_path() -> None:
    cache = make_cache(eviction="priority")
    cached(cache, A + C)
    sequence = compute(cache, A + B)
    cache.release(sequence, Retention(priority=2))
    hints = {node.tokens[0]: node.retention.priority for node in cache.tree.nodes()}
    assert hints == {1: 2, 2: 2, 3: 0}


def test_both_halves_of_an_edge_know_what_was_used_of_them() -> None:
    cache = make_cache()
    cached(cache, A + B + C)
    cached(cache, A + B)
    cached(cache, A)
    used = {node.start: (len(node.blocks), node.num_used) for node in cache.tree.nodes()}
    assert used == {0: (1, 1), 1: (1, 1), 2: (1, 0)}


def test_using_ephemeral_blocks_makes_them_wanted() -> None:
    cache = make_cache()
    cached(cache, A, retention=EPHEMERAL)
    assert [n.retention for n in cache.tree.nodes()] == [EPHEMERAL]
    cached(cache, A)
    assert [n.retention for n in cache.tree.nodes()] == [DEFAULT_RETENTION]
    assert cache.tree.queue.nodes() == list(cache.tree.nodes())


def test_an_edge_does_not_grow_under_another_hint() -> None:
    cache = make_cache()
    sequence = compute(cache, A)
    sequence.retention = EPHEMERAL
    sequence.extend(B)
    cache.commit(sequence)
    assert shape(cache) == [(0, 4), (1, 4)]
    sequence.extend(C)
    cache.commit(sequence)
    assert shape(cache) == [(0, 4), (1, 8)]
    sequence.retention = DEFAULT_RETENTION
    sequence.extend([7])
    cache.commit(sequence, include_open=True)
    assert shape(cache) == [(0, 4), (1, 8), (3, 1)]
