"""The ways in which other engines broke (PEERS.md), each under its number."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake import EOS, check_content, check_over, make_engine, naive

from radixkv.cache import EPHEMERAL
from radixkv.decoding import SamplingParams
from radixkv.engine import Engine, Request
from radixkv.errors import OutOfBlocksError, PromptTooLongError, RequestError
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(EOS) for _ in range(length)]


def run(engine: Engine, steps: int = 1000) -> None:
    """To the end, with every law checked after every step."""
    while engine.has_work:
        assert steps, "the engine does not come to an end"
        steps -= 1
        engine.step()
        engine.cache.check()
        check_content(engine)


def assert_right(request: Request, engine: Engine) -> None:
    assert request.error is None
    for branch in request.branches:
        expected = naive(
            request.prompt.tolist(),
            request.params,
            request.seed,
            branch.index,
            engine.max_model_len,
        )
        assert (branch.stream.token_ids, branch.stream.finish_reason) == expected


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("end", [0, 1, 15])
def test_01_ends_at_and_beside_a_block_border(end: int, n: int) -> None:
    engine = make_engine(block_size=16, max_model_len=200)
    for length in (7, 16, 31):
        # The last token is sampled, not computed: computed are length + max_tokens - 1.
        count = (end + 1 - length) % 16 + 16
        params = SamplingParams(n=n, max_tokens=count, seed=length, ignore_eos=True)
        request = engine.add_request(tokens(length, length), params)
        run(engine)
        assert_right(request, engine)
        assert (length + count - 1) % 16 == end
        history = [*request.prompt.tolist(), *request.branches[0].stream.token_ids]
        assert engine.cache.match(history) == len(history) - 1
    check_over(engine)


def test_02_abort_in_the_step_in_which_it_finishes() -> None:
    engine = make_engine()
    request = engine.add_request(tokens(2, 9), GREEDY)
    while engine.has_work:
        deltas = engine.step()
        engine.cache.check()
    assert deltas[-1].finish_reason == "length"
    assert not engine.abort(request.request_id)
    assert engine.counters.requests_aborted == 0
    engine.cache.check()
    check_over(engine)


def test_03_twins_live_at_once() -> None:
    """Their identical blocks are kept once, whichever of them ends first."""
    for first, second in ((6, 12), (12, 6), (9, 9)):
        engine = make_engine(16)
        prompt = tokens(3, 10)
        twins = [
            engine.add_request(prompt, SamplingParams(max_tokens=count, temperature=0))
            for count in (first, second, 5)
        ]
        engine.step()
        engine.add_request(prompt, GREEDY)
        run(engine)
        for twin in twins:
            assert_right(twin, engine)
        assert engine.counters.prefilled_tokens == len(prompt)
        check_over(engine)


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
def test_05_prefix_of_exactly_one_block_and_one_off(length: int) -> None:
    engine = make_engine(block_size=4)
    prompt = tokens(5, length)
    for cached in (0, length):
        request = engine.add_request(prompt, GREEDY)
        run(engine)
        assert_right(request, engine)
        assert request.num_cached_tokens == cached
    assert engine.counters.prefilled_tokens == length
    assert engine.counters.logits_only_tokens == 1
    check_over(engine)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()])
def test_06_a_chunk_published_and_never_computed(late: bool, error: BaseException) -> None:
    engine = make_engine(max_num_batched_tokens=6)
    adapter: Any = engine.runner.adapter
    failed = engine.add_request(tokens(6, 14), GREEDY)
    engine.step()
    adapter.fail, adapter.fail_late = error, late
    try:
        engine.step()
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert failed.error is not None
    # Whole blocks of the first chunk; of the second nothing may be found.
    assert engine.cache.match(failed.prompt) == 4
    check_content(engine)
    again = engine.add_request(failed.prompt, GREEDY)
    run(engine)
    assert_right(again, engine)
    check_over(engine)


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt()])
def test_06_who_counted_on_a_failed_chunk_and_had_no_row(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The second finds the first's promised prompt, but its log-probabilities must wait."""
    monkeypatch.setattr("radixkv.engine.scheduler.SCORED_PER_STEP", 8)
    engine = make_engine()
    adapter: Any = engine.runner.adapter
    first, second = (
        engine.add_request(tokens(6, 12), replace(GREEDY, prompt_logprobs=0)) for _ in range(2)
    )
    adapter.fail = error
    try:
        engine.step()
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert first.error is not None
    run(engine)
    assert_right(second, engine)
    assert len(second.prompt_logprobs) == 11
    check_over(engine)


def test_siblings_of_a_nan_have_as_many_logprobs_as_tokens() -> None:
    engine = make_engine()
    adapter: Any = engine.runner.adapter
    params = replace(GREEDY, n=3, temperature=1, seed=1, logprobs=1)
    request = engine.add_request(tokens(7, 5), params)
    engine.step()
    adapter.nan_row = 1
    engine.step()
    assert request.error is not None
    for branch in request.branches:
        assert len(branch.logprobs) == len(branch.stream.token_ids)
    check_over(engine)


