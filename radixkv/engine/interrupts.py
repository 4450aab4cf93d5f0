"""Ctrl-C between any two bytecodes would leave blocks half moved: here it waits a moment."""

from __future__ import annotations

# `signal` wraps these two: it turns handlers into enum members and back, at twenty times the cost.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class DeferredInterrupts:
    """A context in which SIGINT waits until its end, or until `allowed`.

    Costs two system calls. Does nothing outside the main thread, where no signal arrives, and
    inside of another.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(signal.SIGINT)
            nested = getattr(handler, "__func__", None) is DeferredInterrupts._hold
            if callable(handler) and not nested:
                self._handler = handler
                _signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """A stretch that may be interrupted, at once if a signal has been waiting."""
        try:
            self._give_back()
            yield
        finally:
            if self._handler is not None:
                _signal.signal(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held.append((number, frame))

    def _give_back(self) -> None:
        if self._handler is not None:
            _signal.signal(signal.SIGINT, self._handler)
            if self._held:
                self._handler(*self._held.pop())
