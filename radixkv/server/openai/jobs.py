"""Requests made, followed, and cancelled if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from radixkv.cache import Namespace, Retention
from radixkv.engine import Request as EngineRequest
from radixkv.engine import RequestOutput
from radixkv.engine.beams import Params
from radixkv.errors import GenerationCancelledError
from radixkv.llm import LLM
from radixkv.server.answer import Answer
from radixkv.server.service import Service

T = TypeVar("T")

CLIENT_LEFT = 499
"""What proxies log for a client that did not wait; nobody receives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt that was looked at and can be served."""

    prompt: npt.NDArray[np.int32]
    params: Params
    namespace: Namespace
    retention: Retention


async def begin(
    service: Service, request_id: str, slots: int, prepare: Callable[[LLM], list[Job]]
) -> list[Answer]:
    """Prepare a request's prompts where texts are worked on, and have all of them served.

    Parameters
    ----------
    service : Service
    request_id : str
        Of the first prompt; the others' have a number behind it.
    slots : int
        Prompts.
    prepare : callable
        See `Service.on_texts` for what it may use.
    """
    with service.worker.reserved(slots):
        jobs = await service.on_texts(prepare)

    def make(llm: LLM) -> list[EngineRequest]:
        made: list[EngineRequest] = []
        try:
            for place, job in enumerate(jobs):
                made.append(
                    llm.engine.add_request(
                        job.prompt,
                        job.params,
                        request_id=f"{request_id}-{place}" if place else request_id,
                        namespace=job.namespace,
                        retention=job.retention,
                    )
                )
        except BaseException:
            for request in made:
                llm.engine.abort(request.request_id)
            raise
        return made

    return await service.worker.begin(make, slots)


async def outputs_of(answers: Sequence[Answer]) -> list[RequestOutput]:
    """Wait for all to end; raises the error of the first that failed.

    Whoever is cancelled here, or meets an error, cancels all of them.
    """
    try:
        outputs = []
        for answer in answers:
            outputs.append(await answer.end())
            raise_failure(outputs[-1])
        return outputs
    finally:
        for answer in answers:
            answer.cancel()


def raise_failure(output: RequestOutput) -> None:
    """Raise what a request failed with, if it did."""
    if output.error is not None:
        raise output.error
    if output.finish_reason == "abort":
        raise GenerationCancelledError("the request was cancelled on the server")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, cancelling it if the client leaves; then None."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


class EventStream(Response):
    """Server-sent events, until they end or the client leaves.

    Parameters
    ----------
    first : bytes
        What has come already: only with it a status is sent.
    rest : async generator of bytes
        Closed however the stream ends; it must cancel then what still runs.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._stream(send))
        finally:
            await self._rest.aclose()

    async def _stream(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def streamed(events: AsyncGenerator[bytes]) -> EventStream:
    """A stream, once its first event has come: what fails before that has a status of its own."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def respond(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that ``work`` makes, which is cancelled if the client leaves before."""
    return await unless_left(request.receive, work) or Response(status_code=CLIENT_LEFT)