def test_06_a_copy_that_failed() -> None:
    engine = make_engine()
    store: Any = engine.runner.backend.store
    first = engine.add_request(tokens(6, 9), GREEDY)
    run(engine)
    diverging = [*first.prompt.tolist()[:6], EOS, EOS]
    store.fail = MemoryError("no memory")
    second = engine.add_request(diverging, GREEDY)
    engine.step()
    assert store.fail is None, "nothing was to be copied"
    assert second.error is not None
    check_content(engine)
    third = engine.add_request(diverging, GREEDY)
    run(engine)
    assert_right(third, engine)
    check_over(engine)


def test_09_namespaces_separate_and_share_within() -> None:
    engine = make_engine()
    prompt = tokens(9, 13)
    for namespace, cached in ((("a",), 0), (("b",), 0), (("a",), 13), ((), 0), (("a", "b"), 0)):
        request = engine.add_request(prompt, GREEDY, namespace=namespace)
        run(engine)
        assert request.num_cached_tokens == cached
        assert_right(request, engine)
    for bad in (["a"], "a", ("a", 1)):
        with pytest.raises(RequestError, match="tuple of strings"):
            engine.add_request(prompt, GREEDY, namespace=bad)  # type: ignore[arg-type]
    check_over(engine)


def test_11_pool_exactly_full_never_evicts_what_was_just_matched() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    first = engine.add_request(tokens(11, 8), SamplingParams(max_tokens=9, seed=1, ignore_eos=True))
    run(engine)
    assert engine.cache.pool.num_free == 0
    # Two cached blocks and two new ones: the pool to its last block.
    request = engine.add_request(
        [*first.prompt.tolist(), *tokens(1, 4)],
        SamplingParams(max_tokens=5, ignore_eos=True, seed=1),
    )
    run(engine)
    assert request.num_cached_tokens >= 8
    assert_right(request, engine)
    check_over(engine)


def test_12_a_failed_admission_keeps_nothing() -> None:
    engine = make_engine(num_blocks=6, block_size=4)
    prefix = tokens(12, 8)
    engine.add_request(prefix, SamplingParams(max_tokens=1))
    run(engine)
    long = engine.add_request(
        tokens(13, 12), SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    )
    engine.step()
    waiting = engine.add_request([*prefix, *tokens(14, 7)], GREEDY)
    counted = engine.cache.counters.query_tokens
    engine.step()
    assert waiting in engine.scheduler.waiting
    assert engine.cache.counters.query_tokens == counted
    run(engine)
    assert_right(long, engine)
    assert_right(waiting, engine)
    check_over(engine)


def test_14_preemption_ends_and_never_takes_the_oldest() -> None:
    engine = make_engine(num_blocks=12, block_size=2, max_model_len=23)
    params = SamplingParams(max_tokens=18, ignore_eos=True, seed=5)
    requests = [engine.add_request(tokens(20 + i, 4), params) for i in range(5)]
    run(engine)
    assert engine.counters.preemptions > 3
    assert requests[0].num_preemptions == 0
    for request in requests:
        assert_right(request, engine)
    check_over(engine)


@pytest.mark.parametrize("at", range(1, 14))
def test_14_several_branches_come_back_into_a_full_pool(at: int) -> None:
    """They share their prompt again, so what fitted before fits again."""
    engine = make_engine(num_blocks=10, block_size=2, max_model_len=40)
    params = SamplingParams(n=3, max_tokens=5, ignore_eos=True, seed=5)
    request = engine.add_request(tokens(15, 8), params)
    for _ in range(at):
        engine.step()
    if request in engine.scheduler.running:
        engine.scheduler.requeue(request)
        # Its blocks are gone when it comes back.
        engine.cache.reset()
    run(engine)
    assert_right(request, engine)
    check_over(engine)


def test_14_larger_than_the_pool() -> None:
    engine = make_engine(num_blocks=4, block_size=4)
    with pytest.raises(PromptTooLongError, match="may need 5 blocks"):
        engine.add_request(tokens(14, 10), GREEDY)
    blocker = engine.cache.acquire(tokens(14, 8))
    outcast = engine.add_request(tokens(15, 9), GREEDY)
    run(engine)
    assert isinstance(outcast.error, OutOfBlocksError)
    engine.cache.release(blocker)
    check_over(engine)


@pytest.mark.parametrize("budget", [3, 64])
def test_15_each_prompt_token_counts_once(budget: int) -> None:
    """Whatever is retried, chunked or preempted."""
    engine = make_engine(num_blocks=10, block_size=2, max_num_batched_tokens=budget)
    params = SamplingParams(max_tokens=9, ignore_eos=True, seed=3)
    prompts = [tokens(30 + i, 7) for i in range(6)]
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    for prompt in (prompts[0], prompts[1][:5]):
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=1)))
    run(engine)
    counters, cache = engine.counters, engine.cache.counters
    assert counters.preemptions
    assert cache.query_tokens == sum(len(request.prompt) for request in requests)
    assert cache.hit_tokens == sum(request.num_cached_tokens for request in requests)
    # A prompt token was found, or computed for the first time.
    assert counters.prefilled_tokens == cache.query_tokens - cache.hit_tokens
    # So was each generated one, but for the last, which is only sampled.
    assert counters.decoded_tokens == sum(r.params.max_tokens - 1 for r in requests)
    assert counters.sampled_tokens == sum(r.params.max_tokens for r in requests)
    for request in requests:
        assert_right(request, engine)


