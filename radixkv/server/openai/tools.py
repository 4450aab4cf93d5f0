"""Tools: whether a model's template has a form for calls that we can read, and reading them.

The form is that of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
What does not hold to it stays text; nothing a model wrote is lost or made up.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.model.loading import LoadedModel
from radixkv.model.templates import template_source

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call of a tool.

    Parameters
    ----------
    id : str
    name : str
    arguments : str
        A JSON object.
    """

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no list of functions.

    Raises
    ------
    RequestError
    """
    for place, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{'name': ...}}}}"
            )


def check_form(loaded: LoadedModel) -> None:
    """Refuse tools for a model whose calls would have a form that we cannot read.

    Raises
    ------
    UnsupportedParameterError
    """
    tokenizer = loaded.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return  # Refused for that, when the conversation is rendered.
    source = template_source(tokenizer, with_tools=True)
    if "tools" in source and OPEN not in source:
        raise UnsupportedParameterError(
            f"tools: {loaded.name} calls tools in another form than {OPEN}, which is all that can "
            'be read; use tool_choice "none", or write the tools into a message'
        )


def hides_calls(loaded: LoadedModel) -> bool:
    """Whether the marks of a call are special tokens, which are left out of texts."""
    return OPEN in getattr(loaded.tokenizer, "all_special_tokens", ())


class CallReader:
    """Splits a growing text into what is said and what is called.

    However the text is cut, the calls and the joined texts are the same.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._held = ""

    def push(self, text: str) -> list[str | ToolCall]:
        """Append text; what has become certain of it."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._held:
            start = self._held.find(OPEN)
            if start < 0:
                sure = _sure(self._held)
                self._say(found, self._held[:sure])
                self._held = self._held[sure:]
                break
            end = self._held.find(CLOSE, start)
            if end < 0:
                before = self._held[:start].rstrip()
                self._say(found, before)
                self._held = self._held[len(before) :]
                break
            end += len(CLOSE)
            call = _call(self._held[start + len(OPEN) : end - len(CLOSE)])
            if call is None:
                self._say(found, self._held[:end])
            else:
                self._say(found, self._held[:start].rstrip())
                found.append(call)
                self.num_calls += 1
            self._held = self._held[end:]
        return found

    def finish(self) -> list[str | ToolCall]:
        """What was held back, once the text has ended."""
        held, self._held = self._held, ""
        return [] if not held or (self.num_calls and not held.strip()) else [held]

    @staticmethod
    def _say(found: list[str | ToolCall], text: str) -> None:
        if text:
            found.append(text)


def _sure(text: str) -> int:
    """Where the end begins that may belong to a call: its mark, and white space before it."""
    for length in range(len(OPEN) - 1, 0, -1):
        if text.endswith(OPEN[:length]):
            text = text[:-length]
            break
    return len(text.rstrip())


def _call(text: str) -> ToolCall | None:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(name := read.get("name"), str):
        return None
    arguments = read.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(
        f"call_{uuid.uuid4().hex[:24]}", name, json.dumps(arguments, ensure_ascii=False)
    )
