"""Record: what is known of a request over HTTP, for those who report it once it has been answered.

`Records` is the outermost layer of the application. It gives each request an id and a record, and
hands the record to the reporters when the last byte has been sent, whatever happened until then.
The record finds its way to the engine's worker in a context variable: no route has to know of it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from radixkv.server.answer import Answer

ID_HEADER = b"x-request-id"
# What is taken from clients: it goes to logs and into other ids.
ID_FORM = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}
# Who leaves before anything was answered; nginx's number.
CLIENT_CLOSED = 499


class Record:
    """A request over HTTP.

    Attributes
    ----------
    request_id : str
        The client's ``X-Request-Id`` if it is well formed, else one of ours.
    method : str
    path : str
        As the client asked for it, without the query.
    route : str
        The route that served it, with names in place of values: of these there are only a few.
    client : str
        Address of the client.
    status : int
        Of the answer; `CLIENT_CLOSED` if there was none because the client had left.
    complete : bool
        Whether the answer was sent to its end.
    began, ended : float
        Readings of `time.perf_counter`; 0 before its end.
    trace : dict of str
        Headers that say which trace it belongs to.
    answers : list of Answer
        Requests to the engine that it became.
    """

    __slots__ = (
        "answers",
        "began",
        "client",
        "complete",
        "ended",
        "method",
        "path",
        "request_id",
        "route",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope) -> None:
        self.began = time.perf_counter()
        self.ended = 0.0
        method = scope["method"]
        self.method = method if method in METHODS else "OTHER"
        self.path: str = scope["path"]
        self.route = ""
        self.client = scope["client"][0] if scope.get("client") else "-"
        self.status = 0
        self.complete = False
        self.trace: dict[str, str] = {}
        self.answers: list[Answer] = []
        self.request_id = ""
        for name, value in scope["headers"]:
            if name == ID_HEADER and ID_FORM.fullmatch(value):
                self.request_id = value.decode("ascii")
            elif name in (b"traceparent", b"tracestate"):
                self.trace[name.decode()] = value.decode("latin-1")
        if not self.request_id:
            self.request_id = secrets.token_hex(12)

    def note(self, answers: Sequence[Answer]) -> None:
        """It has become these requests to the engine; not counted once it was reported."""
        if not self.ended:
            self.answers.extend(answers)

    @property
    def seconds(self) -> float:
        """From its arrival to the end of its answer."""
        return self.ended - self.began

    def tokens(self) -> dict[str, int]:
        """Tokens of its prompts, those of them that were cached, and generated ones.

        Of what the engine has ended by now: who left in the middle is not waited for. Empty if
        nothing has.
        """
        outputs = [answer.output for answer in self.answers if answer.output is not None]
        if not outputs:
            return {}
        return {
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "cached_tokens": sum(output.num_cached_tokens for output in outputs),
            "generated_tokens": sum(
                len(completion.token_ids) for output in outputs for completion in output.outputs
            ),
        }


Reporter = Callable[[Record], None]
CURRENT: ContextVar[Record | None] = ContextVar("radixkv_record", default=None)


def name_request() -> str:
    """A new name for a request to the engine, behind the id of the HTTP request it comes with."""
    record = CURRENT.get()
    tail = secrets.token_hex(4 if record else 16)
    return f"{record.request_id}-{tail}" if record else tail


class Records:
    """Keeps a `Record` of each request; see the module.

    Parameters
    ----------
    app : ASGI application
    reporters : sequence of callable
        Called with each record at its end. They must be quick.
    """

    def __init__(self, app: ASGIApp, reporters: Sequence[Reporter]) -> None:
        self.app = app
        self.reporters = reporters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = Record(scope)
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = record.request_id
        header = (ID_HEADER, record.request_id.encode())

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            elif not message.get("more_body", False):
                await send(message)
                record.complete = True
                return
            await send(message)

        token = CURRENT.set(record)
        try:
            await self.app(scope, receive, send_on)
        except Exception:
            # The layer outside answers it.
            record.status = record.status or 500
            raise
        finally:
            CURRENT.reset(token)
            record.ended = time.perf_counter()
            record.status = record.status or CLIENT_CLOSED
            record.route = _route_of(scope)
            for report in self.reporters:
                report(record)


def _route_of(scope: Scope) -> str:
    """The route's own path, or what stands for all that have none."""
    route = scope.get("route")
    path = getattr(route, "path", None)
    if isinstance(path, str):
        return path
    return "unmatched" if scope.get("endpoint") is None else "other"
