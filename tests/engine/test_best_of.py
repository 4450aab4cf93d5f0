"""best_of: the likeliest of several samples, in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from failing import let_fail

from radixkv.decoding import SamplingParams
from radixkv.engine import Completion, TokenDelta, output_of
from radixkv.errors import PromptTooLongError, RequestError, UnsupportedParameterError
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]

# Letters stop it, so that the samples have different lengths, of which a sum would prefer short.
STOPS = list(range(60, 90))
SIX = SamplingParams(n=6, max_tokens=12, seed=3, stop_token_ids=STOPS, logprobs=1)


def prompt(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def mean(completion: Completion) -> float:
    assert completion.logprobs is not None
    return sum(entry.logprob for entry in completion.logprobs) / len(completion.token_ids)


def six(llm: LLM, tokens: list[int]) -> list[Completion]:
    """All samples, the likeliest a token first."""
    (output,) = llm.generate([tokens], SIX)
    return sorted(output.outputs, key=mean, reverse=True)


@pytest.mark.parametrize("n", [1, 2, 6])
def test_the_n_likeliest_a_token_are_returned_best_first(make_llm: MakeLLM, n: int) -> None:
    llm = make_llm()
    for seed in range(4):
        expected = six(llm, prompt(seed))
        assert len({len(completion.token_ids) for completion in expected}) > 2
        (output,) = llm.generate([prompt(seed)], replace(SIX, n=n, best_of=6))
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected[:n]]
        assert [c.text for c in output.outputs] == [c.text for c in expected[:n]]
        assert [c.index for c in output.outputs] == list(range(n))
        for found, its in zip(output.outputs, expected, strict=False):
            assert found.score == pytest.approx(mean(its))
            assert mean(found) == pytest.approx(found.score)
            assert found.cumulative_logprob == pytest.approx(mean(its) * len(its.token_ids))


def test_the_sum_would_have_chosen_others(make_llm: MakeLLM) -> None:
    """Otherwise the test above says nothing about the mean."""
    llm = make_llm()
    found = [six(llm, prompt(seed)) for seed in range(4)]
    assert any(
        max(samples, key=lambda c: mean(c) * len(c.token_ids)) is not samples[0]
        for samples in found
    )


def test_log_probabilities_are_reported_only_if_asked_for(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = six(llm, prompt(1))[0]
    (output,) = llm.generate([prompt(1)], replace(SIX, n=1, best_of=6, logprobs=None))
    assert output.token_ids == expected.token_ids
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].score == pytest.approx(mean(expected))
    (plain,) = llm.generate([prompt(1)], replace(SIX, n=1, best_of=1))
    assert plain.outputs[0].score is plain.outputs[0].cumulative_logprob is None


def test_the_prompt_is_computed_once(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate([prompt(1)], replace(SIX, n=2, best_of=6))
    assert llm.stats().engine.prefilled_tokens == 20
    assert llm.stats().cache.counters.forks == 5


def test_nothing_is_streamed_before_the_best_are_known(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = replace(SIX, n=2, best_of=6)
    expected = six(llm, prompt(2))[:2]
    request = llm.engine.add_request(prompt(2), params)
    steps: list[list[TokenDelta]] = []
    while llm.engine.has_work:
        steps.append(llm.engine.step())
    assert not any(steps[:-1])
    for place, completion in enumerate(expected):
        own = [delta for delta in steps[-1] if delta.index == place]
        assert tuple(delta.token_id for delta in own) == completion.token_ids
        assert "".join(delta.text for delta in own) == completion.text
        reasons = [delta.finish_reason for delta in own]
        assert reasons == [None] * (len(own) - 1) + [completion.finish_reason]
    assert {delta.index for delta in steps[-1]} == {0, 1}
    output = output_of(request)
    assert output.time_to_first_token == pytest.approx(output.total_time, rel=0.1)
    streamed = list(llm.stream([prompt(2)], params))
    assert [delta.token_id for delta in streamed] == [delta.token_id for delta in steps[-1]]


def test_under_preemption(make_llm: MakeLLM) -> None:
    llm = make_llm()
    expected = [six(llm, prompt(seed))[0] for seed in range(5)]
    llm = make_llm(36, block_size=4)
    params = replace(SIX, n=1, best_of=6)
    outputs = llm.generate([prompt(seed) for seed in range(5)], params)
    assert llm.stats().engine.preemptions > 0
    assert [output.token_ids for output in outputs] == [its.token_ids for its in expected]


def test_abort_and_failure(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = replace(SIX, n=2, best_of=6, ignore_eos=True)
    aborted = llm.engine.add_request(prompt(1), params)
    broken = llm.engine.add_request(prompt(2), params)
    for _ in range(4):
        assert llm.engine.step() == []
    assert llm.engine.abort(aborted.request_id)
    assert len(output_of(aborted).outputs) == 2
    assert all(c.score is None for c in output_of(aborted).outputs)

    for branch in broken.branches:
        let_fail(branch.stream, lambda: True)
    deltas = llm.engine.step()
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "error"), (1, "error")]
    assert "no such token" in str(broken.error)


def test_a_failure_ends_what_had_ended_unseen(make_llm: MakeLLM) -> None:
    """The first sample is complete when another fails: nobody was told, so it fails as well."""
    llm = make_llm()
    request = llm.engine.add_request(prompt(2), replace(SIX, n=1, best_of=6, stop_token_ids=[]))
    first, *_, last = (branch.stream for branch in request.branches)
    first._most = 1
    let_fail(last, lambda: len(last.token_ids) == 4)
    deltas: list[TokenDelta] = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(0, "error")]


def test_what_cannot_be_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(10, block_size=4, max_num_seqs=4)
    refusals: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (RequestError, "best_of=5 continuations exceed max_num_seqs=4", {"best_of": 5}),
        (PromptTooLongError, "best_of 4", {"best_of": 4, "max_tokens": 30}),
    ]
    for kind, message, settings in refusals:
        with pytest.raises(kind, match=message):
            llm.generate([prompt(1, 5)], SamplingParams(**settings))
    with (
        llm.context("some text") as context,
        pytest.raises(UnsupportedParameterError, match="join the branches"),
    ):
        context.generate(best_of=2)
