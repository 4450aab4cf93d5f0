"""Chat messages as clients send them, to what templates take."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.errors import RequestError, UnsupportedParameterError

Message = dict[str, Any]

# Newer clients of OpenAI's call it so; templates know the older name.
SYSTEM_TOO = "developer"
# Passed on to the template as they are.
KEPT = ("name", "tool_call_id", "reasoning_content")
# What OpenAI's answers have beside it, so that they can be sent back; empty in ours.
EMPTY = ("refusal", "annotations", "audio", "function_call")


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with one text each, and with the arguments of tool calls as objects.

    Raises
    ------
    RequestError
        If a message is malformed.
    UnsupportedParameterError
        If it holds anything but text, or a field that no template reads.
    """
    return [_plain(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _plain(where: str, message: Mapping[str, Any]) -> Message:
    role = message.get("role")
    plain: Message = {"role": "system" if role == SYSTEM_TOO else role}
    for name, value in message.items():
        if name == "role" or value is None or (name in EMPTY and not value):
            continue
        if name == "content":
            plain["content"] = _text(where, value)
        elif name == "tool_calls":
            plain["tool_calls"] = _tool_calls(where, value)
        elif name in KEPT:
            if not isinstance(value, str):
                raise RequestError(f"{where}.{name} must be a string")
            plain[name] = value
        else:
            raise UnsupportedParameterError(
                f"{where} has the unknown field {name!r}; the fields are role, content, "
                f"tool_calls, {', '.join(KEPT)}"
            )
    return plain


def _text(where: str, content: object) -> str:
    """A content's text; parts are joined by line ends, as vLLM does it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UnsupportedParameterError(
                f"{where}.content[{place}] is {reprlib.repr(kind or part)}; only parts of type "
                "'text' are supported"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{place}] needs a 'text' that is a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(where: str, calls: object) -> list[Message]:
    """Templates write arguments as JSON themselves, so they get objects."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list")
    plain = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls[{place}] needs a function with a name")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise RequestError(f"{where}.tool_calls[{place}]: arguments must be JSON") from None
        if not isinstance(arguments, Mapping):
            raise RequestError(f"{where}.tool_calls[{place}]: arguments must be a JSON object")
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain
