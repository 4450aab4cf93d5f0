"""Which request is sent when: arrivals, conversations in order, a bound on concurrency."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.cli.bench.client import Record, Target
from radixkv.cli.bench.datasets import Turn
from radixkv.errors import ConfigError

MOST_QUEUED = 1024
TURN_BEFORE_FAILED = "turn before failed"


@dataclass
class Run:
    """What was measured so far.

    Attributes
    ----------
    records : list of Record
        Of requests that have ended, however they ended.
    started : int
        Requests that were sent.
    seconds : float
        From the beginning to the last end.
    """

    records: list[Record] = field(default_factory=list)
    started: int = 0
    seconds: float = 0.0


def arrivals(turns: Sequence[Turn], rate: float | None, seed: int) -> list[float]:
    """When each is due, in seconds: a Poisson process, all at once, or (None) as recorded.

    Raises
    ------
    ConfigError
        If there is nothing recorded.
    """
    if rate is None:
        if any(turn.at_s is None for turn in turns):
            raise ConfigError("only a trace has recorded arrivals: give --rate a number, or inf")
        first = turns[0].at_s or 0.0
        return [(turn.at_s or 0.0) - first for turn in turns]
    if math.isinf(rate):
        return [0.0] * len(turns)
    rng = random.Random(seed)
    due, times = 0.0, []
    for _ in turns:
        times.append(due)
        due += rng.expovariate(rate)
    return times


async def drive(
    target: Target,
    turns: Sequence[Turn],
    due: Sequence[float],
    concurrency: int,
    run: Run,
    on_end: Callable[[Run], None],
) -> None:
    """Send all turns when they are due, and fill ``run``; cancelled, it keeps what has ended."""
    begin = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begin

    places = asyncio.Semaphore(concurrency)
    # The queue is as long as nobody would notice: a task for each of a million requests would be.
    queue = asyncio.Semaphore(concurrency + MOST_QUEUED)
    histories: dict[int, list[tuple[str, str]]] = {}
    before: dict[int, asyncio.Task[bool]] = {}

    async def ask(turn: Turn, record: Record, earlier: asyncio.Task[bool] | None) -> bool:
        begun = clock()
        must_wait = places.locked() or (earlier is not None and not earlier.done())
        if earlier is not None and not await earlier:
            # Without the answer before, the rest of the conversation would be another one.
            record.error, record.sent = TURN_BEFORE_FAILED, clock()
            record.ended = record.sent
        else:
            async with places:
                record.held += clock() - begun if must_wait else 0.0
                history = histories.setdefault(turn.conversation, [])
                history += turn.messages
                run.started += 1
                await target.ask(history, turn.max_tokens, record, clock)
                record.late = record.sent - record.due - record.held
                history.append(("assistant", record.text))
        queue.release()
        run.records.append(record)
        run.seconds = max(run.seconds, record.ended)
        on_end(run)
        return record.error is None

    async with asyncio.TaskGroup() as group:
        for number, (turn, at) in enumerate(zip(turns, due, strict=True)):
            if (wait := at - clock()) > 0:
                await asyncio.sleep(wait)
            record = Record(number, turn.conversation, at)
            begun = clock()
            await queue.acquire()
            record.held = clock() - begun
            earlier = before.get(turn.conversation)
            before[turn.conversation] = group.create_task(ask(turn, record, earlier))
