"""One request over HTTP, as OpenAI's API streams it: when it was sent, what came and when."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

Messages = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Record:
    """What was measured of a request. Times are seconds from the run's beginning.

    Attributes
    ----------
    due : float
        When it was to be sent.
    held : float
        Seconds for which it then waited for a place within the concurrency, or for the answer to
        its conversation's turn before.
    late : float
        Seconds for which it waited for nothing but the driver.
    sent, ended : float
    chunks : list of (float, int or None)
        When text came, and how many tokens there were by then, if the server said so.
    prompt_tokens, cached_tokens, output_tokens : int or None
        By the server's usage; None where it gives none.
    error : str or None
        The kind of what went wrong.
    detail : str
        What the server said about it.
    """

    number: int
    conversation: int
    due: float
    held: float = 0.0
    late: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    detail: str = ""
    text: str = field(default="", repr=False)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None if there was none."""
        return self.chunks[0][0] - self.sent if self.chunks else None

    @property
    def end_to_end(self) -> float:
        """Seconds from sending to the stream's end."""
        return self.ended - self.sent

    @property
    def tokens_per_chunk(self) -> float:
        """Tokens that a chunk brought on average.

        1 if there was one token more than chunks: that is the end of a sequence, which has no text.
        Also 1 if the server does not say how many tokens there were.
        """
        if self.output_tokens is None or self.output_tokens == len(self.chunks) + 1:
            return 1.0
        return self.output_tokens / len(self.chunks) if self.chunks else 1.0

    def gaps(self) -> list[float]:
        """Seconds a token between each two chunks.

        A gap that ends with a chunk of m tokens counts m times, as a m-th of it. Where the server
        says only at the end how many tokens there were, all chunks of an answer are taken to have
        had equally many.
        """
        pairs = list(zip(self.chunks, self.chunks[1:], strict=False))
        found: list[float] = []
        for (before, had), (now, has) in pairs:
            if had is None or has is None:
                return [(now - before) / self.tokens_per_chunk for (before, _), (now, _) in pairs]
            brought = max(has - had, 1)
            found += [(now - before) / brought] * brought
        return found


class Target:
    """A server, and how it is asked.

    Parameters
    ----------
    client : httpx.AsyncClient
        With the server's URL and key.
    model : str
    endpoint : str
        "chat" or "completions".
    ignore_eos : bool
        Ask for all of ``max_tokens``; an extension that vLLM, SGLang and radixkv know.
    seed : int
    """

    def __init__(
        self, client: httpx.AsyncClient, model: str, endpoint: str, ignore_eos: bool, seed: int
    ) -> None:
        self._client = client
        self._model = model
        self._endpoint = endpoint
        self._ignore_eos = ignore_eos
        self._seed = seed

    def _body(self, messages: Messages, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": max_tokens,
            "seed": self._seed,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._endpoint == "chat":
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            body["prompt"] = transcript(messages)
        return body

    async def ask(
        self,
        messages: Messages,
        max_tokens: int,
        record: Record,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Send a request and note in its record all that comes; errors are noted, too."""
        path = "/v1/chat/completions" if self._endpoint == "chat" else "/v1/completions"
        body = self._body(messages, max_tokens)
        record.sent = clock()
        try:
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    record.error = f"HTTP {response.status_code}"
                    record.detail = _message_of(await response.aread())
                else:
                    await self._read(response, record, clock)
        except httpx.HTTPError as error:
            record.error, record.detail = type(error).__name__, str(error)
        record.ended = clock()

    async def _read(
        self, response: httpx.Response, record: Record, clock: Callable[[], float]
    ) -> None:
        done = False
        async for data in server_sent(response.aiter_bytes()):
            now = clock()
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
                if "error" in event:
                    record.error, record.detail = "error in the stream", _message_of(data.encode())
                    return
                _take(event, record, now)
            except (ValueError, TypeError, AttributeError, LookupError):
                record.error, record.detail = "unreadable event", data[:200]
                return
        if not done and record.finish_reason is None:
            record.error = "stream cut off"


def transcript(messages: Messages) -> str:
    """A prompt for models without a chat format; one message alone stands as it is."""
    if len(messages) == 1:
        return messages[0][1]
    return "".join(f"{role}: {text}\n\n" for role, text in messages) + "assistant:"


async def server_sent(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events, each when its line is whole."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


def _take(event: dict[str, Any], record: Record, now: float) -> None:
    usage = event.get("usage")
    if usage:
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")
    for choice in event.get("choices") or ():
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        # What a model thinks or calls is text, too, but belongs to no later turn.
        if text or delta.get("reasoning_content") or delta.get("tool_calls"):
            record.chunks.append((now, usage["completion_tokens"] if usage else None))
            record.text += text


def _message_of(body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, TypeError, KeyError):
        message = body.decode(errors="replace")
    # It goes to a terminal, which nobody else is to control.
    printable = "".join(letter if letter.isprintable() else " " for letter in str(message))
    return " ".join(printable.split())[:200]
