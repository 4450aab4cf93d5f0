"""Server-sent events of a stream, made without building objects.

All that a stream's chunks have in common is written once; a chunk is that, the text as JSON, and
what ends it.
"""

from __future__ import annotations

import json
from typing import Any

from radixkv.server.failures import error_body, message_of, status_of

DONE = b"data: [DONE]\n\n"

ENDINGS = {None: "null", "stop": '"stop"', "length": '"length"', "tool_calls": '"tool_calls"'}


class ChunkWriter:
    """The chunks of one answer.

    Parameters
    ----------
    head : mapping
        What each chunk begins with: id, object, created, model.
    text : (str, str)
        What stands before and behind a chunk's text within its choice.
    usage : str
        What stands behind the choices where no usage is told.
    """

    def __init__(self, head: dict[str, Any], text: tuple[str, str], usage: str = "") -> None:
        self._head = f'data: {json.dumps(head)[:-1]}, "choices": ['
        self._open, self._close = text
        self._usage = usage
        self._starts: dict[int, str] = {}

    def text(
        self,
        index: int,
        text: str,
        ending: str | None = None,
        logprobs: str = "null",
        usage: str | None = None,
        stop_reason: str | int | None = None,
    ) -> str:
        """A chunk with more of a choice's text.

        Parameters
        ----------
        index : int
            The choice.
        text : str
        ending : str or None
            Why it ends here.
        logprobs, usage : JSON
        stop_reason : str, int or None
            With an end, the stop string or token that made it.
        """
        start = self._starts.get(index)
        if start is None:
            start = f'{self._head}{{"index": {index}, {self._open}'
            self._starts[index] = start
        last = ENDINGS[ending] if ending in ENDINGS else json.dumps(ending)
        if ending is not None:
            last += f', "stop_reason": {json.dumps(stop_reason)}'
        told = self._usage if usage is None else f', "usage": {usage}'
        return (
            f"{start}{json.dumps(text)}{self._close}"
            f', "logprobs": {logprobs}, "finish_reason": {last}}}]{told}}}\n\n'
        )

    def delta(self, index: int, delta: dict[str, Any], ending: str | None = None) -> str:
        """A chat chunk with anything but text."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": ending}
        return f"{self._head}{json.dumps(choice)}]{self._usage}}}\n\n"

    def total(self, usage: dict[str, Any]) -> str:
        """The last chunk, without choices, that tells the usage."""
        return f'{self._head}], "usage": {json.dumps(usage)}}}\n\n'


def error_event(error: BaseException) -> bytes:
    """An error in the middle of a stream, as OpenAI's clients expect it, and the stream's end."""
    status, code = status_of(error)
    body = error_body(status, message_of(error), code=code)
    return f"data: {json.dumps(body)}\n\n".encode() + DONE
