"""Residency: seconds beside the tree's logical time."""

from __future__ import annotations

from helpers import cached, compute, make_cache

from radixkv.cache import PrefixCache
from radixkv.cache.residency import BOUNDS
from radixkv.cache.stats import Histogram

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


class Watch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def watched(num_blocks: int) -> tuple[PrefixCache, Watch]:
    cache, watch = make_cache(num_blocks=num_blocks), Watch()
    cache.measure_residency().clock = watch
    return cache, watch


def values(histogram: Histogram) -> dict[float, int]:
    """Counts by their upper bounds, where there are any."""
    return {bound: count for bound, count in zip(BOUNDS, histogram.counts, strict=False) if count}


def test_a_histogram_puts_a_value_below_the_first_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2):
        histogram.observe(value)
    histogram.observe(3, 5)
    assert (histogram.counts, histogram.total, histogram.count) == ([2, 2, 5], 20, 9)
    copy = histogram.copy()
    histogram.observe(1)
    assert (copy.counts, copy.total) == ([2, 2, 5], 20)


def test_a_reuse_gap_is_counted_for_each_block_that_is_found_again() -> None:
    cache, watch = watched(8)
    residency = cache.measure_residency()
    first = compute(cache, A + B + C)
    watch.now += 4
    second = cache.acquire(A + B + D)
    assert values(residency.reuse_gap) == {5: 2}
    assert residency.reuse_gap.total == 8
    watch.now += 20
    cache.release(second)
    watch.now += 50
    # Held until 50 seconds ago: A and B by the second, C by nobody since 74 seconds.
    third = cache.acquire([*A, *B, *C])
    assert values(residency.reuse_gap) == {5: 2, 60: 2, 120: 1}
    assert residency.reuse_gap.total == 8 + 2 * 50 + 74
    cache.release(third)
    cache.release(first)
    cache.check()


def test_a_use_while_the_last_user_still_runs_has_a_gap_too() -> None:
    cache, watch = watched(8)
    residency = cache.measure_residency()
    for _ in range(3):
        compute(cache, A)
        watch.now += 4
    assert (values(residency.reuse_gap), residency.reuse_gap.total) == ({5: 2}, 8)


def test_idle_time_is_counted_for_each_block_that_goes() -> None:
    cache, watch = watched(3)
    residency = cache.measure_residency()
    cached(cache, A + B + C)
    watch.now += 20
    cache.release(cache.acquire([*D, 4]))
    assert (values(residency.idle), residency.idle.total) == ({30: 2}, 40)
    assert values(residency.lifetime) == {30: 2}


def test_lifetime_and_idle_time_of_what_is_evicted() -> None:
    cache, watch = watched(3)
    residency = cache.measure_residency()
    sequence = cache.acquire([*A, *B, 9])
    cache.commit(sequence, 4)
    watch.now += 20
    cache.commit(sequence, include_open=True)
    watch.now += 2
    cache.release(sequence)
    watch.now += 200
    # The open block has no times, B was stored 202 seconds ago, A 222.
    cache.release(cache.acquire(C + D))
    assert cache.counters.blocks_evicted == 2
    assert cache.counters.tokens_evicted == 4 + 1
    assert residency.lifetime.total == 202
    assert (residency.idle.total, residency.idle.count) == (200, 1)
    cache.release(cache.acquire(C + D + [7]))
    assert cache.counters.tokens_evicted == 4 + 1 + 4
    assert residency.lifetime.total == 202 + 222
    assert (residency.idle.total, residency.idle.count) == (400, 2)


def test_of_what_was_cached_before_nothing_is_known() -> None:
    cache = make_cache(num_blocks=2)
    cached(cache, A + B)
    assert [node.used_at for node in cache.tree.nodes()] == [0]
    residency = cache.measure_residency()
    assert residency is cache.measure_residency()
    cache.release(cache.acquire(A))
    assert residency.reuse_gap.count == 0
    cache.release(cache.acquire(C + D))
    assert residency.lifetime.count == 0
    # B was not used since.
    assert residency.idle.count == 1
