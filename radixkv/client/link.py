"""The connection to a server: a thread with an event loop of its own.

Programs wait for it with or without an event loop, and what comes meanwhile is not kept waiting.
Lists of operations are sent one after the other, each once the server has taken the one before it:
so they are carried out in the order in which the program gave them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from radixkv.client.failures import error_of
from radixkv.errors import RadixKVError, ServerUnreachableError

# A server says four times a minute that it is there, and it takes operations between two steps.
TIMEOUT = httpx.Timeout(connect=10, read=300, write=60, pool=None)


@dataclass(slots=True, eq=False)
class Call:
    """An operation, and who hears of it.

    Attributes
    ----------
    operation : dict
        As it is sent.
    result : Future
        What came of it; set on the link's thread, as ``on_text`` is called there.
    on_text : callable, optional
        Hears what is generated, as it comes.
    """

    operation: dict[str, Any]
    result: Future[dict[str, Any]] = field(default_factory=Future)
    on_text: Callable[[str], None] | None = None

    def end(self, result: dict[str, Any] | None, error: Exception | None = None) -> None:
        """The first end counts."""
        if self.result.done():
            return
        if error is not None:
            self.result.set_exception(error)
        else:
            self.result.set_result(result or {})


class Link:
    """Sends lists of calls, in order. Its thread ends with `close`.

    Parameters
    ----------
    url : str
        The server's.
    api_key : str, optional
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._loop = asyncio.new_event_loop()
        self._batches: asyncio.Queue[Sequence[Call] | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="radixkv-client", daemon=True)
        self._thread.start()

    def send(self, calls: Sequence[Call]) -> None:
        """Send these behind all that was sent before; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._batches.put_nowait, calls)
        except RuntimeError:
            for call in calls:
                call.end(None, ServerUnreachableError("the client was closed"))

    def close(self) -> None:
        """Send what is left, cancel what still runs on the server, and end the thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._batches.put_nowait, None)
        self._thread.join()

    # -- on its thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        readers: set[asyncio.Task[None]] = set()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        async with httpx.AsyncClient(headers=self._headers, timeout=TIMEOUT, limits=limits) as http:
            while (calls := await self._batches.get()) is not None:
                taken = asyncio.Event()
                reader = asyncio.create_task(self._exchange(http, calls, taken))
                readers.add(reader)
                reader.add_done_callback(readers.discard)
                await taken.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _exchange(
        self, http: httpx.AsyncClient, calls: Sequence[Call], taken: asyncio.Event
    ) -> None:
        """One list of operations, until the last of them has ended."""
        error: RadixKVError = ServerUnreachableError(
            f"the connection to {self._url} ended before its answer did"
        )
        try:
            body = {"operations": [call.operation for call in calls]}
            url = f"{self._url}/v1/contexts/operations"
            async with http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    error = _refusal(response, await response.aread())
                    return
                async for event in _events(response):
                    _deliver(calls, event)
                    taken.set()
        except (httpx.HTTPError, httpx.InvalidURL) as failed:
            reason = str(failed) or type(failed).__name__
            error = ServerUnreachableError(f"no connection to {self._url}: {reason}")
        except asyncio.CancelledError:
            error = ServerUnreachableError("the client was closed")
            raise
        except Exception as failed:
            error = RadixKVError(f"{self._url} gave an answer that is not understood: {failed!r}")
        finally:
            for call in calls:
                call.end(None, error)
            taken.set()


def _refusal(response: httpx.Response, body: bytes) -> RadixKVError:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, Mapping) or "error" not in answer or response.status_code == 404:
        return ServerUnreachableError(
            f"{response.url} answers with status {response.status_code}; is it a radixkv server?"
        )
    return error_of(answer)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def _deliver(calls: Sequence[Call], event: Mapping[str, Any]) -> None:
    if "outcomes" in event:
        for call, outcome in zip(calls, event["outcomes"], strict=True):
            if "running" not in outcome:
                _end(call, outcome)
        return
    call = calls[event["operation"]]
    if "text" in event:
        if call.on_text is not None:
            call.on_text(event["text"])
    else:
        _end(call, event)


def _end(call: Call, outcome: Mapping[str, Any]) -> None:
    if "error" in outcome:
        call.end(None, error_of(outcome))
    else:
        call.end(outcome["result"])
