"""Chats through OpenAI's own client: texts, streams, counts and what surrounds them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clients import client_of
from openai import AsyncOpenAI, OpenAI

from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.llm import LLM
from radixkv.server.service import Service

TALK: list[Any] = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the colour of snow?"},
]
RENDERED = "<system>You answer in one word.\n<user>What is the colour of snow?\n<assistant>"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}

Serve = Callable[..., tuple[str, Service]]


@pytest.fixture
def client(serve: Serve) -> Iterator[OpenAI]:
    url, _ = serve()
    with client_of(url) as client:
        yield client


def offline(make_llm: Callable[..., LLM], params: Any, talk: Any = TALK) -> Any:
    """The same without a server, on a cold engine."""
    return make_llm().chat(talk, params)[0]


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_stream_is_the_whole_is_the_offline_text(
    serve: Serve, make_llm: Callable[..., LLM]
) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40, "n": 3}
    url, _ = serve()
    with client_of(url) as client:
        whole = client.chat.completions.create(model="tiny", messages=TALK, **params)
        chunks = list(
            client.chat.completions.create(model="tiny", messages=TALK, stream=True, **params)
        )
    texts = [choice.message.content for choice in whole.choices]
    assert [joined(chunks, index) for index in range(3)] == texts
    endings = {
        choice.index: choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason
    }
    assert [endings[index] for index in range(3)] == [one.finish_reason for one in whole.choices]
    reference = offline(make_llm, SamplingParams(**params))
    assert [one.text for one in reference.outputs] == texts
    assert whole.object == "chat.completion"
    assert whole.model == "tiny"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"


def test_the_async_client_and_many_at_once(serve: Serve) -> None:
    url, service = serve()

    async def main() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    messages=[*TALK, {"role": "user", "content": str(number % 3)}],
                    stream=True,
                    **GREEDY,
                )
                return joined([chunk async for chunk in stream])

            return list(await asyncio.gather(*map(one, range(12))))

    texts = asyncio.run(main())
    assert texts[:3] == texts[3:6] == texts[6:9] == texts[9:]
    assert len(set(texts)) == 3
    assert service.worker.num_unfinished == 0


def test_usage_is_exact(client: OpenAI) -> None:
    first = client.chat.completions.create(messages=TALK, **GREEDY).usage
    assert first is not None
    assert first.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert first.completion_tokens == 24
    assert first.total_tokens == first.prompt_tokens + 24
    longer = [*TALK[:1], {"role": "user", "content": "What is the colour of grass?"}]
    stream = client.chat.completions.create(
        messages=longer, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    # A byte a token: exactly what the two conversations have in common.
    common = "<system>You answer in one word.\n<user>What is the colour of "
    assert usage.prompt_tokens_details.cached_tokens == len(common)
    assert usage.prompt_tokens == first.prompt_tokens + len("grass") - len("snow")


def test_usage_as_it_grows(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(messages=TALK, stream=True, stream_options=options, **GREEDY)
    )
    told = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert told == sorted(told)
    assert told[-1] == told[-2] == 24


def test_without_max_tokens_an_answer_may_fill_the_context(serve: Serve) -> None:
    url, service = serve()
    with client_of(url) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=TALK, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.usage is not None
    assert whole.usage.total_tokens == service.llm.engine.max_model_len == 512
    assert whole.choices[0].finish_reason == "length"


def test_without_max_tokens_an_answer_stays_within_the_pool(serve: Serve) -> None:
    url, _ = serve(num_blocks=8)
    with client_of(url) as client:
        whole = client.chat.completions.create(
            model="tiny", messages=TALK, temperature=0, n=2, extra_body={"ignore_eos": True}
        )
        again = client.chat.completions.create(
            model="tiny", messages=TALK, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.usage is not None
    assert again.usage is not None
    # 4 whole blocks of the prompt are shared, which leaves 2 for each of two; the last token is
    # sampled, but never computed.
    assert whole.usage.prompt_tokens == len(RENDERED)
    assert whole.usage.completion_tokens == 2 * (6 * 16 + 1 - len(RENDERED))
    assert again.usage.total_tokens == 8 * 16 + 1


def test_logprobs_are_the_engines(serve: Serve, make_llm: Callable[..., LLM]) -> None:
    url, _ = serve()
    with client_of(url) as client:
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, **GREEDY}
        whole = client.chat.completions.create(messages=TALK, **asked)
        chunks = list(client.chat.completions.create(messages=TALK, stream=True, **asked))
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries is not None
    output = offline(make_llm, SamplingParams(temperature=0, max_tokens=24, logprobs=2))
    expected = output.outputs[0].logprobs
    assert [entry.logprob for entry in entries] == pytest.approx(
        [its.logprob for its in expected], rel=1e-4
    )
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
        pytest.approx([logprob for _, logprob in its.top], rel=1e-4) for its in expected
    ]
    # Bytes make the text, also where a character has several tokens.
    raw = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert raw.decode(errors="replace") == whole.choices[0].message.content
    streamed = [
        entry.model_dump(exclude={"logprob", "top_logprobs"})
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert streamed == [entry.model_dump(exclude={"logprob", "top_logprobs"}) for entry in entries]


def test_prompt_logprobs_come_by_token(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        messages=TALK, extra_body={"prompt_logprobs": 1}, **GREEDY
    )
    entries = whole.model_dump()["prompt_logprobs"]
    assert whole.usage is not None
    assert len(entries) == whole.usage.prompt_tokens
    assert entries[0] is None
    names = [list(entry.values())[-1]["decoded_token"] for entry in entries[1:]]
    assert "".join(names).startswith("system>You answer")
    assert all(1 in {its["rank"] for its in entry.values()} for entry in entries[1:])


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}},
            }
        },
        {"extra_body": {"guided_json": {"type": "object"}}},
        {"extra_body": {"structured_outputs": {"json_object": True}}},
    ],
)
def test_json_is_json(client: OpenAI, asked: Any) -> None:
    # A random model's JSON may be endless: what came must be the beginning of an object.
    settings = GREEDY | {"max_tokens": 200}
    whole = client.chat.completions.create(messages=TALK, **settings, **asked)
    text = whole.choices[0].message.content
    assert text is not None
    if whole.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.startswith("{")


@pytest.mark.parametrize(
    ("asked", "texts"),
    [
        ({"guided_regex": "(ab){3}"}, {"ababab"}),
        ({"guided_grammar": 'root ::= "x" "y"'}, {"xy"}),
        ({"guided_choice": ["red", 'a "quoted"\nline']}, {"red", 'a "quoted"\nline'}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "[0-9]"}}, set("0123456789")),
    ],
)
def test_what_is_guided_obeys(client: OpenAI, asked: dict[str, Any], texts: set[str]) -> None:
    whole = client.chat.completions.create(messages=TALK, extra_body=asked, **GREEDY)
    assert whole.choices[0].message.content in texts
    assert whole.choices[0].finish_reason == "stop"


def test_beams_are_the_offline_beams(serve: Serve, make_llm: Callable[..., LLM]) -> None:
    beams = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5}
    url, _ = serve()
    with client_of(url) as client:
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "n": 2, "extra_body": beams}
        whole = client.chat.completions.create(messages=TALK, **asked)
        chunks = list(client.chat.completions.create(messages=TALK, stream=True, **asked))
    params = BeamSearchParams(
        beam_width=4, num_return_sequences=2, max_tokens=12, length_penalty=0.5
    )
    texts = [one.text for one in offline(make_llm, params).outputs]
    assert [choice.message.content for choice in whole.choices] == texts
    assert [joined(chunks, index) for index in range(2)] == texts


def test_every_other_field_reaches_the_engine(serve: Serve, make_llm: Callable[..., LLM]) -> None:
    given: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "max_tokens": 30,
        "n": 2,
    }
    more: dict[str, Any] = {
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "min_tokens": 4,
        "best_of": 3,
        "bad_words": ["a"],
        "stop_token_ids": [70],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": list(range(60, 259)),
    }
    url, _ = serve()
    with client_of(url) as client:
        whole = client.chat.completions.create(
            model="tiny",
            messages=TALK,
            logit_bias={"65": -100},
            stop=["q", "zz"],
            extra_body=more,
            **given,
        )
    params = SamplingParams(**given, **more, logit_bias={65: -100}, stop=["q", "zz"])
    expected = offline(make_llm, params)
    assert [one.message.content for one in whole.choices] == [one.text for one in expected.outputs]
    assert [one.model_dump()["stop_reason"] for one in whole.choices] == [
        one.stop_reason for one in expected.outputs
    ]


def test_parts_of_text_and_null_fields(client: OpenAI) -> None:
    parts: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "You answer in one word."}]},
        {"role": "user", "name": None, "content": TALK[1]["content"]},
    ]
    first = client.chat.completions.create(messages=TALK, **GREEDY)
    second = client.chat.completions.create(messages=parts, **GREEDY)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens
    # What we answered may be sent back as it is.
    answer: Any = first.choices[0].message.model_dump()
    third = client.chat.completions.create(
        messages=[*TALK, answer, {"role": "user", "content": "Sure?"}], **GREEDY
    )
    assert third.usage is not None
    assert third.usage.prompt_tokens > second.usage.prompt_tokens


def test_a_developers_message_is_a_systems(client: OpenAI) -> None:
    first = client.chat.completions.create(messages=TALK, **GREEDY)
    developer: list[Any] = [{**TALK[0], "role": "developer"}, *TALK[1:]]
    second = client.chat.completions.create(messages=developer, **GREEDY)
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == second.usage.prompt_tokens


def test_fields_that_change_nothing_are_taken(client: OpenAI) -> None:
    plain = client.chat.completions.create(messages=TALK, **GREEDY)
    dressed = client.chat.completions.create(
        messages=TALK,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        modalities=["text"],
        **GREEDY,
    )
    assert dressed.choices[0].message.content == plain.choices[0].message.content


def test_salts_separate_and_share_within(serve: Serve) -> None:
    url, _ = serve()

    def cached(salt: str | None) -> int:
        with client_of(url) as client:
            whole = client.chat.completions.create(
                messages=TALK, extra_body={"cache_salt": salt}, **GREEDY
            )
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        return whole.usage.prompt_tokens_details.cached_tokens or 0

    all_ = len(RENDERED)
    found = [cached(salt) for salt in (None, "a", "b", "a", None)]
    assert found == [0, 0, 0, all_, all_]


def test_retention_is_a_hint_that_the_cache_gets(serve: Serve) -> None:
    url, service = serve(llm={"eviction": "priority"})
    with client_of(url) as client:
        for wanted in ("default", "ephemeral", 3600, 0.5):
            client.chat.completions.create(
                messages=[{"role": "user", "content": f"{wanted} " * 8}],
                extra_body={"cache_retention": wanted},
                **GREEDY,
            )
    hints = [node.retention for node in service.llm.cache.tree.nodes() if not node.children]
    assert sorted((hint.ephemeral, hint.priority) for hint in hints) == [
        (False, 0),
        (False, 1),
        (False, 1),
        (True, 0),
    ]


def test_a_server_with_a_seed_gives_the_same_again(serve: Serve) -> None:
    texts = []
    for _ in range(2):
        url, _ = serve(llm={"seed": 3})
        with client_of(url) as client:
            whole = client.chat.completions.create(model="tiny", messages=TALK, max_tokens=16)
            texts.append(whole.choices[0].message.content)
    assert texts[0] == texts[1]


def test_langchain_talks_with_it(serve: Serve) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    url, _ = serve()
    chat = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        temperature=0,
        max_retries=0,
        max_completion_tokens=24,
    )
    messages = [("system", TALK[0]["content"]), ("user", TALK[1]["content"])]
    answer = chat.invoke(messages)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 24
    streamed = "".join(str(chunk.content) for chunk in chat.stream(messages))
    assert streamed == answer.content
    with client_of(url) as client:
        whole = client.chat.completions.create(messages=TALK, **GREEDY)
    assert whole.choices[0].message.content == answer.content
