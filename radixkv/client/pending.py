"""What `generate`, `score` and `choose` return: work for the server, and its result.

Nothing is sent before somebody waits: then all that was asked for until now goes in one list, and
starts in one batch.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from radixkv.client.link import Call
from radixkv.client.results import Choice, Output, Score

if TYPE_CHECKING:
    from radixkv.client.context import Context

T = TypeVar("T")


class Pending(ABC, Generic[T]):
    """Work of a context.

    Parameters
    ----------
    context : Context
    call : Call
        Queued already.
    conclude : callable, optional
        Told the server's result once, when a good end is noticed.
    """

    def __init__(
        self,
        context: Context,
        call: Call,
        conclude: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._context = context
        self._call = call
        self._conclude = conclude
        self._concluded = False

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, failed or cancelled."""
        return self._call.result.done()

    @property
    def ended(self) -> Future[Any]:
        """Done when this is; not to be set."""
        return self._call.result

    def result(self) -> T:
        """Wait until this is done.

        Raises
        ------
        RequestError
            If the server has refused it.
        GenerationCancelledError
            If it was cancelled.
        EngineStoppedError, NumericalError, ServerUnreachableError
            If it failed. The context is then as it was before.
        """
        self._context.client.flush()
        try:
            wait([self._call.result])
        except BaseException:
            self.cancel()
            raise
        return self.value()

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        # Whoever is ready speaks first, so that what starts together runs together.
        asyncio.get_running_loop().call_soon(self._context.client.flush)
        await self._heard(self._call.result)
        return self.value()

    async def _heard(self, future: Future[Any]) -> None:
        """Wait for a future's end; a task that is cancelled here cancels what it waits for."""
        ended: Future[None] = Future()
        future.add_done_callback(lambda _: ended.set_result(None))
        try:
            await asyncio.wait([asyncio.wrap_future(ended)])
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End it now, unless it has ended; its context is then as it was before.

        Waits for the server's word on it.
        """
        if not self.done:
            self._context.client.cancel(self._context.id, self._call)
            wait([self._call.result])
        self.settle()

    def settle(self) -> None:
        """If it has ended, let its context have what came of it."""
        if self._concluded or not self.done:
            return
        self._concluded = True
        if self._call.result.exception() is None and self._conclude is not None:
            self._conclude(self._call.result.result())

    def value(self) -> T:
        """The result of work that has ended."""
        self.settle()
        if (error := self._call.result.exception()) is not None:
            self._context.heard_of(error)
            raise error
        return self._of(self._call.result.result())

    @abstractmethod
    def _of(self, result: Mapping[str, Any]) -> T:
        """The server's result as an object."""


def run(pending: Iterable[Pending[Any]]) -> list[Any]:
    """Run several generations (scores, choices) in one batch.

    Returns
    -------
    list
        Their results, in order.

    Raises
    ------
    The first error among them, once all have ended. Ctrl-C cancels them all.
    """
    work = list(pending)
    for each in work:
        each._context.client.flush()
    try:
        wait([each._call.result for each in work])
    except BaseException:
        for each in work:
            each.cancel()
        raise
    for each in work:
        each.settle()
    return [each.value() for each in work]


class Generation(Pending[Output]):
    """A continuation of a context: run, await or iterate it.

    Iterating (also with ``async for``) yields text as it comes; breaking off cancels nothing.
    """

    def __init__(
        self, context: Context, call: Call, conclude: Callable[[Mapping[str, Any]], None]
    ) -> None:
        super().__init__(context, call, conclude)
        self._pieces: list[str] = []
        self._lock = threading.Lock()
        self._growth: list[Future[None]] = []
        call.on_text = self._grow
        call.result.add_done_callback(lambda _: self._grow(""))

    def _of(self, result: Mapping[str, Any]) -> Output:
        return Output.of(result)

    @property
    def text(self) -> str:
        """The whole text; waits until it is there."""
        return self.result().text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that were sampled; waits until they are there."""
        return self.result().token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended; waits until it has."""
        return self.result().finish_reason

    def __iter__(self) -> Iterator[str]:
        self._context.client.flush()
        seen = 0
        while True:
            try:
                wait([self._beyond(seen)])
            except BaseException:
                self.cancel()
                raise
            if seen == len(self._pieces):
                self.value()
                return
            seen, text = self._since(seen)
            yield text

    async def __aiter__(self) -> AsyncIterator[str]:
        asyncio.get_running_loop().call_soon(self._context.client.flush)
        seen = 0
        while True:
            await self._heard(self._beyond(seen))
            if seen == len(self._pieces):
                self.value()
                return
            seen, text = self._since(seen)
            yield text

    def _since(self, seen: int) -> tuple[int, str]:
        pieces = self._pieces[seen:]
        return seen + len(pieces), "".join(pieces)

    def _beyond(self, seen: int) -> Future[None]:
        """Done once there is more than was seen, or there will be no more."""
        future: Future[None] = Future()
        with self._lock:
            if self.done or len(self._pieces) > seen:
                future.set_result(None)
            else:
                self._growth.append(future)
        return future

    def _grow(self, text: str) -> None:
        """On the link's thread: more has come, or the end."""
        with self._lock:
            if text:
                self._pieces.append(text)
            waiting, self._growth = self._growth, []
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(None)


class Scoring(Pending[Score]):
    """The score of a text that is not kept; its numbers wait until they are there."""

    def _of(self, result: Mapping[str, Any]) -> Score:
        return Score.of(result)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return self.result().logprobs

    @property
    def total(self) -> float:
        return self.result().total

    @property
    def mean(self) -> float:
        return self.result().mean


class Choosing(Pending[Choice]):
    """A choice between texts; its properties wait until it is made."""

    def _of(self, result: Mapping[str, Any]) -> Choice:
        return Choice.of(result)

    @property
    def text(self) -> str:
        return self.result().text

    @property
    def index(self) -> int:
        return self.result().index
