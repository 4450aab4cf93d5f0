"""EngineWorker: the engine on a thread of its own, and how an event loop talks with it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from radixkv.cache import DEFAULT_RETENTION, Namespace, Retention
from radixkv.engine import Request, RequestOutput, TokenDelta, output_of
from radixkv.engine.beams import Params
from radixkv.engine.request import Status
from radixkv.errors import EngineStoppedError, QueueFullError
from radixkv.llm import LLM
from radixkv.server.answer import Answer, Piece
from radixkv.server.record import CURRENT

T = TypeVar("T")
log = logging.getLogger("radixkv.server")


class Observer(Protocol):
    """Looks on from the engine's thread; must be quick, and must not touch the engine."""

    def stepped(self, llm: LLM, deltas: list[TokenDelta], seconds: float) -> None:
        """A step has run, in so many seconds, and added this."""

    def ended(self, request: Request) -> None:
        """A request has ended, however it ended."""


@dataclass(slots=True)
class _Followed:
    request: Request
    answer: Answer
    seen: list[int]  # Tokens of each continuation that were delivered.

    def piece(self, delta: TokenDelta) -> Piece:
        """A delta, with the log-probabilities of its token if they were asked for."""
        logprobs = None
        if delta.token_id >= 0:
            place = self.seen[delta.index]
            self.seen[delta.index] += 1
            if self.request.reports_logprobs:
                logprobs = self.request.branches[delta.index].logprobs[place]
        return Piece(delta, logprobs)


_Delivery = tuple[Answer, Sequence[Piece], RequestOutput | None]


