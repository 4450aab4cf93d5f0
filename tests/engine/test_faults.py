"""Bad input is refused at the door; what fails later fails alone, and leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.decoding import SamplingParams
from radixkv.errors import (
    EngineStoppedError,
    NumericalError,
    PromptTooLongError,
    RequestError,
    UnsupportedParameterError,
)
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], RequestError, "empty"),
        ([5, 9999], RequestError, "outside the vocabulary"),
        ([5, -1], RequestError, "outside the vocabulary"),
        ([2**40], RequestError, "32-bit"),
        ([0.5], RequestError, "integers"),
        (prompt(0, 512), PromptTooLongError, "context of 512"),
    ],
)
def test_bad_prompts(make_llm: MakeLLM, bad: Any, error: type[Exception], message: str) -> None:
    llm = make_llm()
    with pytest.raises(error, match=message):
        llm.generate([prompt(1), bad], GREEDY)
    assert llm.stats().engine.steps == 0
    assert llm.generate([prompt(1)], GREEDY)[0].error is None


def test_a_request_that_could_never_fit_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=4)
    with pytest.raises(PromptTooLongError, match="may need 5 blocks"):
        llm.generate([prompt(1, 60)], SamplingParams(max_tokens=6, temperature=0))
    (output,) = llm.generate([prompt(1, 60)], SamplingParams(max_tokens=5, temperature=0))
    assert len(output.token_ids) == 5
    with pytest.raises(PromptTooLongError, match="n 3"):
        llm.generate([prompt(1, 30)], SamplingParams(max_tokens=5, n=3))


def test_bad_parameters(make_llm: MakeLLM) -> None:
    for keywords in ({"n": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"stop": ""}):
        with pytest.raises(RequestError):
            SamplingParams(**keywords)
    with pytest.raises(UnsupportedParameterError, match="beam_width"):
        SamplingParams(num_beams=4)  # type: ignore[call-arg]
    llm = make_llm(max_num_seqs=4)
    with pytest.raises(RequestError, match="max_num_seqs=4"):
        llm.generate([prompt(1)], SamplingParams(n=5))
    with pytest.raises(RequestError, match="2 prompts, but 1"):
        llm.generate([prompt(1), prompt(2)], [GREEDY])


def test_context_full_ends_with_length(make_llm: MakeLLM) -> None:
    llm = make_llm(max_model_len=45)
    (output,) = llm.generate([prompt(3)], GREEDY)
    assert len(output.token_ids) == 5
    assert output.finish_reason == "length"


def test_a_failing_forward_fails_its_requests_and_hides_their_blocks(
    make_llm: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peer fault 6: a chunk that was published and never computed must not be found."""
    llm = make_llm()
    run = llm.engine.runner.run

    def fail(step: Any) -> torch.Tensor:
        run(step)
        raise ValueError("device lost")

    first = llm.engine.add_request(prompt(1), GREEDY)
    monkeypatch.setattr(llm.engine.runner, "run", fail)
    deltas = llm.engine.step()
    monkeypatch.undo()
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert isinstance(first.error, EngineStoppedError)
    assert "device lost" in str(first.error)
    assert llm.cache.match(prompt(1)) == 0
    for cache in llm.engine.runner.backend.store.keys:
        cache.fill_(torch.nan)
    (output,) = llm.generate([prompt(1)], GREEDY)
    assert list(output.token_ids) == reference(prompt(1), 12)


def test_an_interrupt_leaves_nothing_behind(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()

    def interrupt(step: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(1), prompt(2)], GREEDY)
    monkeypatch.undo()
    assert llm.cache.match(prompt(1)) == 0
    assert not llm.engine.has_work


def test_nan_logits_fail_alone(
    make_llm: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    run = llm.engine.runner.run
    poisoned = llm.engine.add_request(prompt(1), GREEDY, request_id="poisoned")
    healthy = llm.engine.add_request(prompt(2), GREEDY, request_id="healthy")

    def poison(step: Any) -> torch.Tensor:
        logits = run(step).clone()
        sampling = [row for row in step.rows if row.samples]
        for index, row in enumerate(sampling):
            if row.branch.request is poisoned and len(row.branch.stream.token_ids) == 3:
                logits[index] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", poison)
    while llm.engine.has_work:
        llm.engine.step()
    assert isinstance(poisoned.error, NumericalError)
    assert len(poisoned.branches[0].stream.token_ids) == 3
    assert llm.cache.match(prompt(1)) == 0
    assert healthy.error is None
    assert healthy.branches[0].stream.token_ids == reference(prompt(2), 12)


def test_nothing_leaks_over_2000_requests_with_cancellations(make_llm: MakeLLM) -> None:
    """Peer faults 2, 12 and 22: 30 % are cancelled at random stages, some in their last step."""
    llm = make_llm(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=48)
    rng = random.Random(0)
    engine = llm.engine
    system = prompt(0, 33)
    started = cancelled = 0
    while started < 2000 or engine.has_work:
        while started < 2000 and len(engine.requests) < 12:
            body = system[: rng.randrange(34)] + [
                rng.randrange(3) for _ in range(rng.randint(1, 30))
            ]
            params = SamplingParams(
                max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 1, 3]), seed=started
            )
            engine.add_request(body, params, request_id=str(started))
            started += 1
        if rng.random() < 0.3 and engine.requests:
            engine.abort(rng.choice(list(engine.requests)))
            cancelled += 1
        engine.step()
        if started % 50 == 0:
            llm.cache.check()
    stats = llm.stats()
    assert stats.engine.requests_failed == 0
    assert stats.engine.requests_aborted == cancelled > 400
    assert stats.cache.held_only == stats.cache.held_and_cached == 0
    assert stats.cache.counters.hit_tokens <= stats.cache.counters.query_tokens


def test_a_closed_engine_says_so(make_llm: MakeLLM) -> None:
    llm = make_llm()
    waiting = llm.engine.add_request(prompt(1), GREEDY)
    llm.engine.shutdown()
    assert isinstance(waiting.error, EngineStoppedError)
    with pytest.raises(EngineStoppedError, match="shut down"):
        llm.generate([prompt(1)], GREEDY)


def test_stopping_a_stream_early_ends_its_requests(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream([prompt(1), prompt(2)], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    assert not llm.cache.sequences
