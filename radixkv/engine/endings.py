"""How a request ends, other than by its own last token."""

from __future__ import annotations

import time
from collections.abc import Iterable

from radixkv.cache import PrefixCache
from radixkv.engine.request import Request, TokenDelta
from radixkv.engine.scheduler import Scheduler
from radixkv.errors import EngineStoppedError, NumericalError


class Endings:
    """Takes requests out of an engine's.

    Parameters
    ----------
    requests : dict of str to Request
        The engine's, by their ids.
    cache : PrefixCache
    scheduler : Scheduler
    """

    def __init__(
        self, requests: dict[str, Request], cache: PrefixCache, scheduler: Scheduler
    ) -> None:
        self._requests = requests
        self._cache = cache
        self._scheduler = scheduler

    def fail(self, requests: Iterable[Request], error: BaseException) -> list[TokenDelta]:
        """End the requests of a step, or of a part of it, that raised an error."""
        deltas = []
        for request in dict.fromkeys(requests):
            reason = str(error) or type(error).__name__
            failure = EngineStoppedError(f"the step that carried the request failed: {reason}")
            failure.__cause__ = error
            deltas += self.end(request, failure)
        return deltas

    def fail_numerically(self, request: Request) -> list[TokenDelta]:
        """NaN logits: nothing that this request computed may be found by others."""
        for branch in request.branches:
            if branch.sequence is not None:
                self._cache.withdraw(branch.sequence, request.num_cached_tokens)
        return self.end(request, NumericalError("the model gave NaN logits for this request"))

    def end(self, request: Request, error: Exception) -> list[TokenDelta]:
        """End a request with an error, and tell whoever looks on at one of its branches."""
        request.error = error
        self._scheduler.counters.requests_failed += 1
        # Of what is ranked nothing was shown yet, so none of it has ended for who looks on.
        live = request.branches if request.params.ranked else request.live_branches
        live = live[: request.params.n]
        self.close(request)
        return [TokenDelta(request.request_id, b.index, -1, "", "error") for b in live]

    def close(self, request: Request) -> None:
        """Give back all that a request holds, and forget it."""
        self._scheduler.finish(request)
        request.finished_at = time.perf_counter()
        del self._requests[request.request_id]