class EngineWorker:
    """Steps an engine for as long as it has work, and runs what others ask of it in between.

    Only its thread touches the LLM: whatever else wants to goes through `call`. What a step adds
    reaches the event loop in one hop, however many requests it belongs to.

    Parameters
    ----------
    llm : LLM
        Closed with the worker.
    max_queued : int
        Requests that may be unfinished at a time; more are refused with `QueueFullError`.
    """

    def __init__(self, llm: LLM, *, max_queued: int = 1024) -> None:
        self.llm = llm
        self.max_queued = max_queued
        self.num_unfinished = 0
        self.num_reserved = 0
        self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._followed: dict[str, _Followed] = {}
        self._observers: list[Observer] = []
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)
        self._error: BaseException | None = None
        self._ended = False
        self._gone = asyncio.Event()

    # -- from the event loop ---------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; what it delivers goes to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the engine takes steps; false before the start, and after a broken law."""
        return self._thread.is_alive() and not self._ended

    def watch(self, observer: Observer) -> None:
        """Have an observer called after each step; before `start`."""
        self._observers.append(observer)

    async def call(self, function: Callable[[LLM], T]) -> T:
        """Run a function on the engine's thread, between two steps; its result, or its error.

        Raises
        ------
        EngineStoppedError
            If the thread has ended.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        def work() -> None:
            try:
                result = function(self.llm)
            except BaseException as error:
                self._post(settle, None, error)
            else:
                self._post(settle, result, None)

        if not self.alive:
            raise EngineStoppedError("the engine has stopped; restart the server")
        self._calls.put(work)
        if self._ended:  # It may have been too late for that.
            settle(None, EngineStoppedError("the engine has stopped; restart the server"))
        return await future

    def tell(self, function: Callable[[LLM], object]) -> None:
        """Have a function run on the engine's thread for which nobody waits; an error is logged.

        Served in order with what was asked for before. Nothing happens once the thread has ended.
        """

        def work() -> None:
            try:
                function(self.llm)
            except Exception:
                log.exception("what the engine was told to do has failed")

        self._calls.put(work)

    async def submit(
        self,
        prompt: Iterable[int],
        params: Params,
        *,
        request_id: str | None = None,
        namespace: Namespace = (),
        retention: Retention = DEFAULT_RETENTION,
    ) -> Answer:
        """Queue one request; see `Engine.add_request`, and `begin` for the other errors."""

        def make(llm: LLM) -> list[Request]:
            return [
                llm.engine.add_request(
                    prompt,
                    params,
                    request_id=request_id,
                    namespace=namespace,
                    retention=retention,
                )
            ]

        (answer,) = await self.begin(make)
        return answer

    async def begin(self, make: Callable[[LLM], list[Request]], slots: int = 1) -> list[Answer]:
        """Have requests made on the engine's thread, and follow each to its end.

        Parameters
        ----------
        make : callable
            Adds ``slots`` requests to the engine at the most, or raises and leaves none there.

        Raises
        ------
        RequestError
            If ``make`` does.
        QueueFullError
            If too many are unfinished.
        EngineStoppedError
            If the server is shutting down.
        """
        self.check_open(slots)
        self.num_unfinished += slots
        made: list[Request] = []

        def work(llm: LLM) -> list[Answer]:
            try:
                made.extend(make(llm))
            except BaseException:
                self._post(self._give_back, slots)
                raise
            if len(made) < slots:
                self._post(self._give_back, slots - len(made))
            return [self._follow(request) for request in made]

        def take_back(llm: LLM) -> None:
            for request in made:
                llm.engine.abort(request.request_id)

        try:
            answers = await self.call(work)
        except asyncio.CancelledError:
            # Calls are served in order: by then all are made.
            self._calls.put(partial(take_back, self.llm))
            raise
        if (record := CURRENT.get()) is not None:
            record.note(answers)
        return answers

    def _give_back(self, slots: int) -> None:
        self.num_unfinished -= slots

    def check_open(self, slots: int = 1) -> None:
        """Raise what `begin` would raise now, before it makes anything."""
        if self.draining or not self.alive:
            raise EngineStoppedError("the server is shutting down")
        taken = self.num_unfinished + self.num_reserved
        if taken + slots > self.max_queued:
            raise QueueFullError(taken, self.max_queued)

    @contextmanager
    def reserved(self, slots: int = 1) -> Iterator[None]:
        """Keep places for requests that are being prepared; raises what `check_open` does.

        Who waits to be tokenized counts, so that a crowd is turned away before that work.
        """
        self.check_open(slots)
        self.num_reserved += slots
        try:
            yield
        finally:
            self.num_reserved -= slots

    async def drain(self, seconds: float) -> bool:
        """Take no more requests and wait for those that run; whether all have ended in time."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self.num_unfinished and self.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.num_unfinished

    async def gone(self) -> None:
        """Wait for the thread's end; nothing is served behind it."""
        await self._gone.wait()

    async def stop(self) -> None:
        """End what still runs with `EngineStoppedError`, close the LLM, end the thread."""
        self.draining = True
        if self._thread.is_alive():
            self._calls.put(None)
            await asyncio.to_thread(self._thread.join)

    # -- on the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve_calls():
                if self.llm.engine.has_work:
                    self._step()
        except BaseException as error:
            self._error, self._ended = error, True
            log.exception("the engine has stopped: %s", error)
        finally:
            self.llm.close()
            self._ended = True
            # Who has asked already is answered, if only by the stopped engine's refusal.
            while not self._calls.empty():
                if (work := self._calls.get()) is not None:
                    work()
            self._deliver_ends(list(self._followed))
            self._post(self._gone.set)

    def _serve_calls(self) -> bool:
        """Run what was asked for, waiting for it if there is nothing else; false to end."""
        block = not self.llm.engine.has_work
        served = False
        while block or not self._calls.empty():
            work = self._calls.get()
            if work is None:
                return False
            work()
            served, block = True, False
        if served:
            followed = self._followed.items()
            self._deliver_ends(
                [name for name, its in followed if its.request.status is Status.FINISHED]
            )
        return True

    def _step(self) -> None:
        begin = time.perf_counter()
        deltas = self.llm.engine.step()
        seconds = time.perf_counter() - begin
        self._deliver(deltas)
        for observer in self._observers:
            observer.stepped(self.llm, deltas, seconds)

    def _follow(self, request: Request) -> Answer:
        answer = Answer(request.request_id, request.arrived_at, self._cancel)
        seen = [0] * len(request.branches)
        self._followed[request.request_id] = _Followed(request, answer, seen)
        return answer

    def _cancel(self, request_id: str) -> None:
        self._calls.put(partial(self.llm.engine.abort, request_id))

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        pieces: dict[str, list[Piece]] = {}
        for delta in deltas:
            if (followed := self._followed.get(delta.request_id)) is not None:
                pieces.setdefault(delta.request_id, []).append(followed.piece(delta))
        ended = [name for name in pieces if self._followed[name].request.status is Status.FINISHED]
        self._deliver_ends(ended, pieces)

    def _deliver_ends(self, ended: list[str], pieces: dict[str, list[Piece]] | None = None) -> None:
        """Hand pieces over, and the outputs of what has ended, in one hop to the event loop."""
        outputs: dict[str, RequestOutput] = {}
        batch: list[_Delivery] = []
        for name in ended:
            outputs[name] = output_of(self._followed[name].request)
        for name in dict.fromkeys((*(pieces or ()), *ended)):
            its = (pieces or {}).get(name, ())
            batch.append((self._followed[name].answer, its, outputs.get(name)))
        if batch:
            self._post(self._hand_over, batch)
        for name in ended:
            request = self._followed.pop(name).request
            for observer in self._observers:
                observer.ended(request)

    def _hand_over(self, batch: list[_Delivery]) -> None:
        for answer, pieces, output in batch:
            answer.deliver(pieces, output)
            if output is not None:
                self.num_unfinished -= 1

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # The loop is closed: nobody is left to hear of it.
            self._loop.call_soon_threadsafe(function, *arguments)
