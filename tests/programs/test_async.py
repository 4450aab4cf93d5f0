"""Async programs: tasks share steps, and whatever is cancelled leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from radixkv.errors import EngineStoppedError, GenerationCancelledError
from radixkv.llm import LLM
from radixkv.programs import Context

MakeLLM = Callable[..., LLM]
PROMPT = "Once upon a time there was a cache of keys and values. "


def test_tasks_share_steps(make_llm: MakeLLM) -> None:
    llm = make_llm()

    async def story(branch: Context) -> str:
        first = await branch.generate(max_tokens=5, temperature=0, ignore_eos=True)
        branch.append("!")
        second = await branch.generate(max_tokens=6, temperature=0, ignore_eos=True)
        return first.text + second.text

    async def program() -> list[str]:
        with llm.context(PROMPT) as context:
            texts = await asyncio.gather(*(story(branch) for branch in context.fork(4)))
            assert (await context.score("x")).mean < 0
            assert (await context.choose(["a", "b"])).text in ("a", "b")
            return list(texts)

    texts = asyncio.run(program())
    assert len(set(texts)) == 1
    # Eleven tokens of four stories, a score, a choice.
    assert llm.stats().engine.steps == 11 + 1 + 1
    assert asyncio.run(program()) == texts


def test_streaming(make_llm: MakeLLM) -> None:
    llm = make_llm()

    async def program() -> tuple[list[str], str]:
        with llm.context(PROMPT) as context:
            (twin,) = context.fork(1)
            other = asyncio.create_task(_text(twin))
            generation = context.generate(max_tokens=40, temperature=0, ignore_eos=True)
            return [piece async for piece in generation], await other

    async def _text(branch: Context) -> str:
        return (await branch.generate(max_tokens=40, temperature=0, ignore_eos=True)).text

    pieces, text = asyncio.run(program())
    assert len(pieces) > 1
    assert "".join(pieces) == text
    assert llm.stats().engine.steps == 40


def test_a_cancelled_task_cancels_its_generation(make_llm: MakeLLM) -> None:
    llm = make_llm()

    async def program() -> None:
        with llm.context(PROMPT) as context:
            one, two = context.fork(2)
            start = one.tokens
            generation = one.generate(max_tokens=200, temperature=0, ignore_eos=True)

            async def wait() -> object:
                return await generation

            lost = asyncio.create_task(wait())
            kept = two.generate(max_tokens=10, temperature=0, ignore_eos=True)
            await kept
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
            assert generation.done
            with pytest.raises(GenerationCancelledError):
                await generation
            assert one.tokens == start
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    _result(one.generate(max_tokens=400, ignore_eos=True)), timeout=0.05
                )
            assert one.tokens == start
            again = await one.generate(max_tokens=10, temperature=0, ignore_eos=True)
            assert again.text == two.generated

    asyncio.run(program())
    assert llm.stats().cache.sequences == 0


async def _result(generation):  # type: ignore[no-untyped-def]
    return await generation


def test_an_error_in_the_middle_of_a_program(make_llm: MakeLLM) -> None:
    llm = make_llm()

    async def program() -> None:
        with llm.context(PROMPT) as context:
            one, two = context.fork(2)
            async with asyncio.TaskGroup() as group:
                group.create_task(_result(one.generate(max_tokens=100, ignore_eos=True)))
                await two.generate(max_tokens=3)
                raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(program())
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
    assert not llm.engine.has_work
    assert llm.stats().cache.sequences == 0


def test_a_step_that_fails(make_llm: MakeLLM) -> None:
    llm = make_llm()
    forward = llm._adapter.forward

    def lost(*_: object) -> None:
        llm._adapter.forward = forward  # type: ignore[method-assign]
        raise ValueError("device lost")

    with llm.context(PROMPT) as context:
        expected = context.fork(1)[0].generate(max_tokens=8, temperature=0).result()
        start = context.tokens
        llm._adapter.forward = lost  # type: ignore[assignment, method-assign]
        with pytest.raises(EngineStoppedError, match="device lost"):
            context.generate(max_tokens=8).result()
        assert context.tokens == start
        assert context.generate(max_tokens=8, temperature=0).token_ids == expected.token_ids


def test_an_interrupt_cancels_what_was_run(make_llm: MakeLLM) -> None:
    llm = make_llm()
    forward = llm._adapter.forward

    def interrupted(*_: object) -> None:
        llm._adapter.forward = forward  # type: ignore[method-assign]
        raise KeyboardInterrupt

    with llm.context(PROMPT) as context:
        drafts = context.fork(3)
        pending = [d.generate(max_tokens=8, temperature=0) for d in drafts]
        llm._adapter.forward = interrupted  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.run(pending)
        assert not llm.engine.has_work
        llm.cache.check()
        assert len({d.generate(max_tokens=8, temperature=0).text for d in drafts}) == 1


def test_a_closed_llm_takes_its_contexts_along(make_llm: MakeLLM) -> None:
    llm = make_llm()
    context = llm.context(PROMPT)
    context.generate(max_tokens=4).result()
    pending = context.generate(max_tokens=4)
    llm.engine.shutdown()
    assert llm.stats().cache.sequences == 0
    with pytest.raises(EngineStoppedError):
        pending.result()
    with pytest.raises(EngineStoppedError):
        context.generate()
    context.close()
