"""Pulse: delays and rates, from an observer of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from radixkv.engine import Request, TokenDelta
from radixkv.llm import LLM
from radixkv.server.page.clocks import ClockTimes

WINDOW_SECONDS = 60.0
HISTORY_SECONDS = 120
# A percentile of more is not worth its while.
MOST_DELAYS = 4096


class Percentiles(NamedTuple):
    """Seconds; None while there is nothing to tell."""

    p50: float | None
    p90: float | None
    p99: float | None
    num_delays: int


class Delays:
    """The delays of the last minute."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_DELAYS)

    def add(self, now: float, delay: float) -> None:
        """One more, in seconds."""
        self._values.append((now, delay))

    def percentiles(self, now: float) -> Percentiles:
        """Of the last `WINDOW_SECONDS`, and at most `MOST_DELAYS`."""
        while self._values and self._values[0][0] < now - WINDOW_SECONDS:
            self._values.popleft()
        if not self._values:
            return Percentiles(None, None, None, 0)
        values = np.fromiter((delay for _, delay in self._values), np.float64)
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        return Percentiles(p50, p90, p99, len(values))


class Totals(NamedTuple):
    """Counters that only grow; a rate is what they grew by in a time."""

    seconds: float
    sampled_tokens: int
    prefilled_tokens: int
    query_tokens: int
    hit_tokens: int
    kv_tokens_read: int
    kv_tokens_unshared: int


def totals(llm: LLM, seconds: float) -> Totals:
    """The counters now."""
    engine, cache = llm.engine.counters, llm.cache.counters
    return Totals(
        seconds,
        engine.sampled_tokens,
        engine.prefilled_tokens,
        cache.query_tokens,
        cache.hit_tokens,
        engine.kv_tokens_read,
        engine.kv_tokens_unshared,
    )


class Pulse:
    """Looks on at each step: time to first token, time between tokens, counters by the second.

    Attributes
    ----------
    first_token, between_tokens : Delays
    clocks : ClockTimes
        Of the tree's clock.
    history : deque of Totals
        The counters at the end of each second in which a step ran, at most two minutes of them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.first_token = Delays()
        self.between_tokens = Delays()
        self.clocks = ClockTimes()
        self.history: deque[Totals] = deque(maxlen=HISTORY_SECONDS)
        self._last: dict[tuple[str, int], float] = {}
        self._begun: set[str] = set()

    def stepped(self, llm: LLM, deltas: list[TokenDelta], seconds: float) -> None:
        """See `Observer`."""
        now = self.clock()
        self.clocks.note(llm.cache.tree.clock, now)
        for delta in deltas:
            if delta.token_id >= 0:
                self._note_token(llm, delta, now)
        if not llm.engine.has_work:
            self._last.clear()
            self._begun.clear()
        if self.history and int(self.history[-1].seconds) == int(now):
            self.history.pop()
        self.history.append(totals(llm, now))

    def _note_token(self, llm: LLM, delta: TokenDelta, now: float) -> None:
        key = delta.request_id, delta.index
        last = self._last.get(key)
        if last is None and delta.request_id not in self._begun:
            request = llm.engine.requests.get(delta.request_id)
            if request is not None:
                self._begun.add(delta.request_id)
                self._note_first(request, now)
        # Tokens that come all at once, as those of a search do, have no time between them.
        elif last is not None and last != now:
            self.between_tokens.add(now, now - last)
        if delta.finish_reason is None:
            self._last[key] = now
        else:
            self._last.pop(key, None)

    def _note_first(self, request: Request, now: float) -> None:
        if request.first_token_at is not None:
            self.first_token.add(now, request.first_token_at - request.arrived_at)

    def ended(self, request: Request) -> None:
        """See `Observer`; comes before the step's own deltas."""
        if request.request_id in self._begun:
            self._begun.discard(request.request_id)
        else:
            # Its first token came with its last.
            self._note_first(request, self.clock())
        for branch in request.branches:
            if branch.stream.finish_reason is None:
                self._last.pop((request.request_id, branch.index), None)
