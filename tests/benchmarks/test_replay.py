"""Traces, the optimum that knows the future, and the cache beside it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import optimum
import pytest
import replay
import traces
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", traces.NAMES)
def test_requests_share_what_the_trace_says(name: str) -> None:
    trace = traces.load(name, 300)
    made = list(trace.requests())
    assert len(made) == 300
    for (_, _, parent, shared, prompt, _, _), request in zip(trace.rows, made, strict=True):
        assert request.prompt_length == prompt
        if parent < 0:
            continue
        length = min(shared, len(request.tokens))
        theirs, own = made[parent].tokens, request.tokens
        assert made[parent].goes_on
        assert np.array_equal(theirs[:length], own[:length])
        if len(theirs) > length < len(own):
            assert theirs[length] != own[length]


def test_equal_numbers_are_equal_prefixes() -> None:
    sequences = [b"aabbcc", b"aabbdd", b"bbaa", b"aabbccd"]
    ids = optimum.block_ids(sequences, 2)
    assert ids == [[0, 1, 2], [0, 1, 3], [4, 5], [0, 1, 2]]


def test_next_uses() -> None:
    never = optimum.NEVER
    assert optimum.next_uses([[0, 1], [0], [0, 1]]) == [[1, 2], [2], [never, never]]


def test_hits_by_hand() -> None:
    """Two blocks of room: the third prompt's block gives way to the one that comes again."""
    requests = [[0], [1], [2], [0], [1]]
    assert optimum.hits(requests, 2, [1] * 5) == [0, 0, 0, 1, 0]
    assert optimum.hits(requests, 3, [1] * 5) == [0, 0, 0, 1, 1]


def test_what_stands_on_a_block_goes_before_it() -> None:
    """Both blocks come again at the same time: without the first the second would be no hit."""
    assert optimum.hits([[0, 1], [2], [0, 1]], 2, [2, 1, 2]) == [0, 0, 1]


def test_hits_of_the_output_do_not_count() -> None:
    assert optimum.hits([[0, 1], [0, 1]], 2, [2, 1]) == [0, 1]


def test_a_request_larger_than_the_cache_adds_nothing() -> None:
    assert optimum.hits([[0], [0, 1, 2], [0]], 2, [1, 3, 1]) == [0, 1, 1]


def most_hits(requests: list[list[int]], capacity: int) -> int:
    """The most hits of any way to evict, by trying all of them."""
    states = {frozenset[int](): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for cached, so_far in states.items():
            found = 0
            while found < len(blocks) and blocks[found] in cached:
                found += 1
            others = cached - set(blocks)
            room = capacity - len(set(blocks))
            for size in range(min(room, len(others)) + 1):
                for kept in combinations(sorted(others), size):
                    state = frozenset(kept) | set(blocks)
                    after[state] = max(after.get(state, 0), so_far + found)
        states = after
    return max(states.values())


@given(st.lists(st.integers(0, 4), max_size=9), st.integers(1, 3))
def test_with_single_blocks_no_other_choice_is_better(order: list[int], capacity: int) -> None:
    requests = [[block] for block in order]
    found = sum(optimum.hits(requests, capacity, [1] * len(requests)))
    assert found == (most_hits(requests, capacity) if requests else 0)


paths = st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 3], [4], [4, 5]])


@given(st.lists(paths, min_size=1, max_size=7), st.integers(3, 4))
def test_with_whole_prompts_it_is_never_above_the_best_choice(
    requests: list[list[int]], capacity: int
) -> None:
    found = sum(optimum.hits(requests, capacity, list(map(len, requests))))
    assert found <= most_hits(requests, capacity)


def test_no_policy_beats_the_optimum_and_a_hint_helps() -> None:
    trace = traces.load("mtbench101_chat", 250)
    found = replay.measure(trace, 16, (0.1, 1.0), ["lru", "fifo", replay.HINTED])
    small, whole = found["10%"], found["100%"]
    best = small["optimum"]["block_hit_rate"]
    assert 0 < small["lru"]["block_hit_rate"] < small[replay.HINTED]["block_hit_rate"] <= best
    assert small["fifo"]["block_hit_rate"] < best
    # With room for everything all find what there is; the open end of a sequence takes a block.
    assert whole["lru"]["block_hit_rate"] == pytest.approx(
        whole["optimum"]["block_hit_rate"], abs=0.01
    )
    assert small["lru"]["too_large"] == 0
