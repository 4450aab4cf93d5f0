"""BodyLimit: bodies that are too large are refused, before they are in memory."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.server.failures import error_body


class BodyLimit:
    """Middleware that answers with 413 what has a body of more bytes than are allowed.

    Parameters
    ----------
    app : ASGI application
    most : int
        Bytes.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and int(told) > self.most:
            response = JSONResponse(error_body(413, self._message()), 413)
            await response(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self.most:
                raise HTTPException(413, self._message())
            return message

        await self.app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is larger than this server takes ({self.most} bytes)"
