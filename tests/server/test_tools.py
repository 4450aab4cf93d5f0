"""Tools: the model's own template, and calls read from its text however that is cut."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from clients import client_of
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from radixkv.errors import RequestError
from radixkv.model.loading import LoadedModel
from radixkv.server.openai.messages import plain_messages
from radixkv.server.openai.tools import CallReader, ToolCall, hides_calls
from radixkv.server.service import Service

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}"
    "as <tool_call>{...}</tool_call>;{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OTHER = TEMPLATE.replace("tool_call>", "call>")
TOOL: Any = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
ASK: Any = [{"role": "user", "content": "1+2?"}]
CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'

Serving = Callable[[str], OpenAI]


@pytest.fixture
def served(
    tiny: LoadedModel,
    serve: Callable[..., tuple[str, Service]],
    monkeypatch: pytest.MonkeyPatch,
) -> Serving:
    """The tiny model with another template."""

    def start(template: str) -> OpenAI:
        monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
        url, _ = serve()
        return client_of(url)

    return start


def saying(text: str) -> dict[str, Any]:
    """Fields that have the model say exactly this."""
    return {"extra_body": {"guided_choice": [text]}, "model": "tiny", "max_tokens": 200}


def parts_of(*texts: str) -> list[str | ToolCall]:
    reader = CallReader()
    parts = [part for text in texts for part in reader.push(text)]
    return [*parts, *reader.finish()]


def merged(parts: list[str | ToolCall]) -> list[Any]:
    """Parts without ids, neighbouring texts joined."""
    found: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ["plain"]),
        (" plain \n", [" plain \n"]),
        ("", []),
        (CALL, [("sum", '{"a": 1, "b": [2]}')]),
        (f"Sure.\n{CALL}\n{CALL}\n", ["Sure.", *[("sum", '{"a": 1, "b": [2]}')] * 2]),
        (f"{CALL} and so", [("sum", '{"a": 1, "b": [2]}'), " and so"]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("<tool_call>no JSON</tool_call>", ["<tool_call>no JSON</tool_call>"]),
        ("<tool_call>[1]</tool_call> x", ["<tool_call>[1]</tool_call> x"]),
        ('a <tool_call>{"name": "f"', ['a <tool_call>{"name": "f"']),
        ("1 <tool_cal", ["1 <tool_cal"]),
        ("1 < 2 <tool>", ["1 < 2 <tool>"]),
    ],
)
def test_calls_are_read_and_all_else_is_text(text: str, expected: list[Any]) -> None:
    assert merged(parts_of(text)) == expected
    assert merged(parts_of(*text)) == expected


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', " ", "\n", "x", "<", "{"]


@given(st.lists(st.sampled_from(PIECES)).map("".join), st.data())
def test_how_the_text_is_cut_does_not_matter(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert merged(parts_of(*pieces)) == merged(parts_of(text))


def test_a_model_calls_a_tool(served: Serving) -> None:
    client = served(TEMPLATE)
    asked: dict[str, Any] = {"messages": ASK, "tools": [TOOL], **saying(f"Sure. {CALL}")}
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("sum", {"a": 1, "b": [2]})
    assert whole.usage is not None
    shown = "[sum]as <tool_call>{...}</tool_call>;<user>1+2?;<assistant>"
    assert whole.usage.prompt_tokens == len(shown)

    deltas = [
        (part.choices[0].delta, part.choices[0].finish_reason)
        for part in client.chat.completions.create(stream=True, **asked)
    ]
    assert "".join(delta.content or "" for delta, _ in deltas) == "Sure."
    calls = [its for delta, _ in deltas for its in delta.tool_calls or []]
    assert [(its.index, its.function and its.function.name) for its in calls] == [(0, "sum")]
    assert deltas[-1][1] == "tool_calls"

    # What it answered goes back with the result, as the client has it.
    answer: Any = choice.message.model_dump()
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    asked["messages"] = [*ASK, answer, result]
    again = client.chat.completions.create(**asked)
    assert again.usage is not None
    arguments = json.dumps({"a": 1, "b": [2]})
    more = f"Sure.<tool_call>{arguments}</tool_call>;<tool>3;<assistant>"
    assert again.usage.prompt_tokens == whole.usage.prompt_tokens + len(more)


def test_calls_are_text_where_no_tools_were_given(served: Serving) -> None:
    client = served(TEMPLATE)
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        whole = client.chat.completions.create(messages=ASK, **saying(CALL), **more)
        assert whole.choices[0].message.content == CALL
        assert whole.choices[0].message.tool_calls is None
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len("<user>1+2?;<assistant>")


def test_a_form_that_cannot_be_read_is_refused(served: Serving) -> None:
    client = served(OTHER)
    with pytest.raises(openai.BadRequestError, match="another form than <tool_call>"):
        client.chat.completions.create(messages=ASK, tools=[TOOL], model="tiny")


def test_arguments_are_objects_for_templates() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    (plain,) = plain_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert plain["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for wrong in ("[1]", "{", 5):
        call = {"function": {"name": "f", "arguments": wrong}}
        with pytest.raises(RequestError, match="arguments must be"):
            plain_messages([{"role": "assistant", "tool_calls": [call]}])


def test_marks_that_are_special_tokens_are_shown(tiny: LoadedModel) -> None:
    class Marked:
        all_special_tokens = ("<eos>", "<tool_call>")

    assert hides_calls(dataclasses.replace(tiny, tokenizer=Marked()))  # type: ignore[arg-type]
    assert not hides_calls(tiny)