def test_16_one_off_requests_do_not_flush_the_hot_prefix() -> None:
    def found(**hint: Any) -> int:
        engine = make_engine(num_blocks=16, block_size=4)
        hot = tokens(16, 24)
        engine.add_request(hot, SamplingParams(max_tokens=1))
        run(engine)
        for index in range(20):
            engine.add_request(tokens(40 + index, 20), SamplingParams(max_tokens=2, seed=1), **hint)
            run(engine)
        match = engine.cache.match(hot)
        check_over(engine)
        return match

    assert found(retention=EPHEMERAL) == 24
    assert found() < 24


def test_18_seeds_do_not_depend_on_batch_mates() -> None:
    prompt = tokens(18, 11)
    params = SamplingParams(n=4, max_tokens=10, seed=77, ignore_eos=True)

    mate = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)

    def answers(engine: Engine, others: int = 0) -> list[list[int]]:
        for index in range(others // 2):
            engine.add_request(tokens(50 + index, 9), mate)
        request = engine.add_request(prompt, params)
        for index in range(others // 2):
            engine.add_request(tokens(90 + index, 5), mate)
        run(engine)
        return [branch.stream.token_ids for branch in request.branches]

    alone = answers(make_engine())
    assert len({tuple(answer) for answer in alone}) == 4
    assert answers(make_engine(256), others=31) == alone
    assert answers(make_engine(max_num_batched_tokens=3)) == alone
    crowded = make_engine(num_blocks=14, max_num_batched_tokens=16)
    assert answers(crowded, others=8) == alone
    assert crowded.counters.preemptions
    assert naive(prompt, params, 77, branch=2)[0] == alone[2]


def test_20_greedy_is_the_same_cold_and_warm(make_llm: MakeLLM, reference: Reference) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    prompt = [random.Random(20).randrange(250) for _ in range(61)]
    llm = make_llm()
    expected = reference(prompt, 20)
    for _ in range(3):
        (output,) = llm.generate([prompt], params)
        assert list(output.token_ids) == expected


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", range(12))
def test_22_cancelled_at_every_stage(stage: int, n: int) -> None:
    """Waiting, half prefilled, running, between its branches' ends, over: counts return."""
    engine = make_engine(num_blocks=24, max_num_batched_tokens=5)
    params = SamplingParams(n=n, max_tokens=6, seed=4)
    other = engine.add_request(tokens(22, 9), params)
    request = engine.add_request(tokens(23, 13), params)
    for _ in range(stage):
        engine.step()
    if request.request_id in engine.requests:
        assert engine.abort(request.request_id)
        engine.cache.check()
    run(engine)
    assert_right(other, engine)
    check_over(engine)


def test_22_nan_of_one_does_not_stop_those_who_share_its_blocks(
    make_llm: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start again without what it computed, and the answer is the same."""
    llm = make_llm()
    prompt = [random.Random(22).randrange(250) for _ in range(40)]
    greedy = SamplingParams(max_tokens=12, temperature=0)
    bad = llm.engine.add_request(prompt, greedy)
    good = llm.engine.add_request([*prompt, 7], greedy)
    run_step = llm.engine.runner.run

    def poison(step: Any) -> torch.Tensor:
        logits = run_step(step).clone()
        sampling = [row for row in step.rows if row.samples]
        for index, row in enumerate(sampling):
            if row.branch.request is bad and len(row.branch.stream.token_ids) == 3:
                logits[index] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", poison)
    while llm.engine.has_work:
        llm.engine.step()
        llm.cache.check()
    assert bad.error is not None
    assert good.error is None
    assert good.num_preemptions == 1
    assert good.branches[0].stream.token_ids == reference([*prompt, 7], 12)


def test_14_whoever_waits_holds_nothing() -> None:
    """Also a request with branches that gave way while it was coming back."""
    for seed in range(60):
        rng = random.Random(seed)
        engine = make_engine(num_blocks=rng.choice([6, 7, 8, 10]), block_size=2, max_model_len=30)
        requests = []
        for index in range(5):
            n = rng.choice([1, 3, 4])
            params = SamplingParams(n=n, max_tokens=rng.randint(2, 5), seed=index)
            with suppress(PromptTooLongError):
                prompt = tokens(seed * 10 + index, rng.randint(2, 6))
                requests.append(engine.add_request(prompt, params))
        while engine.has_work:
            engine.step()
            waiting = [branch for r in engine.scheduler.waiting for branch in r.branches]
            assert all(branch.sequence is None for branch in waiting)
            check_content(engine)
        for request in requests:
            assert_right(request, engine)
        check_over(engine)
