"""Steps in which the same rows go on are made from the one before: they give what others give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake import check_over, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.decoding import SamplingParams
from radixkv.engine import Engine
from radixkv.engine.decodes import Decodes

PLAIN = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def forget(engine: Engine) -> None:
    """Let the next step be made as if there had been none before."""
    engine.scheduler._decodes = Decodes([], [], None)
    engine.scheduler._alone = False
    engine.runner._last = None


def run(script: list[tuple[Any, ...]], block_size: int, num_blocks: int, *, anew: bool) -> Any:
    """All that a script's steps gave, and what they left."""
    engine = make_engine(num_blocks, block_size, max_num_seqs=6, max_num_batched_tokens=9)
    seen: list[Any] = []
    added = 0

    def step() -> None:
        if anew:
            forget(engine)
        seen.append(engine.step())
        engine.cache.check()
        seen.append(engine.cache.stats())
        seen.append([s.block_table.tolist() for s in engine.cache.sequences.values()])

    for action, *arguments in script:
        if action == "add":
            prompt, params = arguments
            engine.add_request(prompt, params, request_id=str(added))
            added += 1
        elif action == "abort" and engine.requests:
            engine.abort(list(engine.requests)[arguments[0] % len(engine.requests)])
        elif action == "preempt" and engine.scheduler.running:
            running = engine.scheduler.running
            engine.scheduler.requeue(running[arguments[0] % len(running)])
        elif action == "step":
            for _ in range(arguments[0]):
                step()
    while engine.has_work:
        step()
    counters = replace(engine.counters, steps_grown=0)
    grown = engine.counters.steps_grown
    check_over(engine)
    return seen, counters, grown


prompts = st.lists(st.integers(0, 4), min_size=1, max_size=9)
kinds = st.sampled_from(
    [
        PLAIN,
        PLAIN,
        replace(PLAIN, ignore_eos=False),
        replace(PLAIN, temperature=0.9, seed=3, top_p=0.9),
        replace(PLAIN, n=3, temperature=1, seed=4),
        replace(PLAIN, logprobs=2),
        replace(PLAIN, min_tokens=4, ignore_eos=False, stop_token_ids=[2]),
        replace(PLAIN, frequency_penalty=1.0),
        replace(PLAIN, n=1, best_of=2, temperature=1, seed=5),
    ]
)
actions = st.one_of(
    st.tuples(st.just("add"), prompts, kinds),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("preempt"), st.integers(0, 9)),
)


@settings(max_examples=120, deadline=None)
@given(
    script=st.lists(actions, min_size=4, max_size=16),
    block_size=st.integers(1, 4),
    num_blocks=st.sampled_from([48, 80]),
)
def test_going_on_and_making_anew_give_the_same(
    script: list[tuple[Any, ...]], block_size: int, num_blocks: int
) -> None:
    """Rows come, leave, fork, are preempted and cross the edges of blocks."""
    found, counters, _ = run(script, block_size, num_blocks, anew=False)
    expected, others, grown = run(script, block_size, num_blocks, anew=True)
    assert grown == 0
    assert found == expected
    assert counters == others


def test_the_same_rows_are_taken_up_again() -> None:
    """What is known of rows and samplers is kept for as long as the same branches decode."""
    engine = make_engine()
    for start in range(3):
        engine.add_request([start, 1, 2], PLAIN)
    engine.step()
    engine.step()
    decodes = engine.scheduler._decodes
    batch = decodes.sampling()
    for turn in range(1, 6):
        deltas = engine.step()
        assert engine.scheduler._decodes is decodes
        assert decodes.sampling() is batch
        assert decodes.turn == turn
        assert [row.stop for row in decodes.rows] == decodes.stops.tolist() == [4 + turn] * 3
        assert [delta.token_id for delta in deltas] == [
            branch.stream.token_ids[-1] for branch in decodes.branches
        ]
    assert engine.counters.steps_grown == 5
    engine.abort("request-1")
    engine.step()
    assert engine.scheduler._decodes is not decodes
    assert len(engine.scheduler._decodes) == 2
    assert engine.counters.steps_grown == 5


def test_edits_are_asked_for_at_every_step() -> None:
    engine = make_engine()
    engine.add_request([1, 2], replace(PLAIN, frequency_penalty=1.0))
    engine.step()
    engine.step()
    decodes = engine.scheduler._decodes
    assert decodes.sampling() is not decodes.sampling()


def test_branches_that_end_together_give_all_of_their_tokens() -> None:
    engine = make_engine()
    requests = [
        engine.add_request([start, 1], replace(PLAIN, n=3, temperature=1, seed=start))
        for start in range(2)
    ]
    given: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            given.setdefault((delta.request_id, delta.index), []).append(delta.token_id)
            assert (delta.finish_reason == "length") == (
                len(given[delta.request_id, delta.index]) == PLAIN.max_tokens
            )
    for request in requests:
        for branch in request.branches:
            assert given[request.request_id, branch.index] == branch.stream.token_ids


@pytest.mark.parametrize("least", [1, 3, 5])
def test_tokens_are_banned_for_as_long_as_they_must(least: int) -> None:
    engine = make_engine()
    every = list(range(5))
    params = SamplingParams(
        max_tokens=9, temperature=0, ignore_eos=True, min_tokens=least, stop_token_ids=every[1:]
    )
    request = engine.add_request([1, 2], params)
    while engine.has_work:
        engine.step()
    tokens = request.branches[0].stream.token_ids
    assert not set(tokens[:least]) & set(every[1:])
    assert len(tokens) == 9 or tokens[-1] in every[1:]
