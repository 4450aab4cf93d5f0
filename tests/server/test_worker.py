"""The engine on a thread of its own: pieces, ends, cancellations and calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from radixkv.decoding import SamplingParams
from radixkv.engine import Request
from radixkv.errors import EngineStoppedError, PromptTooLongError, QueueFullError, RequestError
from radixkv.llm import LLM
from radixkv.server.answer import arrivals
from radixkv.server.worker import EngineWorker

PROMPT = list(b"once upon a time")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)

MakeLLM = Callable[..., LLM]


def with_worker(llm: LLM, use: Callable[[EngineWorker], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        worker = EngineWorker(llm, **settings)
        worker.start()
        try:
            await use(worker)
        finally:
            await worker.stop()
        assert not worker.alive
        assert worker.num_unfinished == 0

    asyncio.run(main())


def test_pieces_add_up_to_what_the_reference_says(
    make_llm: MakeLLM, reference: Callable[[list[int], int], list[int]]
) -> None:
    async def use(worker: EngineWorker) -> None:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=2)
        answer = await worker.submit(PROMPT, params)
        pieces = [piece async for piece in answer]
        assert answer.output is not None
        assert [piece.delta.token_id for piece in pieces] == reference(PROMPT, 12)
        assert tuple(piece.logprobs for piece in pieces) == answer.output.outputs[0].logprobs
        assert "".join(piece.delta.text for piece in pieces) == answer.output.text
        assert pieces[-1].delta.finish_reason == "length"

    with_worker(make_llm(), use)


def test_a_cancelled_answer_ends_and_gives_its_blocks_back(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        answer = await worker.submit(PROMPT, LONG)
        async for _ in answer:
            answer.cancel()
            break
        output = await answer.end()
        assert output.finish_reason == "abort"
        assert 1 <= len(output.token_ids) < 400
        stats = await worker.call(LLM.stats)
        assert stats.cache.sequences == 0
        answer.cancel()

    with_worker(make_llm(), use)


@pytest.mark.parametrize("pauses", [0, 1, 2, 5])
def test_who_leaves_while_submitting_leaves_nothing(make_llm: MakeLLM, pauses: int) -> None:
    async def use(worker: EngineWorker) -> None:
        task = asyncio.create_task(worker.submit(PROMPT, LONG))
        for _ in range(pauses):
            await asyncio.sleep(0)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        else:  # The engine was quicker.
            (await task).cancel()
        stats = await worker.call(LLM.stats)
        assert (stats.running, stats.waiting, stats.cache.sequences) == (0, 0, 0)
        # The word that it has ended may come after the answer to the call.
        assert await worker.drain(30)

    with_worker(make_llm(), use)


def test_what_is_refused_takes_no_place(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        for prompt, error in ([], RequestError), ([999], RequestError), ([1] * 600, RequestError):
            with pytest.raises(error):
                await worker.submit(prompt, GREEDY)
        with pytest.raises(PromptTooLongError):
            await worker.submit([1] * 512, GREEDY)
        await asyncio.sleep(0)
        assert worker.num_unfinished == 0
        assert (await (await worker.submit(PROMPT, GREEDY)).end()).finish_reason == "length"

    with_worker(make_llm(), use)


def test_the_queue_is_bounded(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        first, second = [await worker.submit(PROMPT, LONG) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 of at most 2 requests"):
            await worker.submit(PROMPT, GREEDY)
        first.cancel()
        await first.end()
        third = await worker.submit(PROMPT, GREEDY)
        assert (await third.end()).error is None
        assert (await second.end()).finish_reason == "length"

    with_worker(make_llm(), use, max_queued=2)


def test_a_call_that_comes_as_the_thread_ends_is_answered(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        stopping = asyncio.create_task(worker.stop())
        answers = []
        while not stopping.done():
            answers.append(asyncio.create_task(worker.call(LLM.stats)))
            await asyncio.sleep(0)
        answers += [asyncio.create_task(worker.call(LLM.stats)) for _ in range(3)]
        done, waiting = await asyncio.wait(answers, timeout=30)
        assert not waiting
        for each in done:
            assert each.exception() is None or isinstance(each.exception(), EngineStoppedError)

    with_worker(make_llm(), use)


def test_places_that_were_not_needed_are_given_back(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        def make(llm: LLM) -> list[Request]:
            return [llm.engine.add_request(PROMPT, GREEDY)]

        answers = await worker.begin(make, slots=3)
        assert len(answers) == 1
        await answers[0].end()
        assert worker.num_unfinished == 0
        assert await worker.begin(lambda _: [], slots=2) == []
        await asyncio.sleep(0)
        assert worker.num_unfinished == 0

    with_worker(make_llm(), use)


def test_what_the_thread_is_told_is_done_in_order(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(worker: EngineWorker) -> None:
        told: list[int] = []
        for number in range(3):
            worker.tell(lambda _, number=number: told.append(number))  # type: ignore[misc]
        worker.tell(lambda _: 1 // 0)
        assert await worker.call(lambda _: list(told)) == [0, 1, 2]
        assert "ZeroDivisionError" in caplog.text
        assert worker.alive

    with_worker(make_llm(), use)


def test_draining_lets_what_runs_end_and_takes_no_more(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        answer = await worker.submit(PROMPT, GREEDY)
        assert await worker.drain(30)
        assert answer.output is not None
        assert answer.output.finish_reason == "length"
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await worker.submit(PROMPT, GREEDY)

    with_worker(make_llm(), use)


def test_stopping_ends_what_still_runs(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        answer = await worker.submit(PROMPT, LONG)
        assert not await worker.drain(0)
        await worker.stop()
        output = await answer.end()
        assert isinstance(output.error, EngineStoppedError)
        with pytest.raises(EngineStoppedError):
            await worker.call(LLM.stats)

    with_worker(make_llm(), use)


def test_a_broken_law_ends_the_thread_and_every_request(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        def break_it(llm: LLM) -> None:
            llm.engine.scheduler.schedule = lambda: 1 // 0  # type: ignore[method-assign]

        answer = await worker.submit(PROMPT, LONG)
        await worker.call(break_it)
        output = await answer.end()
        assert isinstance(output.error, EngineStoppedError)
        await worker.gone()
        assert not worker.alive

    with_worker(make_llm(), use)


def test_a_call_gives_results_and_errors(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        assert await worker.call(lambda llm: llm.cache.block_size) == 16
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda llm: 1 // 0)
        assert worker.alive

    with_worker(make_llm(), use)


def test_places_that_are_kept_count(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        with worker.reserved(2):
            with pytest.raises(QueueFullError, match="2 of at most 2"):
                await worker.submit(PROMPT, GREEDY)
            with pytest.raises(QueueFullError), worker.reserved():
                pass
        assert worker.num_reserved == 0
        assert (await (await worker.submit(PROMPT, GREEDY)).end()).error is None
        worker.draining = True
        with pytest.raises(EngineStoppedError), worker.reserved():
            pass

    with_worker(make_llm(), use, max_queued=2)


def test_what_waits_of_an_answer_arrives_together(make_llm: MakeLLM) -> None:
    async def use(worker: EngineWorker) -> None:
        ended = await worker.submit(PROMPT, GREEDY)
        while ended.output is None:
            await asyncio.sleep(0.001)
        running = await worker.submit(PROMPT[:5], GREEDY)
        arrived = [(place, len(its)) async for place, its in arrivals([ended, running])]
        assert arrived[:2] == [(0, 12), (0, 0)]
        assert sum(count for place, count in arrived if place == 1) == 12
        assert arrived[-1] == (1, 0)
        assert [count for _, count in arrived].count(0) == 2

    with_worker(make_llm(), use)
