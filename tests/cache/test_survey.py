"""What a tree and its pool look like: bounded, and true to the laws."""

from __future__ import annotations

import random

import numpy as np
from helpers import cached, compute, make_cache

from radixkv.cache import PrefixCache
from radixkv.cache.render import count_holders
from radixkv.cache.survey import survey_pool, survey_tree, tail_of
from radixkv.errors import OutOfBlocksError

A, B, C, D = ([letter] * 4 for letter in range(1, 5))


def test_the_last_used_are_shown_and_the_rest_is_counted() -> None:
    cache = make_cache(num_blocks=32)
    for end in (B, C, D):
        cache.release(compute(cache, A + end))
    cache.release(cache.acquire(A + B))
    view = survey_tree(cache, 2)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\1", b"\2"]
    assert view.num_hidden == {view.nodes[0].serial: 2}
    assert view.holders == {}


def test_what_is_held_is_shown_before_what_was_used_later() -> None:
    cache = make_cache(num_blocks=32)
    held = [compute(cache, A + B), compute(cache, A + B), compute(cache, A + C)]
    cache.release(compute(cache, D))
    view = survey_tree(cache, 3)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\1", b"\2", b"\3"]
    serials = [node.serial for node in view.nodes]
    assert view.holders == dict(zip(serials, [3, 2, 1], strict=True))
    assert tail_of(held[0], 2) == bytes([2, 0, 0, 0] * 2)
    for sequence in held:
        cache.release(sequence)


def test_a_path_is_shown_whole_or_not_at_all() -> None:
    cache = make_cache(num_blocks=32)
    short, long = compute(cache, D), compute(cache, A + B + C)
    cache.release(compute(cache, A + D))
    cache.release(compute(cache, A + B + D))
    view = survey_tree(cache, 3)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\4", b"\1", b"\4"]
    assert view.num_hidden == {view.nodes[1].serial: 1}
    for sequence in (short, long):
        cache.release(sequence)


def test_an_open_block_that_nobody_holds_is_no_better_than_others() -> None:
    cache = make_cache(num_blocks=32)
    cached(cache, [9], include_open=True)
    cached(cache, A)
    view = survey_tree(cache, 1)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\1"]
    held = compute(cache, [9], include_open=True)
    view = survey_tree(cache, 1)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\x09"]
    assert view.holders == {view.nodes[0].serial: 1}
    cache.release(held)
    assert survey_tree(cache, 2).holders == {}


def test_no_more_leaves_are_looked_at_than_may_be_shown() -> None:
    """Else a tree of many deep leaves would be walked through for one shallow one."""
    cache = make_cache(num_blocks=32)
    cached(cache, [8] * 4)
    for end in (B, C):
        cached(cache, A + B + end)
        cached(cache, A + C + end)
    cached(cache, D)
    view = survey_tree(cache, 3)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\4"]
    view = survey_tree(cache, 4)
    assert [bytes(node.tokens[:1]) for node in view.nodes] == [b"\4", b"\1", b"\3", b"\3"]


def test_of_leaves_that_were_used_at_once_the_older_are_shown() -> None:
    cache = make_cache(num_blocks=64)
    sequence = compute(cache, A)
    for number in range(40):
        sequence.truncate(4)
        sequence.extend([number] * 4)
        cache.commit(sequence)
    sequence.truncate(4)
    assert len({node.last_used for node in cache.tree.queue.leaves()}) == 1
    cached(cache, [99] * 4)
    shown = survey_tree(cache, 32).nodes
    assert [node.tokens[0] for node in shown] == [1, 99, *range(30)]
    cache.release(sequence)


def test_an_empty_cache_has_nothing_to_show() -> None:
    cache = make_cache(num_blocks=4)
    assert survey_tree(cache, 10) == ([], {}, {})
    pool = survey_pool(cache)
    assert (pool.tables.tolist(), pool.tables.dtype) == ([0] * 4, np.int64)
    assert not pool.cached.any()


def check_survey(cache: PrefixCache) -> None:
    everything = {node.serial: node for node in cache.tree.nodes()}
    view = survey_tree(cache, 10_000)
    assert {node.serial for node in view.nodes} == everything.keys()
    assert view.num_hidden == {}
    holders = count_holders(cache.tree)
    seen = set()
    for node in view.nodes:
        parent = node.parent
        assert parent is not None
        assert parent.parent is None or parent.serial in seen
        seen.add(node.serial)
        assert view.holders.get(node.serial, 0) == holders[node.serial]
    pool, stats = survey_pool(cache), cache.stats()
    held = pool.tables > 0
    assert int((~held & ~pool.cached).sum()) == stats.free
    assert int((held & ~pool.cached).sum()) == stats.held_only
    assert int((pool.cached & ~held).sum()) == stats.cached_only
    assert int((pool.cached & held).sum()) == stats.held_and_cached
    for limit in (1, 3, 7):
        part = survey_tree(cache, limit)
        assert len(part.nodes) <= limit
        for node in part.nodes:
            children = [child.serial for child in node.children or ()]
            shown = sum(child in {its.serial for its in part.nodes} for child in children)
            assert part.num_hidden.get(node.serial, 0) == len(children) - shown


def test_it_agrees_with_the_tree_and_the_pool_whatever_has_happened() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        size = rng.choice([1, 2, 3])
        cache = make_cache(num_blocks=rng.choice([9, 30]), block_size=size)
        live = []
        for _ in range(60):
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4 * size))]
            try:
                live.append(cache.acquire(tokens, rng.choice([(), ("a",)])))
                cache.commit(live[-1], include_open=rng.random() < 0.5)
                if rng.random() < 0.3:
                    live.append(cache.fork(live[-1]))
            except OutOfBlocksError:
                pass
            while live and rng.random() < 0.5:
                cache.release(live.pop(rng.randrange(len(live))))
            check_survey(cache)
        for sequence in live:
            cache.release(sequence)
