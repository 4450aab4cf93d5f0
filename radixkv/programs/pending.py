"""What `generate`, `score` and `choose` return: work that has been queued, and its result.

Nothing runs before somebody asks: `Pending.result` and `run` step the engine, ``await`` lets the
event loop's tasks share its steps, and whatever else is pending runs along.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from radixkv.decoding import FinishReason
from radixkv.engine import Request, RequestOutput, output_of
from radixkv.engine.interrupts import DeferredInterrupts
from radixkv.engine.request import Status
from radixkv.errors import GenerationCancelledError
from radixkv.programs.host import Host

T = TypeVar("T")


class Pending(ABC, Generic[T]):
    """Queued work of a context.

    Parameters
    ----------
    host : Host
    requests : sequence of Request
        All of them in the engine already.
    conclude : callable
        Called once, with whether all went well, when the end of the work is noticed.
    """

    def __init__(
        self, host: Host, requests: Sequence[Request], conclude: Callable[[bool], None]
    ) -> None:
        self._host = host
        self._requests = requests
        self._conclude: Callable[[bool], None] | None = conclude
        self._error: Exception | None = None

    @property
    def requests(self) -> Sequence[Request]:
        """What the engine runs for it."""
        return self._requests

    @property
    def done(self) -> bool:
        """Whether it has ended: finished, failed or cancelled."""
        return all(request.status is Status.FINISHED for request in self._requests)

    def result(self) -> T:
        """Run the engine until this is done, with all that is pending beside it.

        Raises
        ------
        GenerationCancelledError
            If it was cancelled.
        EngineStoppedError, NumericalError
            If it failed. The context is then as it was before.
        """
        run([self])
        return self.value()

    def __await__(self) -> Generator[Any, None, T]:
        yield from self._host.wait(self).__await__()
        return self.value()

    def cancel(self) -> None:
        """End it now, unless it has ended; its context is then as it was before."""
        if not self.done:
            for request in self._requests:
                self._host.engine.abort(request.request_id)
        self.settle()

    @property
    def concluded(self) -> bool:
        """Whether its context has what came of it."""
        return self._conclude is None

    def settle(self) -> None:
        """If it has ended, let its context have what came of it."""
        if self._conclude is None or not self.done:
            return
        with DeferredInterrupts():
            conclude, self._conclude = self._conclude, None
            self._error = next(filter(None, map(_error_of, self._requests)), None)
            conclude(self._error is None)

    def value(self) -> T:
        """The result of work that has ended."""
        self.settle()
        if self._error is not None:
            raise self._error
        return self._value()

    @abstractmethod
    def _value(self) -> T:
        """The result, if there is no error."""


def _error_of(request: Request) -> Exception | None:
    if request.error is not None:
        return request.error
    if request.live_branches:
        return GenerationCancelledError(f"{request.request_id} was cancelled before its end")
    return None


def run(pending: Iterable[Pending[Any]]) -> list[Any]:
    """Run several generations (scores, choices) in one batch.

    Returns
    -------
    list
        Their results, in order.

    Raises
    ------
    The first error among them, once all have ended. Whatever interrupts the engine itself (Ctrl-C)
    cancels them all.
    """
    work = list(pending)
    try:
        for each in work:
            while not each.done:
                each._host.step()
    except BaseException:
        for each in work:
            each.cancel()
        raise
    for each in work:
        each.settle()
    return [each.value() for each in work]


class Generation(Pending[RequestOutput]):
    """A continuation of a context: run, await or iterate it.

    Iterating (also with ``async for``) yields text as it comes; breaking off cancels nothing.
    """

    def _value(self) -> RequestOutput:
        return output_of(self._requests[0])

    @property
    def text(self) -> str:
        """The whole text; runs the engine until it is there."""
        return self.result().text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that were sampled; runs the engine until they are there."""
        return self.result().token_ids

    @property
    def finish_reason(self) -> FinishReason | str | None:
        """Why it ended; runs the engine until it has."""
        return self.result().finish_reason

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces():
            if piece:
                yield piece
            else:
                self._host.step()

    async def __aiter__(self) -> AsyncIterator[str]:
        for piece in self._pieces():
            if piece:
                yield piece
            else:
                await self._host.wait(_Growth(self, len(self._text_so_far())))

    def _pieces(self) -> Iterator[str]:
        """Text as it has come, and an empty piece wherever more must be run for."""
        seen = 0
        while True:
            done, text = self.done, self._text_so_far()
            if len(text) > seen:
                yield text[seen:]
                seen = len(text)
            elif done:
                self.value()
                return
            else:
                yield ""

    def _text_so_far(self) -> str:
        return self._requests[0].branches[0].stream.text


class _Growth:
    """Text beyond what was seen, or the end."""

    def __init__(self, generation: Generation, seen: int) -> None:
        self._generation = generation
        self._seen = seen

    @property
    def done(self) -> bool:
        return self._generation.done or len(self._generation._text_so_far()) > self._seen

    def cancel(self) -> None:
        self._generation.cancel()
