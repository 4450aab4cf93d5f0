"""Logged requests: OpenAI's bodies, one JSON a line, bare or wrapped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixkv.errors import RequestError

# How logs and batch files wrap a request's body.
WRAPPERS = ("request", "body", "kwargs", "data")


@dataclass(frozen=True)
class LoggedRequest:
    """A request of a log: ``messages`` with ``tools``, or a ``prompt``."""

    line: int
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    prompt: str | tuple[int, ...] | None


def read_requests(path: Path) -> list[LoggedRequest]:
    """The requests of a file, in its order.

    Raises
    ------
    RequestError
        If a line holds no request; it is named.
    """
    found: list[LoggedRequest] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found += _requests(number, _body(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{path}, line {number}: {error}") from error
    if not found:
        raise RequestError(f"{path} holds no requests")
    return found


def _body(value: Any) -> Mapping[str, Any]:
    """The body within its wrappers."""
    while isinstance(value, dict):
        if "messages" in value or "prompt" in value:
            return value
        value = next((value[name] for name in WRAPPERS if name in value), None)
        if isinstance(value, str):
            value = json.loads(value)
    raise ValueError("needs 'messages' or a 'prompt', bare or in a 'request' or a 'body'")


def _requests(line: int, body: Mapping[str, Any]) -> list[LoggedRequest]:
    """One, or one for each prompt of a batch."""
    if "messages" in body:
        messages, tools = body["messages"], body.get("tools") or []
        for name, value in (("messages", messages), ("tools", tools)):
            if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
                raise ValueError(f"{name} must be a list of objects")
        if not messages:
            raise ValueError("messages is empty")
        plain = tuple(_plain(message) for message in messages)
        return [LoggedRequest(line, plain, tuple(tools), None)]
    prompts = body["prompt"]
    if isinstance(prompts, str) or _is_tokens(prompts):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("prompt must be a text, token ids, or a list of these")
    made = []
    for prompt in prompts:
        if not prompt or not (isinstance(prompt, str) or _is_tokens(prompt)):
            raise ValueError("prompt must be a text, token ids, or a list of these, none empty")
        made.append(
            LoggedRequest(line, (), (), prompt if isinstance(prompt, str) else tuple(prompt))
        )
    return made


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a text: parts of text are put together.

    Raises
    ------
    ValueError
        If it has no role, or parts that are no text.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError("a message has no role")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise ValueError("a message has parts that are no text, which are not supported")
            texts.append(part["text"])
        # As the server joins them, and vLLM.
        content = "\n".join(texts)
    if content is not None and not isinstance(content, str):
        raise ValueError("a message's content is no text")
    plain = {**message, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_objects(call) for call in message["tool_calls"]]
    return plain


def _with_objects(call: Any) -> Any:
    """A tool call with its arguments as an object: templates write the JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = json.loads(function["arguments"] or "{}")
    return {**call, "function": {**function, "arguments": arguments}}
