"""What does it cost to be watched? Metrics, logs, traces and KV events of the server; no model.

    python benchmarks/observing.py [--runs N] [--output FILE]

Each line is CPU time of this process, the shortest of all runs, and says on which thread it is
spent: the engine's, for which requests wait, the event loop's, for which streams wait, or one of
its own. "Residency" and "KV event" are differences: the same work on the cache with and without.
A cached prompt has 2,000 tokens in blocks of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from measure import print_table, write_json
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from radixkv.cache import IS_COMPILED, PrefixCache
from radixkv.config import CacheConfig
from radixkv.decoding import SamplingParams
from radixkv.engine import TokenDelta
from radixkv.engine.request import Branch, Request, Status, output_of
from radixkv.engine.stats import EngineCounters
from radixkv.server.access_log import log, log_as_json, log_plainly
from radixkv.server.answer import Answer
from radixkv.server.kv_events import KVEventPublisher
from radixkv.server.metrics.exposition import Metrics
from radixkv.server.metrics.snapshot import take
from radixkv.server.metrics.watch import EngineWatch
from radixkv.server.record import Record, Records
from radixkv.server.tracing import Tracing

SEQUENCES, PROMPT, CHUNKS = 64, 2000, 100


def shortest(function: Callable[[], object], runs: int, times: int = 1) -> float:
    """Microseconds of CPU time of one call."""
    taken = []
    for _ in range(runs):
        begin = time.process_time()
        for _ in range(times):
            function()
        taken.append((time.process_time() - begin) / times)
    return min(taken) * 1e6


class _Stream:
    """Tokens of a continuation that has ended."""

    def __init__(self, count: int) -> None:
        self.token_ids = list(range(count))
        self.finish_reason, self.stop_reason, self.text = "length", None, "x"


def ended_request() -> Request:
    """A request of 100 tokens that has had its 16."""
    request = Request("request-1", 1, np.arange(100, dtype=np.int32), SamplingParams(), 0)
    request.branches = [Branch(request, 0, _Stream(16))]  # type: ignore[arg-type]
    request.status = Status.FINISHED
    request.admitted_at = request.arrived_at + 0.01
    request.first_token_at = request.arrived_at + 0.05
    request.finished_at = request.arrived_at + 0.5
    return request


def step_cost(runs: int) -> dict[str, float]:
    """The observer's time a step and a request."""
    watch = EngineWatch()
    deltas = [TokenDelta(f"request-{n}", 0, 5, "x", None) for n in range(SEQUENCES)]
    watch.stepped(None, deltas, 0.01)  # type: ignore[arg-type]
    request = ended_request()
    return {
        f"a step of {SEQUENCES} sequences": shortest(
            lambda: watch.stepped(None, deltas, 0.01),  # type: ignore[arg-type]
            runs,
            200,
        ),
        "a request that ends": shortest(lambda: watch.ended(request), runs, 200),
    }


def scrape_cost(runs: int) -> dict[str, float]:
    """A scrape's time on the engine's thread, on the event loop, and there in one piece."""
    cache = PrefixCache(CacheConfig(num_blocks=4096))
    sequences = [cache.acquire(range(n, n + 100)) for n in range(256)]
    scheduler = SimpleNamespace(running=sequences, waiting=[])
    engine = SimpleNamespace(scheduler=scheduler, counters=EngineCounters())
    llm: Any = SimpleNamespace(cache=cache, engine=engine)
    watch = EngineWatch()
    snapshot = take(llm, watch, lambda: (0, 0))
    metrics = Metrics("demo")
    for number in range(30):
        metrics.http_requests.labels("GET", f"/route/{number}", "200").inc()
    pieces: list[float] = []

    async def render() -> None:
        async def others() -> None:
            while True:
                begin = time.process_time()
                await asyncio.sleep(0)
                pieces.append(time.process_time() - begin)

        between = asyncio.create_task(others())
        await metrics.render(snapshot)
        between.cancel()

    longest = []
    for _ in range(runs):
        pieces.clear()
        asyncio.run(render())
        longest.append(max(pieces))
    whole = shortest(lambda: asyncio.run(metrics.render(snapshot)), runs)
    return {
        "a scrape, engine": shortest(lambda: take(llm, watch, lambda: (0, 0)), runs, 50),
        "a scrape, event loop": whole,
        "a scrape, longest piece": min(longest) * 1e6,
    }


SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/chat/completions",
    "headers": [(f"header-{n}".encode(), b"value") for n in range(8)],
    "client": ("127.0.0.1", 1),
}


def http_cost(runs: int) -> dict[str, float]:
    """What `Records` adds to a request, and to each chunk of a streamed answer."""
    start = {"type": "http.response.start", "status": 200, "headers": []}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(dict(start))
        for _ in range(scope["chunks"]):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        pass

    records = Records(app, [])
    scopes = {count: SCOPE | {"chunks": count} for count in (0, CHUNKS)}
    costs = {}
    for layer in (app, records):
        for count, scope in scopes.items():

            async def serve(layer: Any = layer, scope: Any = scope) -> None:
                for _ in range(50):
                    await layer(dict(scope), None, send)

            costs[layer, count] = shortest(lambda: asyncio.run(serve()), runs) / 50
    request = costs[records, 0] - costs[app, 0]
    streamed = costs[records, CHUNKS] - costs[app, CHUNKS]
    return {"id and record, a request": request, "a chunk": (streamed - request) / CHUNKS}


def report_cost(runs: int) -> dict[str, float]:
    """An answered request's line in the log, and its trace of five spans."""
    record = Record(SCOPE)
    answer = Answer("request-1", time.perf_counter(), lambda name: None)
    answer.output = output_of(ended_request())
    record.note([answer])
    record.status, record.complete, record.route = 200, True, "/v1/chat/completions"
    record.ended = record.began + 0.5
    log.addHandler(logging.NullHandler())
    log.setLevel(logging.INFO)
    log.propagate = False
    tracing = Tracing("demo", InMemorySpanExporter())
    costs = {
        "a line in the log": shortest(lambda: log_plainly(record), runs, 100),
        "a line as JSON": shortest(lambda: log_as_json(record), runs, 100),
        "a trace": shortest(lambda: tracing.report(record), runs, 20),
    }
    tracing.close()
    return costs


def cache_cost(runs: int) -> dict[str, float]:
    """What a cached prompt's request costs more if times are kept, and a block if it is told."""
    plain = PrefixCache(CacheConfig(num_blocks=4096))
    timed = PrefixCache(CacheConfig(num_blocks=4096))
    timed.measure_residency()
    prompt = list(range(PROMPT))
    publisher = KVEventPublisher("tcp://127.0.0.1:*", 16)
    told = PrefixCache(CacheConfig(num_blocks=4096, events=publisher.sink))
    publisher._awake = True  # Nobody sends: what is measured is the engine's part.
    publisher._queue = deque(maxlen=1000)

    def again(cache: PrefixCache) -> float:
        def request() -> None:
            sequence = cache.acquire(prompt)
            cache.commit(sequence)
            cache.release(sequence)

        request()
        return shortest(request, runs, 100)

    def grow(cache: PrefixCache) -> float:
        def block() -> None:
            sequence = cache.acquire(prompt + [next(numbers)] * 16)
            cache.commit(sequence)
            cache.release(sequence)

        numbers = iter(range(1_000_000))
        return shortest(block, runs, 20)

    costs = {
        "residency, a cached prompt": again(timed) - again(plain),
        "a KV event behind 2,000 tokens": grow(told) - grow(plain),
    }
    publisher.close()
    return costs


THREADS = {
    step_cost: ("engine", "engine"),
    scrape_cost: ("engine", "event loop", "event loop"),
    http_cost: ("event loop", "event loop"),
    report_cost: ("event loop", "event loop", "event loop"),
    cache_cost: ("engine", "engine"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [
        [what, thread, micros]
        for measure, threads in THREADS.items()
        for (what, micros), thread in zip(measure(options.runs).items(), threads, strict=True)
    ]
    head = ["what", "thread", "us"]
    cache = "compiled" if IS_COMPILED else "Python"
    print_table(f"Watching a server; the cache is {cache}", head, lines)
    write_json(
        options.output, {"cache": cache, "lines": [dict(zip(head, x, strict=True)) for x in lines]}
    )


if __name__ == "__main__":
    main()
