"""Beam search with penalties, biases, bans and stop strings, as Hugging Face searches."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beams import answers, assert_same, hugging_face
from fake import check_over, make_engine, naive_beams
from tiny_model import VOCABULARY, byte_tokenizer, tiny_llama

from radixkv.decoding import BeamSearchParams
from radixkv.engine import output_of
from radixkv.errors import RequestError
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from families import build, quiet, softcap_applied

MakeLLM = Callable[..., LLM]

PLAIN = BeamSearchParams(beam_width=4, max_tokens=14, num_return_sequences=3)


def prompt(seed: int, length: int = 24) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


@pytest.fixture(scope="module")
def model() -> Any:
    """What Hugging Face searches with; the one that is served has other layers meanwhile."""
    return tiny_llama()


def bad_words_of(model: Any, params: BeamSearchParams, eos: int) -> list[tuple[int, ...]]:
    """Token sequences that the search would take: of one token, of two, and behind the prompt."""
    found = [tokens for tokens, _ in hugging_face(model, prompt(1), params, [eos])]
    first, second, third = found
    return [(prompt(1)[-1], first[0]), tuple(second[1:3]), (third[4],)]


def edits(model: Any, eos: int) -> dict[str, BeamSearchParams]:
    """One search for each kind of edit, each of which changes the result, and one for all."""
    one: dict[str, dict[str, Any]] = {
        "repetition_penalty": {"repetition_penalty": 1.4},
        "less than 1": {"repetition_penalty": 0.8},
        "bad_words_ids": {"bad_words_ids": bad_words_of(model, PLAIN, eos)},
        "logit_bias": {"logit_bias": {token: token % 7 - 3.5 for token in range(0, 250, 3)}},
        "allowed_token_ids": {"allowed_token_ids": range(0, 250, 2)},
    }
    every = {name: value for edit in one.values() for name, value in edit.items()}
    every["repetition_penalty"] = 1.2
    ends = {"stop_token_ids": random.Random(1).sample(range(250), 30), "min_tokens": 3}
    cases = {name: replace(PLAIN, **edit) for name, edit in one.items()}
    cases["min_tokens"] = replace(PLAIN, **ends)
    cases["all of them"] = replace(PLAIN, **every, **ends)
    return cases


@pytest.mark.parametrize("how", [("never", 2.0), (True, 0.5), (False, 1.0)])
def test_equals_hugging_face(make_llm: MakeLLM, model: Any, how: tuple[Any, float]) -> None:
    llm = make_llm(max_num_batched_tokens=30)
    (eos,) = llm.loaded.eos_token_ids
    early, penalty = how
    plain = answers(llm.beam_search([prompt(1)], PLAIN)[0])
    for name, case in edits(model, eos).items():
        params = replace(case, early_stopping=early, length_penalty=penalty)
        (output,) = llm.beam_search([prompt(1)], params)
        ours = answers(output)
        assert_same(ours, hugging_face(model, prompt(1), params, [eos]))
        assert [tokens for tokens, _ in ours] != [tokens for tokens, _ in plain], name


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_other_families(family: str) -> None:
    tokens = [token % 160 for token in prompt(5)]
    params = replace(
        PLAIN,
        repetition_penalty=1.3,
        bad_words_ids=[[tokens[-1], 7], [3], [5, 6, 7]],
        logit_bias={11: 2.5, 12: -1.0},
        stop_token_ids=range(20, 40),
        min_tokens=4,
    )
    with quiet():
        served = build(family)
        with softcap_applied(served):
            expected = hugging_face(served, tokens, params, [2])
        loaded = LoadedModel(
            model=served,
            tokenizer=None,
            config=served.config,
            name=family,
            eos_token_ids=(2,),
            max_model_len=256,
            vocab_size=160,
            dtype=torch.float32,
        )
        with LLM(loaded, kv_memory="1MiB", block_size=4) as llm:
            assert_same(answers(llm.beam_search([tokens], params)[0]), expected)


def test_under_preemption(make_llm: MakeLLM, model: Any) -> None:
    """What a beam has generated counts for its penalties after it was computed again."""
    llm = make_llm(22, block_size=4)
    params = replace(PLAIN, repetition_penalty=1.4)
    requests = [llm.engine.add_request(prompt(seed, 11), params) for seed in range(5)]
    while llm.engine.has_work:
        llm.engine.step()
        llm.cache.check()
    assert sum(request.num_preemptions > 0 for request in requests) > 0
    for seed, request in enumerate(requests):
        expected = hugging_face(model, prompt(seed, 11), params, llm.loaded.eos_token_ids)
        assert_same(answers(output_of(request)), expected)


def test_scores_are_edited_and_log_probabilities_the_model_s_own(
    make_llm: MakeLLM, model: Any
) -> None:
    llm = make_llm()
    # With nine tokens to choose from, some come again.
    params = replace(PLAIN, repetition_penalty=1.4, allowed_token_ids=range(9), logprobs=1)
    (output,) = llm.beam_search([prompt(1)], params)
    for completion in output.outputs:
        ids = torch.tensor([[*prompt(1), *completion.token_ids]])
        with torch.inference_mode():
            table = model(ids).logits[0].log_softmax(-1)
        behind = range(len(prompt(1)) - 1, ids.shape[1] - 1)
        own = [table[i, ids[0, i + 1]].item() for i in behind]
        seen = [int(ids[0, i + 1]) in ids[0, : i + 1].tolist() for i in behind]
        edited = [p * (1.4 if repeats else 1) for p, repeats in zip(own, seen, strict=True)]
        assert completion.logprobs is not None
        assert [entry.logprob for entry in completion.logprobs] == pytest.approx(own, abs=1e-4)
        assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-3)
        assert completion.score == pytest.approx(sum(edited) / len(own), abs=1e-4)
        assert any(seen)


# -- stop strings --------------------------------------------------------------------------------


def test_stop_strings_end_as_in_hugging_face(make_llm: MakeLLM, model: Any) -> None:
    """Stop strings of letters that the search would write; each a byte, hence a token, or two."""
    llm = make_llm()
    ended = []
    hows = [("never", 2.0), (True, 0.5), (False, 1.0)]
    for seed, (early, penalty) in itertools.product(range(5), hows):
        params = replace(PLAIN, early_stopping=early, length_penalty=penalty)  # type: ignore[arg-type]
        text = "".join(chr(97 + token % 26) for token in prompt(seed))
        tokens = list(llm.tokenize(text))
        params = replace(params, allowed_token_ids=llm.tokenize("abcdefgh"))
        (before,) = llm.beam_search(text, params)
        stop = [before.outputs[0].text[5:7], before.outputs[1].text[8], before.outputs[2].text[3]]
        stopping = replace(params, stop=stop)
        (output,) = llm.beam_search(text, stopping)
        expected = hugging_face(
            model, tokens, stopping, llm.loaded.eos_token_ids, llm.loaded.tokenizer
        )
        assert_same(answers(output), expected)
        for completion in output.outputs:
            whole = byte_tokenizer().decode(completion.token_ids)
            if completion.finish_reason == "stop":
                assert completion.stop_reason in stop
                assert whole == completion.text + str(completion.stop_reason)
                ended.append(len(completion.token_ids))
            else:
                assert whole == completion.text
                assert not any(its in whole for its in stop)
    assert len(ended) > 20
    assert {1, 2, 3, 14} <= set(ended)


def test_the_string_stays_if_asked_for_and_waits_for_min_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = replace(PLAIN, allowed_token_ids=llm.tokenize("abcd"), stop=["a", "b"])
    (output,) = llm.beam_search("some text", replace(params, include_stop_str_in_output=True))
    assert output.text[-1] in "ab"
    assert output.outputs[0].stop_reason == output.text[-1]
    (later,) = llm.beam_search("some text", replace(params, min_tokens=6))
    assert all(len(completion.token_ids) >= 6 for completion in later.outputs)
    assert any(letter in later.outputs[0].text[:5] for letter in "ab")


def test_stop_strings_need_a_tokenizer() -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add_request([1, 2], replace(PLAIN, stop="x"))
    with pytest.raises(RequestError, match="bad_words need a tokenizer"):
        engine.add_request([1, 2], replace(PLAIN, bad_words="x"))
    assert not engine.requests


def test_bad_words_are_never_written(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = replace(PLAIN, allowed_token_ids=llm.tokenize(" abcde"))
    (before,) = llm.beam_search("some text", params)
    words = [before.text[:2], before.text[4]]
    (after,) = llm.beam_search("some text", replace(params, bad_words=words))
    for completion in after.outputs:
        assert not any(word in completion.text for word in words)


# -- what leaves nothing -------------------------------------------------------------------------


def search(params: BeamSearchParams) -> Any:
    engine = make_engine()
    request = engine.add_request([1, 2, 3], params)
    while engine.has_work:
        engine.step()
        engine.cache.check()
    check_over(engine)
    return output_of(request)


def test_a_beam_that_nothing_may_follow_is_dropped() -> None:
    """Of the tokens 0 and 1, none may follow 0: what begins with 1 goes on."""
    params = BeamSearchParams(
        beam_width=2, max_tokens=4, allowed_token_ids=[0, 1], bad_words_ids=[[0, 0], [0, 1]]
    )
    output = search(params)
    assert output.error is None
    assert output.token_ids[:3] == (1, 1, 1)
    _, expected = naive_beams([1, 2, 3], params)
    assert answers(output) == [(list(beam.token_ids), score) for beam, score in expected]


def test_a_search_that_has_no_token_left_says_so() -> None:
    output = search(
        BeamSearchParams(beam_width=3, max_tokens=4, allowed_token_ids=[0], bad_words_ids=[[0, 0]])
    )
    assert isinstance(output.error, RequestError)
    assert "leave no token to sample" in str(output.error)


def test_what_has_ended_is_returned_where_nothing_may_follow() -> None:
    """Only the end token and 0 are allowed, and nothing behind 0 but the end token."""
    params = BeamSearchParams(
        beam_width=2,
        max_tokens=5,
        num_return_sequences=2,
        early_stopping="never",
        allowed_token_ids=[0, 5],
        bad_words_ids=[[0, 0]],
    )
    output = search(params)
    assert output.error is None
    assert {completion.token_ids for completion in output.outputs} == {(5,), (0, 5)}


@pytest.mark.parametrize(
    "edit",
    [
        {"logit_bias": {VOCABULARY: 1}},
        {"bad_words_ids": [[VOCABULARY]]},
        {"allowed_token_ids": [np.int64(VOCABULARY)]},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(make_llm: MakeLLM, edit: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(edit))} names token id {VOCABULARY}"):
        make_llm().beam_search([prompt(1)], replace(PLAIN, **edit))
