"""Plain completions through OpenAI's own client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from clients import client_of
from openai import OpenAI

from radixkv.decoding import SamplingParams
from radixkv.llm import LLM
from radixkv.server.service import Service

PROMPTS = ["Once upon a time", "The colour of snow"]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}

Serve = Callable[..., tuple[str, Service]]


@pytest.fixture
def client(serve: Serve) -> Iterator[OpenAI]:
    url, _ = serve()
    with client_of(url) as client:
        yield client


def joined(chunks: list[Any], index: int) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return "".join(choice.text for choice in choices if choice.index == index)


def test_batches_streams_and_the_offline_texts_agree(
    serve: Serve, make_llm: Callable[..., LLM]
) -> None:
    asked: dict[str, Any] = {"n": 2, "seed": 9, "max_tokens": 20, "temperature": 0.7}
    url, _ = serve()
    with client_of(url) as client:
        whole = client.completions.create(model="tiny", prompt=PROMPTS, **asked)
        chunks = list(client.completions.create(model="tiny", prompt=PROMPTS, stream=True, **asked))
    texts = [choice.text for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [joined(chunks, index) for index in range(4)] == texts
    outputs = make_llm().generate(PROMPTS, SamplingParams(**asked))
    assert texts == [one.text for output in outputs for one in output.outputs]
    assert whole.object == "text_completion"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(map(len, PROMPTS))
    assert whole.usage.completion_tokens == sum(
        len(one.token_ids) for output in outputs for one in output.outputs
    )


def test_sixteen_tokens_unless_told(client: OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt="Once", extra_body={"ignore_eos": True}, max_tokens=None
    )
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16


@pytest.mark.parametrize("many", [False, True])
def test_token_ids_are_prompts(client: OpenAI, many: bool) -> None:
    told = httpx.post(str(client.base_url.join("/tokenize")), json={"prompt": PROMPTS[0]}).json()
    assert told["count"] == len(told["tokens"]) == len(PROMPTS[0])
    assert told["max_model_len"] == 512
    ids = [told["tokens"], told["tokens"][:4]] if many else told["tokens"]
    by_text = client.completions.create(prompt=PROMPTS[0], **GREEDY)
    by_ids = client.completions.create(prompt=ids, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert len(by_ids.choices) == 1 + many
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens_details is not None
    shared = len(PROMPTS[0]) + 4 * many
    assert by_ids.usage.prompt_tokens_details.cached_tokens == shared


@pytest.mark.parametrize("stream", [False, True])
def test_what_stopped_a_text_is_told(
    serve: Serve, make_llm: Callable[..., LLM], stream: bool
) -> None:
    offline = make_llm().generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12))[0]
    text, token = offline.outputs[0].text, offline.outputs[0].token_ids[3]
    url, _ = serve()
    for more, reason in (
        ({"stop": [text[2:4]]}, text[2:4]),
        ({"extra_body": {"stop_token_ids": [token]}}, token),
        ({}, None),
    ):
        settings: dict[str, Any] = {**GREEDY, **more, "stream": stream}
        with client_of(url) as client:
            told = client.completions.create(prompt=PROMPTS[0], **settings)
            choices = [chunk.choices[0] for chunk in told] if stream else told.choices
        ends = [its for its in choices if its.finish_reason is not None]
        assert [its.finish_reason for its in ends] == ["length" if reason is None else "stop"]
        assert [its.model_dump()["stop_reason"] for its in ends] == [reason]


def test_logprobs_stand_in_columns(serve: Serve, make_llm: Callable[..., LLM]) -> None:
    url, _ = serve()
    with client_of(url) as client:
        whole = client.completions.create(prompt=PROMPTS[0], logprobs=2, **GREEDY)
        chunks = list(
            client.completions.create(prompt=PROMPTS[0], logprobs=2, stream=True, **GREEDY)
        )
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    output = make_llm().generate(PROMPTS[0], params)[0]
    entries = output.outputs[0].logprobs
    assert entries is not None
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == pytest.approx([its.logprob for its in entries], rel=1e-4)
    assert told.tokens is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    for its, token, likely in zip(entries, told.tokens, told.top_logprobs, strict=True):
        assert likely[token] == pytest.approx(its.logprob, rel=1e-4)
        assert sorted(likely.values()) == pytest.approx(
            sorted({logprob for _, logprob in its.top} | {its.logprob}), rel=1e-4
        )
    lengths = [len(token) for token in told.tokens]
    assert told.text_offset == [sum(lengths[:place]) for place in range(len(lengths))]
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "text_offset"):
        streamed = [item for part in parts if part for item in getattr(part, name)]
        assert streamed == getattr(told, name)


def test_echo_gives_the_prompt_back(client: OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPTS, **GREEDY)
    echoed = client.completions.create(prompt=PROMPTS, echo=True, **GREEDY)
    stream = client.completions.create(prompt=PROMPTS, echo=True, stream=True, **GREEDY)
    texts = [prompt + one.text for prompt, one in zip(PROMPTS, plain.choices, strict=True)]
    assert [one.text for one in echoed.choices] == texts
    chunks = list(stream)
    assert [joined(chunks, index) for index in range(2)] == texts
    ids = httpx.post(str(client.base_url.join("/tokenize")), json={"prompt": "Once"}).json()
    by_ids = client.completions.create(prompt=ids["tokens"], echo=True, **GREEDY)
    by_text = client.completions.create(prompt="Once", echo=True, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.choices[0].text.startswith("Once")


def test_a_prompt_alone_is_scored(client: OpenAI) -> None:
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 0, "model": "tiny"}
    told = client.completions.create(prompt=PROMPTS[0], **asked)
    choice = told.choices[0]
    assert choice.text == PROMPTS[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list(PROMPTS[0])
    scores: Any = choice.logprobs.token_logprobs
    assert scores[0] is None
    assert told.usage is not None
    assert told.usage.completion_tokens == 0
    longer = client.completions.create(prompt=PROMPTS[0], **asked | {"max_tokens": 3})
    assert longer.choices[0].logprobs is not None
    assert longer.choices[0].logprobs.token_logprobs is not None
    begin = longer.choices[0].logprobs.token_logprobs[1 : len(PROMPTS[0])]
    assert begin == pytest.approx(scores[1:], rel=1e-4)
    assert len(longer.choices[0].logprobs.token_logprobs) == len(PROMPTS[0]) + 3


def test_scores_of_a_prompt_are_a_contexts(serve: Serve, make_llm: Callable[..., LLM]) -> None:
    url, _ = serve()
    with client_of(url) as client:
        told = client.completions.create(
            model="tiny", prompt=PROMPTS[0], echo=True, logprobs=0, max_tokens=0
        )
    assert told.choices[0].logprobs is not None
    scores: Any = told.choices[0].logprobs.token_logprobs
    with make_llm().context(PROMPTS[0][0]) as context:
        score = context.score(PROMPTS[0][1:]).result()
    assert sum(scores[1:]) == pytest.approx(score.total, rel=1e-4)
    assert math.isfinite(score.total)


def test_models_and_tokens(client: OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.owned_by) == ("tiny", "radixkv")
    assert client.models.retrieve("tiny") == card
    base = client.base_url
    told = httpx.post(
        str(base.join("/tokenize")), json={"prompt": "hé", "return_token_strs": True}
    ).json()
    assert told["token_strs"] == ["h", "\\xc3", "\\xa9"]
    back = httpx.post(str(base.join("/detokenize")), json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": "hé"}
    chat = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    counted = httpx.post(str(base.join("/tokenize")), json=chat).json()
    assert counted["count"] == len("<user>hi\n")
