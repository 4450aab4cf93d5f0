"""The routes: one for each operation, and one for many of them in one go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from radixkv.server.body import documented, parsed
from radixkv.server.contexts import bodies
from radixkv.server.contexts.operations import Step
from radixkv.server.contexts.registry import new_id
from radixkv.server.contexts.running import Event, Run, begin
from radixkv.server.failures import body_of, error_response
from radixkv.server.keys import ApiKey, TheService
from radixkv.server.service import Service

router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

# So often a quiet stream says that it is there: clients can tell a long wait from a dead line.
QUIET_SECONDS = 15.0


@router.post("/operations", openapi_extra=documented(bodies.Operations))
async def operations(
    service: TheService,
    owner: ApiKey,
    body: Annotated[bodies.Operations, Depends(parsed(bodies.Operations))],
) -> Response:
    """Carry out many operations between two steps, and stream what comes of them.

    The first event has the ``outcomes``: for each operation its ``result``, its ``error``, or that
    it is ``running``. The others name the ``operation`` by its place, with a ``text``, its
    ``result`` or its ``error``. Whoever closes the stream cancels what is running.
    """
    run = await begin(service, owner, body)
    return Stream(run, _all_events(run))


@router.post("", openapi_extra=documented(bodies.Open))
async def open_context(
    request: Request,
    service: TheService,
    owner: ApiKey,
    body: Annotated[bodies.Open, Depends(parsed(bodies.Open))],
) -> Response:
    """Open a context; the answer has its ``id``."""
    context = new_id()
    return await _carry_out(request, service, owner, context, {"open": body}, more={"id": context})


@router.get("/{context}")
async def read(request: Request, service: TheService, owner: ApiKey, context: str) -> Response:
    """What a context says and holds; also of one that was joined."""
    return await _carry_out(request, service, owner, context, {"read": bodies.Read()})


@router.delete("/{context}")
async def close(request: Request, service: TheService, owner: ApiKey, context: str) -> Response:
    """Close a context and its branches; what runs on them is cancelled."""
    return await _carry_out(request, service, owner, context, {"close": bodies.Close()})


@router.post("/{context}/append", openapi_extra=documented(bodies.Append))
async def append(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Append, Depends(parsed(bodies.Append))],
) -> Response:
    """Add text, token ids or messages."""
    return await _carry_out(request, service, owner, context, {"append": body})


@router.post("/{context}/generate", openapi_extra=documented(bodies.StreamedGenerate))
async def generate(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.StreamedGenerate, Depends(parsed(bodies.StreamedGenerate))],
) -> Response:
    """Continue a context by the fields of ``SamplingParams``; streamed if asked for."""
    plain = bodies.Generate.model_validate(body.model_extra or {})
    return await _carry_out(
        request, service, owner, context, {"generate": plain}, streamed=body.stream
    )


@router.post("/{context}/score", openapi_extra=documented(bodies.Score))
async def score(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Score, Depends(parsed(bodies.Score))],
) -> Response:
    """Log-probabilities of a continuation, which is not kept."""
    return await _carry_out(request, service, owner, context, {"score": body})


@router.post("/{context}/choose", openapi_extra=documented(bodies.Choose))
async def choose(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Choose, Depends(parsed(bodies.Choose))],
) -> Response:
    """Go on with the likeliest of some continuations."""
    return await _carry_out(request, service, owner, context, {"choose": body})


@router.post("/{context}/fork", openapi_extra=documented(bodies.Fork))
async def fork(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Fork, Depends(parsed(bodies.Fork))],
) -> Response:
    """Branches that share every block; the answer has their ids."""
    return await _carry_out(request, service, owner, context, {"fork": body})


@router.post("/{context}/join", openapi_extra=documented(bodies.Join))
async def join(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Join, Depends(parsed(bodies.Join))],
) -> Response:
    """End branches, and go on with what came of them."""
    return await _carry_out(request, service, owner, context, {"join": body})


@router.post("/{context}/checkpoint", openapi_extra=documented(bodies.Checkpoint))
async def checkpoint(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Checkpoint, Depends(parsed(bodies.Checkpoint))],
) -> Response:
    """Mark a place to come back to."""
    return await _carry_out(request, service, owner, context, {"checkpoint": body})


@router.post("/{context}/rollback", openapi_extra=documented(bodies.Rollback))
async def rollback(
    request: Request,
    service: TheService,
    owner: ApiKey,
    context: str,
    body: Annotated[bodies.Rollback, Depends(parsed(bodies.Rollback))],
) -> Response:
    """Forget all that came after a checkpoint."""
    return await _carry_out(request, service, owner, context, {"rollback": body})


# -- answering -----------------------------------------------------------------------------------


async def _carry_out(
    request: Request,
    service: Service,
    owner: str | None,
    context: str,
    operand: Mapping[str, Any],
    *,
    streamed: bool = False,
    more: Mapping[str, str] | None = None,
) -> Response:
    """One operation, and the answer to it."""
    one = bodies.Operation.model_construct(context=context, **operand)
    run = await begin(service, owner, bodies.Operations.model_construct(operations=[one]))
    (step,) = run.steps
    if step.error is not None:
        return error_response(step.error)
    if step.pending is None:
        return _answer({**(more or {}), **(step.result or {})})
    if streamed:
        return Stream(run, _one_operations_events(run))
    try:
        return await _last_or_gone(request, run)
    finally:
        run.leave()


def _answer(result: Mapping[str, Any] | None) -> Response:
    # Not FastAPI's own: what a context holds may be a hundred thousand numbers.
    return Response(to_json(result), media_type="application/json")


async def _last_or_gone(request: Request, run: Run) -> Response:
    """The answer with a run's last event, or none if the client left before it."""
    ending = asyncio.ensure_future(_last(run))
    leaving = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            return Response(status_code=499)  # Nobody reads it.
        event = ending.result()
        if event.error is not None:
            return error_response(event.error)
        return _answer(event.result)
    finally:
        ending.cancel()
        leaving.cancel()


