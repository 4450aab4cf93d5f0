"""What does the cache itself cost a request, and does that grow with the tree?

Chat: 2,000 conversations × 5 turns over 8 system prompts of 2,000 tokens, block 16, a pool of 25 %
of the unique tokens. Sweep: the same cost at 1k, 10k and 100k leaves, every request evicting. Deep:
4 conversations of 200 turns, up to 32,000 tokens.

A whole request is acquire (match, pin, evict, allocate) + extend by the output + commit + release.
Times are CPU time of this process per request.

    python benchmarks/control_plane.py [--short] [--turns 3] [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from report import report
from workloads import CHAT_DIGEST, WorkloadRequest, chat, deep, digest, sweep, unique_tokens

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig

BLOCK = 16
STAGES = ("acquire", "extend", "commit", "release")
MICRO = 1e6


def serve(cache: PrefixCache, requests: Sequence[WorkloadRequest]) -> dict[str, list[float]]:
    """Pass requests through the cache; microseconds a stage and request."""
    clock = time.perf_counter
    times: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for request in requests:
        prompt, output = request.prompt, request.output
        start = clock()
        sequence = cache.acquire(prompt)
        acquired = clock()
        sequence.extend(output)
        extended = clock()
        cache.commit(sequence, include_open=True)
        committed = clock()
        cache.release(sequence)
        released = clock()
        cache.take_copies()
        stamps = (start, acquired, extended, committed, released)
        for stage, before, after in zip(STAGES, stamps[:-1], stamps[1:], strict=True):
            times[stage].append((after - before) * MICRO)
    return times


def measured(
    name: str,
    num_blocks: int,
    timed: Sequence[WorkloadRequest],
    fill: Sequence[WorkloadRequest] = (),
) -> list[Any]:
    """A row: CPU time a request over all, then medians of the stages."""
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=BLOCK))
    serve(cache, fill)
    leaves = len(cache.tree.queue)
    gc.collect()
    gc.disable()
    start = time.process_time()
    times = serve(cache, timed)
    cpu = (time.process_time() - start) * MICRO / len(timed)
    gc.enable()
    match_times = []
    for request in timed[-500:]:
        start = time.perf_counter()
        cache.match(request.prompt)
        match_times.append((time.perf_counter() - start) * MICRO)
    cache.check()
    whole = [sum(stages) for stages in zip(*times.values(), strict=True)]
    return [
        name,
        leaves or len(cache.tree.queue),
        cpu,
        statistics.median(whole),
        statistics.median(match_times),
        *(statistics.median(times[stage]) for stage in STAGES),
        cache.stats().hit_rate,
    ]


def best(rows: list[list[Any]]) -> list[Any]:
    """Of several runs of one thing, the medians column by column."""
    return [
        rows[0][column]
        if isinstance(rows[0][column], str)
        else statistics.median(row[column] for row in rows)
        for column in range(len(rows[0]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a tenth of the work, no 100k leaves")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    requests = chat(200 if options.short else 2_000)
    if not options.short and digest(requests) != CHAT_DIGEST:
        sys.exit("the chat workload is not the one that the peers were timed on")
    mean = float(np.mean([request.prompt_length for request in requests]))
    capacity = -(-int(unique_tokens(requests) * 0.25) // BLOCK)
    sizes = (1_000, 10_000) if options.short else (1_000, 10_000, 100_000)
    rows: dict[str, list[list[Any]]] = {}
    for _ in range(options.turns):
        rows.setdefault("chat", []).append(measured("chat", capacity, requests))
        for leaves in sizes:
            fill, timed = sweep(leaves, 200 if options.short else 2_000)
            tokens = unique_tokens(fill)
            name = f"sweep, {leaves:,} leaves"
            row = measured(name, -(-tokens // BLOCK) + leaves, timed, fill)
            rows.setdefault(name, []).append(row)
            del fill, timed
        turns = 40 if options.short else 200
        long = deep(turns)
        blocks = -(-unique_tokens(long) // BLOCK) + 64
        rows.setdefault("deep", []).append(measured(f"deep, {turns} turns", blocks, long))
    report(
        f"cost of the cache a request, µs; mean prompt {mean:,.0f} tokens, block {BLOCK}; "
        f"medians of {options.turns} turns",
        ["", "leaves", "CPU, mean", "whole, p50", "match", *STAGES, "hit rate"],
        [best(runs) for runs in rows.values()],
        options.output,
    )


if __name__ == "__main__":
    main()
