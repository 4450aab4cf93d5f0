"""Client: one server, and the operations that wait to be sent to it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from radixkv.client.context import Context
from radixkv.client.link import Call, Link
from radixkv.client.pending import Pending, run
from radixkv.client.wire import Content, content_json, retention_json, salt_of
from radixkv.errors import RadixKVError, ServerUnreachableError

# As many as a server takes in one list.
MAX_OPERATIONS = 1024


class Client:
    """A server's contexts, as if they were here; for programs with and without an event loop.

    Operations are collected until somebody waits for a result, and sent together then. What can be
    awaited (`generate`, `score`, `choose`) leaves the event loop free; what cannot (`join`,
    ``text``, ``tokens``, ``stats``, ``len``, `Context.close`) waits for one answer of the server,
    as the call itself would take its time in the engine's process. Not thread-safe.

    Parameters
    ----------
    url : str
        Of the server, like "http://127.0.0.1:8000".
    api_key : str, optional
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        self._link = Link(url, api_key)
        self._queue: list[Call] = []
        self._open: dict[Context, None] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    def context(
        self,
        content: Content = "",
        *,
        namespace: str | tuple[str, ...] = (),
        retention: Any = None,
    ) -> Context:
        """Open a context, as ``LLM.context`` does; with the first call that waits.

        Parameters
        ----------
        content : str, token ids, or chat messages
        namespace : str or tuple of str
            What its blocks are shared within; sent as ``cache_salt``.
        retention : Retention, "default", "ephemeral" or seconds
        """
        body = {
            "content": content_json(content),
            "cache_salt": salt_of(namespace),
            "cache_retention": retention_json(retention),
        }
        context = Context(self)
        self._open[context] = None
        context.queue({"open": body})
        return context

    def run(self, pending: Iterable[Pending[Any]]) -> list[Any]:
        """Run generations, scores and choices of contexts in one batch; their results, in order."""
        return run(pending)

    # -- for contexts ----------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Queue an operation behind all others."""
        if self._closed:
            call.end(None, ServerUnreachableError("the client was closed"))
        else:
            self._queue.append(call)

    def flush(self) -> None:
        """Send what is queued; waits for nothing."""
        while self._queue:
            batch, self._queue = self._queue[:MAX_OPERATIONS], self._queue[MAX_OPERATIONS:]
            self._link.send(batch)

    def cancel(self, context: str, call: Call) -> None:
        """Have the server end what a call has begun, and send that."""
        name = call.operation["name"]
        self.add(Call({"context": context, "cancel": {"name": name}}))
        self.flush()

    def forget(self, context: Context) -> None:
        """A context was closed."""
        self._open.pop(context, None)

    # -- endings ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all contexts that are open, and the connection."""
        if self._closed:
            return
        for context in list(self._open):
            with suppress(RadixKVError):  # An unreachable server will close them by itself.
                context.close()
        self._closed = True
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
