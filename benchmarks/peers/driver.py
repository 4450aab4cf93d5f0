"""The loop inside a peer's own process: a JSON request a line in, a JSON reply a line out.

Only Python's own library, for it runs in environments that have nothing of ours. The requests are
described in `process.py`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
Reply = dict[str, Any]


class Clock:
    """When each token of each prompt came, in seconds from the start of a run."""

    def __init__(self, prompts: int) -> None:
        self.start = time.perf_counter()
        self.times: list[list[float]] = [[] for _ in range(prompts)]

    def note(self, prompt: int) -> None:
        """A token of this prompt's first continuation has come."""
        self.times[prompt].append(time.perf_counter() - self.start)

    def note_all(self) -> None:
        """A token of every prompt has come."""
        now = time.perf_counter() - self.start
        for times in self.times:
            times.append(now)


class Driver:
    """What a peer must do; one subclass a driver script."""

    def load(self, request: Request) -> Reply:
        """Load ``model`` in ``dtype``; may add facts for the reader to the reply."""
        raise NotImplementedError("a driver must load")

    def reset(self) -> None:
        """Forget all that is cached."""
        raise NotImplementedError("a driver must reset")

    def run(self, request: Request) -> Reply:
        """Continue ``prompts``; ``tokens``, and ``times`` and ``cached_tokens`` if they are known.

        ``tokens`` are lists of token ids by prompt and continuation.
        """
        raise NotImplementedError("a driver must run")


def common_length(rows: list[list[int]]) -> int:
    """Leading tokens that all rows share."""
    first, last = min(rows), max(rows)  # What these two share, all between them share.
    pairs = enumerate(zip(first, last, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(last)))


def peak_mib() -> float:
    """The most memory this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(call: Callable[[Request], Reply], request: Request) -> Reply:
    """A call's reply with ``wall_s``, ``cpu_s`` (of all threads) and ``peak_mib``."""
    wall, cpu = time.perf_counter(), time.process_time()
    reply = call(request)
    reply["wall_s"] = time.perf_counter() - wall
    reply["cpu_s"] = time.process_time() - cpu
    reply["peak_mib"] = peak_mib()
    return reply


def answer(driver: Driver, request: Request) -> Reply:
    """Carry out one request; what fails is an answer, too."""
    try:
        if request["do"] == "load":
            return timed(driver.load, request)
        if request["do"] == "run":
            return timed(driver.run, request)
        if request["do"] == "reset":
            driver.reset()
            return {}
        raise ValueError(f"no such request: {request['do']!r}")
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or ["no message"]
        return {"error": f"{type(error).__name__}: {said[0][:300]}"}


def serve(make: Callable[[], Driver]) -> None:
    """Answer requests until there are no more."""
    # Libraries print as they like: the replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver = make()
    for line in sys.stdin:
        request = json.loads(line)
        replies.write(json.dumps(answer(driver, request)) + "\n")
        replies.flush()
