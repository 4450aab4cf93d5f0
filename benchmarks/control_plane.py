"""What does the prefix cache cost a request? Tokens in, block tables out; no model.

    python benchmarks/control_plane.py [--short] [--runs N] [--output FILE]

A whole request is acquire + extend by the output + commit with its open end + release, as an
engine would do it over the request's life. Prompts are numpy int64 arrays, as tokenizers and
others' benchmarks hand them over. Every workload is run several times on a fresh cache, and each
request's shortest time counts, so that other programs on the machine do not; CPU time is that of
the whole run by the process clock, for a check.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import workloads
from measure import best, machine, print_table, write_json

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig

BLOCK_SIZE = 16
STAGES = ("acquire", "extend", "commit", "release")
Times = npt.NDArray[np.float64]


@dataclass
class Result:
    """Microseconds of each request's stages; float64 (requests, stages)."""

    name: str
    stages: Times
    cpu: float  # microseconds a request, mean over the whole of the best run
    hit_rate: float
    matches: Times = field(default_factory=lambda: np.zeros(0))

    @property
    def whole(self) -> Times:
        return self.stages.sum(axis=1)

    def row(self) -> list[Any]:
        medians = [float(np.median(self.stages[:, i])) for i in range(len(STAGES))]
        match = float(np.median(self.matches)) if len(self.matches) else "-"
        whole = self.whole
        return [
            self.name,
            len(whole),
            match,
            *medians,
            float(np.median(whole)),
            float(whole.mean()),
            self.cpu,
            f"{self.hit_rate:.3f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        whole = self.whole
        return {
            "requests": len(whole),
            "whole_p50_us": float(np.median(whole)),
            "whole_mean_us": float(whole.mean()),
            "cpu_mean_us": self.cpu,
            "match_p50_us": float(np.median(self.matches)) if len(self.matches) else None,
            "hit_rate": self.hit_rate,
        } | {
            f"{stage}_p50_us": float(np.median(self.stages[:, i])) for i, stage in enumerate(STAGES)
        }


def serve(cache: PrefixCache, requests: list[workloads.Request]) -> Times:
    """Microseconds of each request's stages; float64 (requests, stages)."""
    clock = time.perf_counter
    times = np.empty((len(requests), len(STAGES)))
    for number, request in enumerate(requests):
        prompt, output = request.prompt, request.output
        begin = clock()
        sequence = cache.acquire(prompt)
        acquired = clock()
        sequence.extend(output)
        extended = clock()
        cache.commit(sequence, include_open=True)
        committed = clock()
        cache.release(sequence)
        released = clock()
        cache.take_copies()
        times[number] = (
            acquired - begin,
            extended - acquired,
            committed - extended,
            released - committed,
        )
    return times * 1e6


def look(cache: PrefixCache, requests: list[workloads.Request]) -> Times:
    """Microseconds of a match of each prompt."""
    clock = time.perf_counter
    times = np.empty(len(requests))
    for number, request in enumerate(requests):
        prompt = request.prompt
        begin = clock()
        cache.match(prompt)
        times[number] = clock() - begin
    return times * 1e6


def measure(
    name: str,
    requests: list[workloads.Request],
    num_blocks: int,
    runs: int,
    fill: list[workloads.Request] | None = None,
) -> Result:
    """Serve the requests ``runs`` times, each on a fresh cache, filled first."""
    stages, matches, cpu, hit_rate = [], [], [], 0.0
    for _ in range(runs):
        cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE))
        serve(cache, fill or [])
        before = cache.stats().counters
        gc.collect()
        gc.freeze()
        begin = time.process_time()
        stages.append(serve(cache, requests))
        cpu.append((time.process_time() - begin) / len(requests) * 1e6)
        matches.append(look(cache, requests[-2_000:]))
        gc.unfreeze()
        now = cache.counters
        hits = now.hit_tokens - before.hit_tokens
        hit_rate = hits / (now.query_tokens - before.query_tokens)
    return Result(name, best(stages), min(cpu), hit_rate, best(matches))


def blocks_for(requests: list[workloads.Request], share: float) -> int:
    """That share of the requests' unique tokens, in blocks."""
    return -(-int(workloads.unique_tokens(requests) * share) // BLOCK_SIZE)


def run(short: bool, runs: int) -> list[Result]:
    results = []
    requests = workloads.chat(conversations=300) if short else workloads.chat()
    if not short:
        found = workloads.digest(requests)
        assert found == workloads.CHAT_DIGEST, f"this is not the workload others ran: {found}"
    results.append(measure("chat", requests, blocks_for(requests, 0.25), runs))
    for leaves in (1_000, 10_000) if short else (1_000, 10_000, 100_000):
        fill, timed = workloads.sweep(leaves)
        # Just full: the shared system prompts once, and some 10 blocks a leaf.
        num_blocks = blocks_for(fill, 1.0)
        repeats = runs if leaves < 100_000 else max(runs // 2, 2)
        results.append(measure(f"sweep {leaves:,} leaves", timed, num_blocks, repeats, fill))
    requests = workloads.deep(turns=40 if short else 200)
    results.append(measure("deep chats", requests, blocks_for(requests, 2.0), runs))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a minute instead of ten")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args()
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    results = run(arguments.short, arguments.runs)
    head = ["microseconds", "requests", "match", *STAGES, "whole p50", "whole mean", "CPU", "hits"]
    print_table("Control plane, one request", head, [result.row() for result in results])
    write_json(arguments.output, {result.name: result.as_dict() for result in results})


if __name__ == "__main__":
    main()
