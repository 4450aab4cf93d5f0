"""What becomes of errors: OpenAI's form, with a status that clients understand."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from radixkv.errors import (
    ContextBusyError,
    ContextClosedError,
    ContextError,
    ContextNotFoundError,
    EngineStoppedError,
    GenerationCancelledError,
    JoinError,
    ModelNotFoundError,
    NumericalError,
    PromptTooLongError,
    QueueFullError,
    RadixKVError,
    RequestError,
    TooManyContextsError,
    UnsupportedParameterError,
)

# The first that fits; what is ours and not here is 500.
STATUSES: tuple[tuple[type[RadixKVError], int, str | None], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (UnsupportedParameterError, 400, "unsupported_parameter"),
    (ModelNotFoundError, 404, "model_not_found"),
    (RequestError, 400, None),
    (ContextClosedError, 410, "context_closed"),
    (ContextNotFoundError, 404, "context_not_found"),
    (ContextBusyError, 409, "context_busy"),
    (JoinError, 409, "join_conflict"),
    (ContextError, 409, "context_conflict"),
    (GenerationCancelledError, 409, "cancelled"),
    (QueueFullError, 429, "queue_full"),
    (TooManyContextsError, 429, "too_many_contexts"),
    (NumericalError, 500, "numerical_error"),
)
TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
RETRY_AFTER_SECONDS = 1

LONGEST_MESSAGE = 4096
"""Characters of what a client is told; it may quote what was sent."""


def error_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sendable(message), "type": kind, "param": param, "code": code}}


def sendable(text: str) -> str:
    """A text that may quote what clients sent, with what is no character written out."""
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[:LONGEST_MESSAGE]}..."
    return text.encode(errors="backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """What a client is told of an error: nothing of those that are not raised on purpose."""
    return str(error) if isinstance(error, RadixKVError) else "internal error"


def status_of(error: BaseException) -> tuple[int, str | None]:
    """Status and code of an error."""
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            return status, code
    if isinstance(error, EngineStoppedError):
        return (503, "shutting_down") if error.__cause__ is None else (500, "engine_stopped")
    return 500, None


def body_of(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Status and body for what ended with this error."""
    status, code = status_of(error)
    return status, error_body(status, message_of(error), code=code)


def error_response(error: BaseException) -> JSONResponse:
    """The answer to a request that ended with this error."""
    status, body = body_of(error)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else None
    return JSONResponse(body, status, headers)


def install(app: FastAPI) -> None:
    """Have an application answer all errors in this form."""

    @app.exception_handler(RadixKVError)
    async def _ours(_: Request, error: RadixKVError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = sendable(".".join(str(part) for part in first["loc"] if part != "body"))
        why = first["msg"].removeprefix("Value error, ")
        message = f"{place}: {why}" if place else why
        return JSONResponse(error_body(400, message, param=place or None), 400)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
            message = f"there is no {request.method} {request.url.path} here; see /openapi.json"
        body = error_body(error.status_code, message)
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        response = error_response(error)
        # It is answered outside of `Records`, which names all others.
        if (name := getattr(request.state, "request_id", None)) is not None:
            response.headers["X-Request-Id"] = name
        return response
