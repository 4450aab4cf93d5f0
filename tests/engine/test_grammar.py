"""Grammars through the whole engine: alone, in a batch, by branches, after a preemption."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake import EOS, VOCABULARY, check_over, logits_of, make_engine, words_of
from grammars import tokenizer_of

from radixkv.decoding import (
    BeamSearchParams,
    GrammarCompiler,
    GrammarLimits,
    SamplingParams,
    SamplingRow,
    TextStream,
    sample,
)
from radixkv.engine import Engine
from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.llm import LLM

MakeLLM = Callable[..., LLM]
TOKENIZER = tokenizer_of("a", "b", "ab", "ba", "bb")
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["x", "yy"]},
    },
    "required": ["name", "age", "kind"],
}
KINDS: list[dict[str, Any]] = [
    {"json_schema": RECORD},
    {"regex": "[0-9]{3}-[a-f]+"},
    {},
    {"grammar": 'root ::= "(" root ")" | "x" | [0-9]'},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}},
    {"repetition_penalty": 1.4},
]


def make(**settings: Any) -> Engine:
    """An engine over the fake model, whose six tokens write "a" and "b"."""
    grammars = GrammarCompiler(TOKENIZER, VOCABULARY)
    return make_engine(tokenizer=TOKENIZER, grammars=grammars, **settings)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.cache.check()


def naive(prompt: list[int], params: SamplingParams, seed: int, branch: int = 0) -> list[int]:
    """What a model without a cache says: before each token the whole text is matched anew."""
    assert params.constraint is not None
    grammar = GrammarCompiler(TOKENIZER, VOCABULARY).compile(params.constraint)
    said: list[int] = []
    while True:
        stream = TextStream(params, TOKENIZER, eos_token_ids=[EOS], grammar=grammar)
        for token in said:
            stream.push(token)
        if stream.finish_reason is not None:
            return said
        assert stream.grammar is not None
        tokens = np.array([*prompt, *said], np.int64)
        row = SamplingRow(params, seed, branch, len(tokens), allowed=stream.grammar.allowed)
        said.append(int(sample(logits_of(words_of(tokens))[None], [row]).token_ids[0]))


def texts(llm: LLM, prompts: Any, params: Any) -> list[list[str]]:
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [[branch.text for branch in output.outputs] for output in outputs]


def check_record(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "kind"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 4
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 99
    assert value["kind"] in ("x", "yy")


def params(index: int, **given: Any) -> SamplingParams:
    method = {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.95}
    return SamplingParams(max_tokens=60, seed=index, **(KINDS[index] | method | given))


def prompts() -> list[list[int]]:
    shared = [(7 * place) % 250 for place in range(20)]
    return [shared + [(11 * place + index) % 250 for place in range(9)] for index in range(6)]


# -- the tiny model ----------------------------------------------------------------------------


def test_json_of_a_random_model_is_valid_at_any_seed(make_llm: MakeLLM) -> None:
    llm = make_llm()
    each = [
        SamplingParams(json_schema=RECORD, temperature=1.0, max_tokens=80, seed=seed)
        for seed in range(40)
    ]
    found = llm.generate(["Record:"] * len(each), each)
    for output in found:
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        check_record(output.text)
    assert len({output.text for output in found}) > 30


def test_branches_differ_and_each_obeys(make_llm: MakeLLM) -> None:
    llm = make_llm()
    branches = SamplingParams(json_schema=RECORD, n=8, max_tokens=80, seed=3)
    (found,) = texts(llm, "Record:", branches)
    assert len(set(found)) == 8
    for text in found:
        check_record(text)
    engine = llm.stats().engine
    assert engine.prefilled_tokens == len("Record:")
    assert texts(llm, "Record:", replace(branches, n=3)) == [found[:3]]


def test_alone_in_a_batch_in_chunks_and_after_preemption(make_llm: MakeLLM) -> None:
    each = [params(index) for index in range(len(KINDS))]
    llm = make_llm()
    alone = [texts(llm, [prompt], [its])[0] for prompt, its in zip(prompts(), each, strict=True)]
    assert texts(llm, prompts(), each) == alone
    mixed = [each[0], *([each[2]] * 3), each[1]]
    assert texts(llm, [prompts()[0]] * 4 + [prompts()[1]], mixed)[::4] == alone[:2]
    chunked = make_llm(max_num_batched_tokens=7)
    assert texts(chunked, prompts(), each) == alone
    crowded = make_llm(num_blocks=8)
    assert texts(crowded, prompts(), each) == alone
    assert crowded.stats().engine.preemptions > 0
    check_record(alone[0][0])
    assert re.fullmatch("[0-9]{3}-[a-f]+", alone[1][0])
    assert re.fullmatch(r"\(*[x0-9]\)*|\(+", alone[3][0])


def test_rows_without_a_grammar_say_what_they_said(make_llm: MakeLLM) -> None:
    llm = make_llm()
    free = SamplingParams(max_tokens=20, seed=1, temperature=0.8, logprobs=1)
    (before,) = llm.generate("Some text", free)
    (after, _) = llm.generate(["Some text"] * 2, [free, params(0)])
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.outputs[0].text == before.outputs[0].text


def test_logprobs_are_the_model_s_own(make_llm: MakeLLM) -> None:
    llm = make_llm()
    digits = SamplingParams(regex="[0-9]{6}", temperature=0, max_tokens=9, logprobs=0)
    (output,) = llm.generate("Text:", digits)
    assert output.outputs[0].logprobs is not None
    assert max(each.rank for each in output.outputs[0].logprobs) > 10


def test_bad_grammars_leave_the_engine_serving(make_llm: MakeLLM) -> None:
    llm = make_llm(grammar_limits=GrammarLimits(max_size=100))
    bad: list[dict[str, Any]] = [
        {"regex": "(a"},
        {"grammar": "root ::= word"},
        {"json_schema": {"type": "nope"}},
        {"regex": "a" * 101},
        {"grammar": "root ::= root"},
    ]
    for given in bad:
        for door in (llm.engine.check_request, llm.engine.add_request):
            with pytest.raises(RequestError, match=next(iter(given))):
                door([1, 2], SamplingParams(**given))  # type: ignore[arg-type]
        # None of a batch is started if one is refused.
        with pytest.raises(RequestError):
            llm.generate(["a", "b"], [SamplingParams(), SamplingParams(**given)])
    assert not llm.engine.has_work
    assert texts(llm, "a", SamplingParams(regex="yes", max_tokens=5)) == [["yes"]]


def test_beams_follow_no_grammar() -> None:
    with pytest.raises(UnsupportedParameterError, match="beams follow no grammar"):
        BeamSearchParams(beam_width=2, json_schema={})  # type: ignore[call-arg]


# -- the fake model ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [200, 16])
def test_every_text_is_what_a_model_without_cache_says(num_blocks: int) -> None:
    engine = make(num_blocks=num_blocks, block_size=2, max_num_batched_tokens=5)
    patterns = ["(a|bb)*", "a{3,6}b*", "(ab)+", "[ab]{8}"]
    requests = [
        engine.add_request(
            [1, 2, 3, index % 3],
            SamplingParams(
                regex=patterns[index % 4],
                max_tokens=12,
                seed=index,
                n=1 + index % 2,
                ignore_eos=index % 3 == 0,
            ),
        )
        for index in range(12)
    ]
    run(engine)
    for request in requests:
        for branch in request.branches:
            said = naive(request.prompt.tolist(), request.params, request.seed, branch.index)
            assert branch.stream.token_ids == said
            ended = branch.stream.finish_reason
            matched = re.fullmatch(str(request.params.regex), branch.stream.text)
            assert matched if ended == "stop" else ended == "length"
    assert (engine.counters.preemptions > 0) == (num_blocks == 16)
    check_over(engine)


def test_cancelled_at_any_step_nothing_is_left() -> None:
    for steps in range(8):
        engine = make()
        request = engine.add_request(
            [1, 2, 3], SamplingParams(regex="[ab]{20}", max_tokens=20, n=3, seed=1)
        )
        other = engine.add_request([1, 2, 4], SamplingParams(regex="b+a", max_tokens=9, seed=2))
        for _ in range(steps):
            engine.step()
        assert engine.abort(request.request_id)
        run(engine)
        assert other.branches[0].stream.token_ids == naive([1, 2, 4], other.params, 2)
        check_over(engine)


def test_a_grammar_that_the_other_edits_leave_nothing_of_fails_alone() -> None:
    engine = make()
    bad = engine.add_request(
        [1, 2, 3], SamplingParams(regex="ab", bad_words_ids=[[1], [2]], seed=1)
    )
    good = engine.add_request([1, 2, 4], SamplingParams(regex="[ab]+", max_tokens=5, seed=2))
    run(engine)
    assert isinstance(bad.error, RequestError)
    assert "grammar, allowed_token_ids, bad_words" in str(bad.error)
    assert bad.branches[0].stream.token_ids == [0]
    assert good.branches[0].stream.token_ids == naive([1, 2, 4], good.params, 2)
    check_over(engine)


def test_a_fault_of_one_grammar_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    bad = engine.add_request([1, 2, 3], SamplingParams(regex="[ab]{9}", seed=1))
    good = engine.add_request([1, 2, 4], SamplingParams(regex="[ab]{4}", seed=2))
    state = bad.branches[0].stream.grammar

    class Broken:
        def accept_token(self, token: int) -> bool:
            return False

    assert state is not None
    monkeypatch.setattr(state, "_matcher", Broken())
    run(engine)
    assert "the grammar does not allow token" in str(bad.error)
    assert good.error is None
    assert len(good.branches[0].stream.text) == 4
    check_over(engine)


def test_an_engine_without_a_tokenizer_refuses() -> None:
    engine = make_engine()
    with pytest.raises(UnsupportedParameterError, match="the model has no tokenizer"):
        engine.add_request([1, 2], SamplingParams(regex="a"))
    check_over(engine)
