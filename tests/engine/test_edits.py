"""Edited logits through the whole engine: alone, in a batch, by branches, after a preemption."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake import VOCABULARY, check_over, make_engine, naive
from transformers import PreTrainedModel

from radixkv.decoding import SamplingParams
from radixkv.errors import NumericalError, RequestError
from radixkv.llm import LLM
from radixkv.model.loading import LoadedModel

MakeLLM = Callable[..., LLM]
EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    {"logit_bias": {7: 8.0, 9: -100, 11: 6.5}},
    {"bad_words_ids": [[7], [40, 41]], "repetition_penalty": 0.8},
    {"allowed_token_ids": list(range(97, 123)), "frequency_penalty": 1.0},
    {},
    {"bad_words": ["a", "be"], "presence_penalty": -1.0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 4.0}},
]


def params(index: int, **given: Any) -> SamplingParams:
    method = {"temperature": 0} if index % 2 else {"temperature": 0.9, "top_p": 0.95}
    return SamplingParams(
        max_tokens=20, seed=index, ignore_eos=True, **(EDITS[index] | method | given)
    )


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(250) for _ in range(20)]
    return [shared + [rng.randrange(250) for _ in range(rng.randint(1, 20))] for _ in EDITS]


def tokens(llm: LLM, prompts: list[list[int]], each: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, each)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [[list(branch.token_ids) for branch in output.outputs] for output in outputs]


def test_alone_in_a_batch_and_after_preemption(make_llm: MakeLLM) -> None:
    """In float32 the same tokens, whoever else is in the batch and however a request came back."""
    each, texts = [params(i) for i in range(len(EDITS))], prompts(1)
    llm = make_llm()
    alone = [tokens(llm, [text], [its])[0] for text, its in zip(texts, each, strict=True)]
    assert tokens(llm, texts, each) == alone
    others = [*reversed(each[1:]), each[0]]
    assert tokens(llm, [texts[0]] * 8, [each[0], *others[:7]])[0] == alone[0]
    plain = [
        replace(
            its, **{name: SamplingParams.__dataclass_fields__[name].default for name in EDITS[i]}
        )
        for i, its in enumerate(each)
    ]
    changed = [a != b for a, b in zip(tokens(llm, texts, plain), alone, strict=True)]
    assert changed == [bool(edit) for edit in EDITS]
    crowded = make_llm(num_blocks=9)
    assert tokens(crowded, texts, each) == alone
    assert crowded.stats().engine.preemptions > 0


@pytest.mark.parametrize("num_blocks", [256, 10])
def test_branches_go_their_own_way_and_equal_a_run_alone(
    make_llm: MakeLLM, num_blocks: int
) -> None:
    """Each branch counts its own tokens: with penalties, too, it is what its number says."""
    texts = prompts(2)[:3]
    each = [params(i, n=3, temperature=0.9) for i in (0, 1, 7)]
    llm = make_llm()
    found = tokens(llm, texts, each)
    for branches in found:
        assert len({tuple(branch) for branch in branches}) == 3
    for text, its, branches in zip(texts, each, found, strict=True):
        assert tokens(llm, [text], [its])[0] == branches
        assert tokens(llm, [text], [replace(its, n=1)])[0] == branches[:1]
        assert tokens(llm, [text], [replace(its, n=2)])[0] == branches[:2]
    tight = make_llm(num_blocks=num_blocks)
    assert tokens(tight, texts, each) == found
    assert (tight.stats().engine.preemptions > 0) == (num_blocks == 10)


@torch.inference_mode()
def continued(model: PreTrainedModel, prompt: list[int], **given: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_runs_are_those_of_hugging_face(make_llm: MakeLLM, tiny: LoadedModel) -> None:
    llm = make_llm()
    prompt = prompts(3)[0]
    plain = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    (free,) = tokens(llm, [prompt], [plain])[0]
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
        # One word bans a token of the free run, the other what follows two of it.
        (
            {"bad_words_ids": [free[:1], free[3:6]]},
            {"bad_words_ids": [free[:1], free[3:6]]},
        ),
        ({"logit_bias": dict.fromkeys(free[:3], -100)}, {"suppress_tokens": free[:3]}),
        (
            {"logit_bias": {free[0]: -3, 5: 6.5}},
            {"sequence_bias": [[[free[0]], -3.0], [[5], 6.5]]},
        ),
    ]
    found = [tokens(llm, [prompt], [replace(plain, **ours)])[0][0] for ours, _ in kinds]
    llm.close()  # It gives the model its own layers back.
    assert found == [continued(tiny.model, prompt, **theirs) for _, theirs in kinds]
    assert free not in found


def test_bad_words_never_appear_in_the_text(make_llm: MakeLLM) -> None:
    llm = make_llm()
    letters = llm.tokenize("abc ")
    free = SamplingParams(max_tokens=200, seed=1, temperature=1.5, allowed_token_ids=letters)
    kept = replace(free, bad_words=["ab", "c a"])
    (before,), (after,) = llm.generate(["abc"], free), llm.generate(["abc"], kept)
    assert "ab" in before.text
    assert "c a" in before.text
    assert "ab" not in after.text
    assert "c a" not in after.text
    assert set(after.text) == set("abc ")
    assert len(after.token_ids) == 200


def test_refused_at_the_door(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    for given in (
        {"logit_bias": {259: 1}},
        {"allowed_token_ids": [1, 259]},
        {"bad_words_ids": [[1, 259]]},
        {"stop_token_ids": [259]},
    ):
        name = next(iter(given))
        message = f"{name} names token id 259, which is outside the vocabulary of 259 tokens"
        for door in (engine.check_request, engine.add_request):
            with pytest.raises(RequestError, match=message):
                door([1, 2], SamplingParams(**given))  # type: ignore[arg-type]
    assert not engine.has_work
    with pytest.raises(RequestError, match="give bad_words_ids instead"):
        make_engine().check_request([1, 2], SamplingParams(bad_words="x"))


def test_a_request_that_leaves_no_token_fails_alone_and_says_why() -> None:
    engine = make_engine()
    none_left = SamplingParams(allowed_token_ids=[1, 2], bad_words_ids=[[2], [1, 1]], seed=3)
    bad = engine.add_request([1, 2, 3], none_left)
    good = engine.add_request([1, 2, 4], SamplingParams(repetition_penalty=1.5, seed=4))
    while engine.has_work:
        engine.step()
        engine.cache.check()
    assert bad.branches[0].stream.token_ids == [1]
    assert isinstance(bad.error, RequestError)
    assert not isinstance(bad.error, NumericalError)
    assert "leave no token to sample; allow more, or forbid less" in str(bad.error)
    assert good.branches[0].stream.token_ids == naive([1, 2, 4], good.params, 4)[0]
    # The model's own numbers were sound, so what was computed stays cached.
    assert engine.cache.match([1, 2, 3]) == 3
    check_over(engine)


def test_only_allowed_tokens_until_the_end_token_is_allowed() -> None:
    engine = make_engine()
    only = SamplingParams(allowed_token_ids=range(VOCABULARY - 1), max_tokens=30, seed=1)
    request = engine.add_request([1, 2, 3], only)
    while engine.has_work:
        engine.step()
    stream = request.branches[0].stream
    assert (len(stream.token_ids), stream.finish_reason) == (30, "length")
    check_over(engine)