async def _last(run: Run) -> Event:
    async for event in run.events():
        last = event
    return last


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(StreamingResponse):
    """Server-sent events of a run, which is left when the response ends, however it does."""

    def __init__(self, run: Run, events: AsyncIterator[bytes]) -> None:
        super().__init__(
            _as_lines(events), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has left already stops the body before it begins: its own end is no place
        # to clean up in.
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._run.leave()


async def _as_lines(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    waiting: asyncio.Task[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({waiting}, timeout=QUIET_SECONDS)
            if not done:
                yield b": still here\n\n"
                continue
            try:
                event, waiting = waiting.result(), None
            except StopAsyncIteration:
                return
            yield b"data: " + event + b"\n\n"
    finally:
        if waiting is not None:
            waiting.cancel()


async def _one_operations_events(run: Run) -> AsyncIterator[bytes]:
    async for event in run.events():
        yield to_json(_as_dict(event))


async def _all_events(run: Run) -> AsyncIterator[bytes]:
    outcomes = []
    for step in run.steps:
        outcomes.append(to_json(_outcome(step)))
        await asyncio.sleep(0)  # Each may be a context of a hundred thousand tokens.
    yield b'{"outcomes":[' + b",".join(outcomes) + b"]}"
    async for event in run.events():
        yield to_json({"operation": event.place, **_as_dict(event)})


def _outcome(step: Step) -> dict[str, Any]:
    if step.error is not None:
        return body_of(step.error)[1]
    return {"running": True} if step.pending is not None else {"result": step.result}


def _as_dict(event: Event) -> dict[str, Any]:
    if event.error is not None:
        return body_of(event.error)[1]
    return {"text": event.text} if event.result is None else {"result": event.result}
