"""The offline front: kinds of prompts, seeds, streams that take turns, settings, interrupts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from failing import let_fail

from radixkv.decoding import SamplingParams
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.errors import ConfigError, EngineStoppedError, RequestError
from radixkv.llm import LLM
from radixkv.model.adapter import adapt
from radixkv.model.function_adapter import IMPLEMENTATION
from radixkv.model.loading import LoadedModel

MakeLLM = Callable[..., LLM]
Reference = Callable[[list[int], int], list[int]]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


def prompt(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


def test_kinds_of_prompts(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ids = [72, 101, 108, 108, 111]
    text = llm.loaded.tokenizer.decode(ids) if llm.loaded.tokenizer else ""
    ids = list(llm.tokenize(text))
    (expected,) = llm.generate(text, GREEDY)
    for one in (ids, tuple(ids), np.array(ids), np.array(ids, np.int64), range(5)):
        assert len(llm.generate(one, GREEDY)) == 1  # type: ignore[arg-type]
    mixed: list[Any] = [np.array(ids), text, ids, tuple(ids)]
    outputs = llm.generate(mixed, GREEDY)
    assert [output.token_ids for output in outputs] == [expected.token_ids] * 4
    assert [output.request_id for output in outputs] == ["0", "1", "2", "3"]
    assert len(llm.generate(np.array([ids, ids]), GREEDY)) == 2  # type: ignore[arg-type]
    assert llm.generate([], GREEDY) == []
    assert llm.chat([]) == []
    for bad in ([0.5, 0.5], [[[1]]], [None], [{"a": 1}]):
        with pytest.raises(RequestError):
            llm.generate(bad, GREEDY)  # type: ignore[arg-type]
    for keywords in ({"namespace": ["a"]}, {"retention": "ephemeral"}):
        with pytest.raises(RequestError):
            llm.generate([ids], GREEDY, **keywords)


def test_seeds(make_llm: MakeLLM) -> None:
    llm = make_llm(seed=5)
    params = SamplingParams(max_tokens=8)
    prompts = [prompt(1)] * 3
    first = [output.token_ids for output in llm.generate(prompts, params)]
    assert len(set(first)) == 3
    assert [output.token_ids for output in llm.generate(prompts, params)] == first
    mine = SamplingParams(max_tokens=8, seed=6)
    assert llm.generate(prompts, mine)[2].token_ids == first[1]
    free = make_llm()
    assert (
        free.generate(prompts, params)[0].token_ids != free.generate(prompts, params)[0].token_ids
    )


def test_a_closed_llm_leaves_the_model_as_it_was(make_llm: MakeLLM, tiny: LoadedModel) -> None:
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    kinds = [type(module) for module in tiny.model.modules()]
    llm = make_llm()
    assert [type(module) for module in tiny.model.modules()] != kinds
    llm.close()
    assert [type(module) for module in tiny.model.modules()] == kinds
    after = tiny.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_closing_again_leaves_who_serves_the_model_next_alone(
    make_llm: MakeLLM, tiny: LoadedModel
) -> None:
    first = make_llm()
    first.close()
    second = make_llm()
    first.close()
    assert tiny.model.config._attn_implementation == IMPLEMENTATION
    assert second.generate([prompt(1)], GREEDY)[0].error is None


def test_an_llm_that_cannot_be_made_leaves_the_model_as_it_was(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    kinds = [type(module) for module in tiny.model.modules()]
    for name in ("pack_linears", "Engine"):
        with monkeypatch.context() as patched:
            patched.setattr(f"radixkv.llm.{name}", fail)
            if name == "Engine":
                patched.setattr(f"radixkv.llm.{name}", lambda *_, **__: fail())
            with pytest.raises(MemoryError):
                LLM(tiny, kv_memory="1MiB")
        assert [type(module) for module in tiny.model.modules()] == kinds
        assert tiny.model.config._attn_implementation != IMPLEMENTATION


def test_logprobs(make_llm: MakeLLM, tiny: LoadedModel) -> None:
    llm = make_llm(max_num_batched_tokens=7)
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=3)
    (output,) = llm.generate([prompt(2)], params)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == 5
    llm.close()
    ids = torch.tensor([[*prompt(2), *output.token_ids]])
    with torch.inference_mode():
        table = tiny.model(input_ids=ids).logits[0, 19:-1].log_softmax(-1)
    for position, (token, found) in enumerate(zip(output.token_ids, logprobs, strict=True)):
        assert found.rank == 1
        assert found.logprob == pytest.approx(float(table[position, token]), abs=1e-4)
        assert found.top[0] == (token, found.logprob)


@pytest.mark.parametrize("room", [3, 6])
def test_context_full_together_with_a_stop(make_llm: MakeLLM, room: int) -> None:
    """The stop is the reason, if it comes with the last token that fits."""
    (free,) = make_llm().generate([prompt(3)], GREEDY)
    stop = SamplingParams(max_tokens=50, temperature=0, stop_token_ids=[free.token_ids[2]])
    (output,) = make_llm(max_model_len=20 + room).generate([prompt(3)], stop)
    assert output.token_ids == free.token_ids[:3]
    assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", free.token_ids[2])


def test_streams_take_turns(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    outside = llm.engine.add_request(prompt(9), GREEDY, request_id="0")
    streams = [llm.stream([prompt(1), prompt(2)], GREEDY), llm.stream([prompt(3)], GREEDY)]
    got: list[dict[str, list[int]]] = [{}, {}]
    open_streams = {0, 1}
    while open_streams:
        for which in sorted(open_streams):
            delta = next(streams[which], None)
            if delta is None:
                open_streams.remove(which)
            else:
                got[which].setdefault(delta.request_id, []).append(delta.token_id)
    assert got == [
        {"0": reference(prompt(1), 6), "1": reference(prompt(2), 6)},
        {"0": reference(prompt(3), 6)},
    ]
    while llm.engine.has_work:
        llm.engine.step()
    assert outside.branches[0].stream.token_ids == reference(prompt(9), 6)


def test_a_callback_that_raises_ends_its_requests_at_once(make_llm: MakeLLM) -> None:
    llm = make_llm()

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        llm.generate([prompt(1), prompt(2)], GREEDY, on_token=fail)
    assert caught.tb is not None
    assert not llm.engine.has_work


def test_a_tokenizer_that_fails_fails_alone(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    bad = llm.engine.add_request(prompt(1), SamplingParams(n=2, max_tokens=6, seed=1))
    good = llm.engine.add_request(prompt(2), GREEDY)
    stream = bad.branches[1].stream
    let_fail(stream, lambda: len(stream.token_ids) == 3)
    while llm.engine.has_work:
        llm.engine.step()
        llm.cache.check()
    assert isinstance(bad.error, EngineStoppedError)
    assert "no such token" in str(bad.error)
    assert good.branches[0].stream.token_ids == reference(prompt(2), 6)


def test_bad_settings_are_refused_before_loading(tiny: LoadedModel) -> None:
    for settings in (
        {"kv_memory": "lots"},
        {"block_size": 0},
        {"eviction": "best"},
        {"max_num_seqs": 0},
    ):
        with pytest.raises(ConfigError):
            LLM("no/such-model", **settings)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="seed"):
        LLM("no/such-model", seed=-1)
    # A failure after the model was taken gives it back.
    with pytest.raises(ConfigError, match="no block"):
        LLM(tiny, kv_memory=10)
    adapt(tiny.model).close()


def test_interrupts_wait_for_the_end_of_a_step(make_llm: MakeLLM) -> None:
    llm = make_llm()
    sample = llm.engine._advance

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return sample(*arguments)

    llm.engine._advance = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(1)], GREEDY)
    llm.cache.check()
    assert not llm.engine.has_work
    llm.engine._advance = sample  # type: ignore[method-assign]
    assert llm.generate([prompt(1)], GREEDY)[0].num_cached_tokens == 20


def test_deferred_interrupts() -> None:
    seen = []
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with DeferredInterrupts() as interrupts:
            with interrupts.allowed():
                seen.append("allowed")
            os.kill(os.getpid(), signal.SIGINT)
            seen.append("held")
            with interrupts.allowed():
                seen.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["allowed", "held"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_broken_law_stops_the_engine(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(llm.engine.scheduler, "schedule", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([prompt(1)], GREEDY)
    with pytest.raises(EngineStoppedError):
        llm.generate([prompt(1)], GREEDY)
