"""EngineWatch: how long requests, tokens and steps take, as seen from the engine's thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from radixkv.cache.stats import Histogram
from radixkv.engine import Request, TokenDelta
from radixkv.llm import LLM

# Upper bounds in seconds; where vLLM has a metric of the name, within its bounds' range.
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 1, 2.5, 5, 10, 15, 30, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

REASONS = ("stop", "length", "abort", "error")


class EngineWatch:
    """An `Observer` that only counts.

    Attributes
    ----------
    first_token, queue, prefill, decode, end_to_end, per_output_token : Histogram
        Seconds; each request once, where it came so far.
    inter_token : Histogram
        Seconds between two tokens of one continuation; each token but the first once.
    step : Histogram
        Seconds of each step.
    prompt_tokens, generation_tokens : Histogram
        Tokens; each request once.
    finished : Counter
        Continuations that ended, by reason.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.first_token = Histogram(FIRST_TOKEN)
        self.queue = Histogram(REQUEST)
        self.prefill = Histogram(REQUEST)
        self.decode = Histogram(REQUEST)
        self.end_to_end = Histogram(REQUEST)
        self.per_output_token = Histogram(TOKEN)
        self.inter_token = Histogram(TOKEN)
        self.step = Histogram(STEP)
        self.prompt_tokens = Histogram(TOKENS)
        self.generation_tokens = Histogram(TOKENS)
        self.finished: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._clock = clock
        # When a continuation that goes on last had a token.
        self._last: dict[tuple[str, int], float] = {}

    def stepped(self, llm: LLM, deltas: list[TokenDelta], seconds: float) -> None:
        """Observe the step, and the time since each continuation's last token."""
        self.step.observe(seconds)
        now, last = self._clock(), self._last
        # Most continuations had their last token in the same step: they are observed together.
        waited: dict[float, int] = {}
        for delta in deltas:
            key = (delta.request_id, delta.index)
            before = last.get(key)
            # What is ranked comes all at once: between its tokens there is no time.
            if before is not None and before != now and delta.token_id >= 0:
                waited[before] = waited.get(before, 0) + 1
            if delta.finish_reason is None:
                last[key] = now
            elif before is not None:
                del last[key]
        for before, times in waited.items():
            self.inter_token.observe(now - before, times)

    def ended(self, request: Request) -> None:
        """Observe the whole of a request, as far as it came."""
        number = 0
        for branch in request.branches[: request.params.n]:
            number += len(branch.stream.token_ids)
            reason: str | None = branch.stream.finish_reason
            if reason is None:
                # No delta will come. (The last of who has ended itself is still to be observed.)
                self._last.pop((request.request_id, branch.index), None)
                reason = "abort" if request.error is None else "error"
            self.finished[reason] += 1
        self.prompt_tokens.observe(len(request.prompt))
        self.generation_tokens.observe(number)
        arrived, admitted, first = request.arrived_at, request.admitted_at, request.first_token_at
        ended = request.finished_at or self._clock()
        self.end_to_end.observe(ended - arrived)
        if admitted is not None:
            self.queue.observe(admitted - arrived)
        if first is not None:
            self.first_token.observe(first - arrived)
        # What is searched or ranked has no first token before its last.
        at_once = request.beams is not None or request.params.ranked
        if first is not None and admitted is not None and not at_once:
            self.prefill.observe(first - admitted)
            self.decode.observe(ended - first)
            longest = max(len(branch.stream.token_ids) for branch in request.branches)
            if longest > 1:
                self.per_output_token.observe((ended - first) / (longest - 1))
