"""Log-probabilities of given tokens equal those of a plain forward, cached or not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.decoding import SamplingParams
from radixkv.engine import output_of
from radixkv.engine.scheduler import SCORED_PER_STEP
from radixkv.errors import ContextBusyError, NumericalError, RequestError
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel
from radixkv.programs import Score

MakeLLM = Callable[..., LLM]
Forward = Callable[[list[int]], np.ndarray]


def ids(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


@pytest.fixture(scope="module")
def forward(tiny: LoadedModel, plain_model: torch.nn.Module) -> Forward:
    """Log-probabilities behind each token, by the plain model; float32 (tokens, vocabulary)."""

    @torch.inference_mode()
    def logprobs(tokens: list[int]) -> np.ndarray:
        logits = plain_model(input_ids=torch.tensor([tokens])).logits[0]
        return logits.float().log_softmax(-1).numpy()

    return logprobs


def expected(forward: Forward, tokens: list[int], start: int = 1) -> np.ndarray:
    table = forward(tokens)
    return np.array([table[i - 1, tokens[i]] for i in range(start, len(tokens))])


def greedy(forward: Forward, tokens: list[int], count: int) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(int(forward(known)[-1].argmax()))
    return known[len(tokens) :]


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("cached", [0, 15, 16, 17, 40])
def test_prompt_logprobs(make_llm: MakeLLM, forward: Forward, cached: int, budget: int) -> None:
    llm = make_llm(max_num_batched_tokens=budget)
    prompt = ids(40)
    greedy = SamplingParams(max_tokens=3, temperature=0)
    if cached:
        llm.generate([prompt[:cached]], SamplingParams(max_tokens=1, temperature=0))
    before = llm.stats().engine.prefilled_tokens
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
    (output, other) = llm.generate([prompt, prompt], [params, greedy])
    assert llm.stats().engine.prefilled_tokens - before == 40 - cached
    assert output.token_ids == other.token_ids
    assert other.prompt_logprobs is None
    first, *rest = output.prompt_logprobs or ()
    assert first is None
    assert len(rest) == 39
    found = np.array([entry.logprob for entry in rest if entry is not None])
    np.testing.assert_allclose(found, expected(forward, prompt), atol=1e-4)
    table = forward(prompt)
    for i, entry in enumerate(rest):
        assert entry is not None
        best = np.argsort(-table[i])[:2]
        assert [token for token, _ in entry.top] == best.tolist()
        assert entry.rank == 1 + int((table[i] > table[i, prompt[i + 1]]).sum())


def test_prompt_logprobs_of_one_token_and_of_many_branches(
    make_llm: MakeLLM, forward: Forward
) -> None:
    llm = make_llm(seed=1)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, n=3)
    (one, many) = llm.generate([[7], ids(20)], params)
    assert one.prompt_logprobs == (None,)
    assert len({completion.token_ids for completion in many.outputs}) == 3
    found = [entry.logprob for entry in (many.prompt_logprobs or ())[1:] if entry]
    np.testing.assert_allclose(found, expected(forward, ids(20)), atol=1e-4)


def test_prompt_logprobs_under_preemption(make_llm: MakeLLM, forward: Forward) -> None:
    llm = make_llm(num_blocks=9, max_num_batched_tokens=24)
    prompts = [ids(30 + i, seed=i) for i in range(8)]
    outputs = llm.generate(
        prompts, SamplingParams(max_tokens=30, temperature=0, prompt_logprobs=0, ignore_eos=True)
    )
    assert llm.stats().engine.preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        found = [entry.logprob for entry in (output.prompt_logprobs or ())[1:] if entry]
        np.testing.assert_allclose(found, expected(forward, prompt), atol=1e-4)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], list[int]]:
    """Watches an LLM's model: of how many tokens a step's forward gives the logits."""

    def watch(llm: LLM) -> list[int]:
        adapter = llm.engine.runner.adapter
        forward, counts = adapter.forward, []

        def counted(*arguments: Any) -> torch.Tensor:
            logits = forward(*arguments)
            counts.append(len(logits))
            return logits

        monkeypatch.setattr(adapter, "forward", counted)
        return counts

    return watch


def test_a_long_prompt_s_logits_are_asked_for_in_portions(
    make_llm: MakeLLM, forward: Forward, asked: Callable[[LLM], list[int]]
) -> None:
    """Bug: with 49,000 tokens to choose from, a prompt of 2,048 asked for 400 MB at once."""
    llm = make_llm(num_blocks=128)
    counts = asked(llm)
    prompts = [ids(400, seed=1), ids(400, seed=1), ids(150, seed=2)]
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    for cached in (0, 400):
        outputs = llm.generate(prompts, params)
        assert outputs[0].num_cached_tokens == cached
        for prompt, output in zip(prompts, outputs, strict=True):
            found = [entry.logprob for entry in (output.prompt_logprobs or ())[1:] if entry]
            np.testing.assert_allclose(found, expected(forward, prompt), atol=1e-4)
    assert llm.stats().engine.prefilled_tokens == 550
    with llm.context(prompts[0][:20]) as context:
        score = context.score(prompts[0][20:]).result()
        truth = expected(forward, prompts[0], 20)
        np.testing.assert_allclose(score.logprobs, truth, atol=1e-4)
    # The portion, and a row to sample from for each request.
    assert SCORED_PER_STEP == 256
    assert 256 <= max(counts) <= 256 + len(prompts)


@pytest.mark.parametrize("portion", [2, 7, 30])
def test_small_portions_among_other_requests(
    make_llm: MakeLLM,
    forward: Forward,
    asked: Callable[[LLM], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    portion: int,
) -> None:
    monkeypatch.setattr("radixkv.engine.scheduler.SCORED_PER_STEP", portion)
    llm = make_llm(num_blocks=24, max_num_batched_tokens=24)
    counts = asked(llm)
    prompts = [ids(30 + i, seed=i) for i in range(4)] * 2
    plain = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    each = [plain, replace(plain, prompt_logprobs=0)] * 4
    engine = llm.engine
    requests = [engine.add_request(p, its) for p, its in zip(prompts, each, strict=True)]
    while engine.has_work:
        for _ in range(5):
            engine.step()
            llm.cache.check()
        if len(counts) < 40 and engine.scheduler.running:
            engine.scheduler.requeue(engine.scheduler.running[-1])
    assert engine.counters.preemptions > 2
    outputs = [output_of(request) for request in requests]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == tuple(greedy(forward, prompt, 8))
    for prompt, output in zip(prompts[1::2], outputs[1::2], strict=True):
        found = [entry.logprob for entry in (output.prompt_logprobs or ())[1:] if entry]
        np.testing.assert_allclose(found, expected(forward, prompt), atol=1e-4)
    assert max(counts) <= portion + len(prompts)


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_score_is_not_kept(make_llm: MakeLLM, forward: Forward, length: int) -> None:
    llm = make_llm()
    prompt, continuation = ids(length), ids(20, seed=9)
    truth = expected(forward, prompt + continuation, length)
    with llm.context(prompt) as context:
        for _ in range(3):
            score = context.score(continuation).result()
            np.testing.assert_allclose(score.logprobs, truth, atol=1e-4)
            assert score.token_ids == tuple(continuation)
            assert score.total == pytest.approx(float(truth.sum()), abs=1e-3)
            assert score.mean == pytest.approx(float(truth.mean()), abs=1e-4)
            assert context.tokens == tuple(prompt)
        # One token is scored though the whole of the context is computed.
        context.generate(max_tokens=4, temperature=0, ignore_eos=True).result()
        scoring = context.score(continuation[:1])
        truth = expected(forward, [*context.tokens, continuation[0]], length + 4)
        context.append([1])
        assert scoring.mean == pytest.approx(float(truth[0]), abs=1e-4)
        scores = llm.run([context.score(continuation[i:]) for i in range(3)])
        assert [len(score.logprobs) for score in scores] == [20, 19, 18]
        assert llm.stats().cache.sequences == 1
        with pytest.raises(RequestError, match="at least one token"):
            context.score("")
    with llm.context() as empty, pytest.raises(RequestError, match="append a text first"):
        empty.score("x")


def test_choose(make_llm: MakeLLM, forward: Forward) -> None:
    llm = make_llm()
    prompt = list(llm.tokenize("The answer is"))
    options = [" yes", " no", " perhaps not"]
    with llm.context(prompt) as context:
        (probe,) = context.fork(1)
        choosing = context.choose(options)
        with pytest.raises(ContextBusyError):
            context.append("x")
        steps = llm.stats().engine.steps
        choice = choosing.result()
        assert llm.stats().engine.steps == steps + 1
        means = []
        for option, score in zip(options, choice.scores, strict=True):
            truth = expected(forward, prompt + list(llm.tokenize(option)), len(prompt))
            np.testing.assert_allclose(score.logprobs, truth, atol=1e-4)
            means.append(float(truth.mean()))
        assert choice.index == means.index(max(means))
        assert choice.text == options[choice.index]
        assert context.text == "The answer is" + choice.text
        assert context.generated == choice.text
        assert context.logprobs == choice.scores[choice.index].logprobs
        assert llm.stats().cache.sequences == 1
        before = llm.stats().engine.prefilled_tokens
        context.generate(max_tokens=1, temperature=0).result()
        assert llm.stats().engine.prefilled_tokens == before
        for bad in ([], "yes", [""]):
            with pytest.raises(RequestError):
                probe.choose(bad)


def test_nan_in_a_prompt_fails_its_request_alone(make_llm: MakeLLM) -> None:
    llm = make_llm()
    run = llm.engine.runner.run

    def spoiled(step):  # type: ignore[no-untyped-def]
        logits = run(step).clone()
        logits[0] = torch.nan
        return logits

    with llm.context(ids(20)) as context:
        llm.engine.runner.run = spoiled  # type: ignore[method-assign]
        scoring, other = context.score([1, 2]), context.score([3, 4])
        with pytest.raises(NumericalError):
            scoring.result()
        llm.engine.runner.run = run  # type: ignore[method-assign]
        assert isinstance(other.result(), Score)
        assert context.generate(max_tokens=2, temperature=0).text is not None
