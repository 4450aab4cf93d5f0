"""Answer: what an event loop sees of a request that the engine's thread runs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from radixkv.decoding.logprobs import TokenLogprobs
from radixkv.engine import RequestOutput, TokenDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one continuation.

    Attributes
    ----------
    delta : TokenDelta
    logprobs : TokenLogprobs or None
        Of the delta's token, where the request asked for them and there is one.
    """

    delta: TokenDelta
    logprobs: TokenLogprobs | None


class Answer:
    """A request's pieces as they come, and its output once it has ended. For one reader.

    Pieces wait here for a slow reader: at the most all the tokens that its request may have.

    Attributes
    ----------
    request_id : str
    arrived_at : float
        When the engine took the request, as `time.perf_counter` reads.
    output : RequestOutput or None
        The whole, once the request has ended, with the error if it failed.
    """

    def __init__(self, request_id: str, arrived_at: float, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.arrived_at = arrived_at
        self.output: RequestOutput | None = None
        self._pieces: deque[Piece] = deque()
        self._grown = asyncio.Event()
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Each piece once; ends with the request, however it ended."""
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            if self.output is not None:
                return
            self._grown.clear()
            await self._grown.wait()

    def take(self) -> list[Piece]:
        """All pieces that wait; none if nothing has come since."""
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces

    async def end(self) -> RequestOutput:
        """Wait for the whole; pieces that were not read are dropped."""
        while self.output is None:
            self._pieces.clear()
            self._grown.clear()
            await self._grown.wait()
        return self.output

    def wake(self, grown: asyncio.Event) -> None:
        """Set this event, in place of the answer's own, whenever something comes."""
        self._grown = grown

    def cancel(self) -> None:
        """Have the engine end it before its next step, if it has not ended."""
        if self.output is None:
            self._cancel(self.request_id)

    def deliver(self, pieces: Sequence[Piece], output: RequestOutput | None) -> None:
        """For the worker: what has come, and the whole if that was the end."""
        self._pieces.extend(pieces)
        if output is not None:
            self.output = output
        self._grown.set()


async def arrivals(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, list[Piece]]]:
    """What comes of several answers, with their places; all that waits of one at a time.

    A reader that is slower than the engine gets more pieces at once, not later ones. Each place
    comes once more with no pieces when its answer has ended.
    """
    grown = asyncio.Event()
    for answer in answers:
        answer.wake(grown)
    open_places = dict(enumerate(answers))
    while open_places:
        grown.clear()
        for place, answer in list(open_places.items()):
            ended = answer.output is not None
            if pieces := answer.take():
                yield place, pieces
            if ended:
                del open_places[place]
                yield place, []
        if open_places:
            await grown.wait()
