"""A tiny OpenAI-compatible server that streams known chunks at known times."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Behaviour:
    """What it does; ``fail`` says by the number of a request how it fails."""

    pieces: tuple[str, ...] = ("one", " two", " three")
    tokens: int | None = 4
    prompt_tokens: int = 100
    cached_tokens: int | None = 60
    running_usage: tuple[int, ...] | None = None
    delay_s: float = 0.0
    fail: dict[int, str] = field(default_factory=dict)
    key: str | None = None
    models: tuple[str, ...] = ("fake",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    def usage(self, tokens: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    async def answer(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "a key is needed"}}, 401)
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.paths.append(request.url.path)
        how = self.fail.get(number)
        if how == "429":
            return JSONResponse({"error": {"message": "too many\n\x1b[31mrequests"}}, 429)
        if how == "html":
            return Response("<h1>no</h1>", 502)
        chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self.events(chat, how), media_type="text/event-stream")

    async def events(self, chat: bool, how: str | None) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if chat:
                yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            for place, piece in enumerate(self.pieces):
                await asyncio.sleep(self.delay_s)
                if how == "error" and place == 1:
                    yield _event(error={"message": "it broke"})
                    return
                if how == "cut" and place == 1:
                    return
                if how == "nonsense" and place == 1:
                    yield "data: {nonsense\n\n"
                    return
                content = {"delta": {"content": piece}} if chat else {"text": piece}
                more = {}
                if self.running_usage is not None:
                    more["usage"] = self.usage(self.running_usage[place])
                yield _event(choices=[{"index": 0, "finish_reason": None, **content}], **more)
            end = {"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}
            yield _event(choices=[end])
            if self.tokens is not None:
                yield _event(choices=[], usage=self.usage(self.tokens))
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def _event(**event: Any) -> str:
    return f"data: {json.dumps(event)}\n\n"


@contextmanager
def fake_server(behaviour: Behaviour) -> Iterator[str]:
    """Its URL."""

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": name} for name in behaviour.models]})

    routes = [
        Route("/v1/models", models),
        Route("/v1/chat/completions", behaviour.answer, methods=["POST"]),
        Route("/v1/completions", behaviour.answer, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
