"""What does the prefix cache cost a request? Tokens in, block tables out; no model.

    python benchmarks/control_plane.py [--short] [--runs N] [--only sweep] [--peers vllm,...]

A whole request is acquire + extend by the output + commit with its open end + release, as an
engine would do it over the request's life. Prompts are numpy int64 arrays, as tokenizers and
others' benchmarks hand them over. Every workload is run several times on a fresh cache, and each
request's shortest time counts, so that other programs on the machine do not; CPU time is that of
the whole run by the process clock, for a check.

Beside it, in turn on the same requests: vLLM's block pool and SGLang's radix tree, in Rust and in
Python, in their own environment (`make peers`, below `.peers/` or the folder that the variable
RADIXKV_PEERS names), driven by `peers/drive_control.py`. Each is handed its tokens in the form that
it likes best, and that conversion is not counted. Before a sweep is timed, every cache is given
more conversations, untimed, until it has no room for another; "evicted" are the blocks that a timed
request then made room for, in the mean. Ours evicts up to 64 blocks at once and some requests later
again, so requests are compared by their mean CPU time, too. Peers whose cost grows with the tree
are timed for `--seconds`, which may be fewer requests than ours.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plots
import workloads
from measure import best, print_head, print_table, write_json
from peers.engines import HERE, on_cores
from peers.install import python_of, status_of
from peers.process import PeerError, PeerProcess

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig

BLOCK_SIZE = 16
STAGES = ("acquire", "extend", "commit", "release")
OURS = "radixkv"
PEERS = {
    "vllm": "vLLM block pool",
    "sglang-rust": "SGLang, tree in Rust",
    "sglang-python": "SGLang, tree in Python",
}
# Leaves at which filling a cache takes a minute and more: all run once there, if there are peers.
LARGE = 100_000
Times = npt.NDArray[np.float64]


@dataclass
class Result:
    """Microseconds of each request's stages; float64 (requests, stages)."""

    name: str
    stages: Times
    cpu: float  # microseconds a request, mean over the whole of the best run
    hit_rate: float
    evicted: float  # blocks a request
    matches: Times = field(default_factory=lambda: np.zeros(0))
    names: tuple[str, ...] = STAGES

    @property
    def whole(self) -> Times:
        return self.stages.sum(axis=1)

    @property
    def medians(self) -> list[float]:
        return [float(np.median(times)) for times in self.stages.T]

    def row(self) -> list[Any]:
        match = float(np.median(self.matches)) if len(self.matches) else "-"
        whole = self.whole
        return [
            self.name,
            len(whole),
            match,
            *self.medians,
            float(np.median(whole)),
            float(whole.mean()),
            self.cpu,
            f"{self.hit_rate:.3f}",
            self.evicted,
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
            "evicted_blocks": self.evicted,
        } | {
            f"{stage}_p50_us": median
            for stage, median in zip(self.names, self.medians, strict=True)
        }


@dataclass(frozen=True)
class Workload:
    """What is served: how it is made (see `workloads.make`), and by a cache of which size."""

    name: str
    spec: dict[str, Any]
    share: float  # of the unique tokens of what fills the cache, or else of what is timed

    def requests(self) -> tuple[list[workloads.Request], list[workloads.Request], int]:
        """Requests that fill the cache, those to time, and the blocks of the pool."""
        fill, timed = workloads.make(**self.spec)
        return fill, timed, blocks_for(fill or timed, self.share)


def serve(cache: PrefixCache, requests: list[workloads.Request]) -> tuple[Times, float]:
    """Microseconds of stages, float64 (requests, stages), and the blocks evicted a request."""
    clock = time.perf_counter
    times = np.empty((len(requests), len(STAGES)))
    evicted = cache.counters.blocks_evicted
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
    evicted = cache.counters.blocks_evicted - evicted
    return times * 1e6, evicted / max(len(requests), 1)


def fill_up(
    cache: PrefixCache, fill: list[workloads.Request], more: Iterable[workloads.Request]
) -> None:
    """Serve what fills a cache, and more until it has no room for another."""
    serve(cache, fill)
    for request in more:
        if cache.pool.num_free < workloads.own_blocks(request, cache.block_size):
            break
        serve(cache, [request])


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


def one_run(
    fill: list[workloads.Request],
    timed: list[workloads.Request],
    num_blocks: int,
    block_size: int = BLOCK_SIZE,
    more: Iterable[workloads.Request] = (),
) -> tuple[Times, Times, float, float, float]:
    """Serve on a fresh cache, filled first.

    Returns
    -------
    tuple
        Times of stages, of matches, CPU time, hit rate, and the blocks evicted a request.
    """
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    fill_up(cache, fill, more)
    before = cache.stats().counters
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    stages, evicted = serve(cache, timed)
    cpu = (time.process_time() - begin) / len(timed) * 1e6
    matches = look(cache, timed[-2_000:])
    gc.unfreeze()
    now = cache.counters
    hits = now.hit_tokens - before.hit_tokens
    return stages, matches, cpu, hits / (now.query_tokens - before.query_tokens), evicted


def blocks_for(requests: list[workloads.Request], share: float) -> int:
    """That share of the requests' unique tokens, in blocks."""
    return -(-int(workloads.unique_tokens(requests) * share) // BLOCK_SIZE)


def all_workloads(short: bool) -> list[Workload]:
    """The four kinds, and the sizes of the sweep."""
    # Just full: the shared system prompts once, and some 10 blocks a leaf.
    sweeps = [
        Workload(f"sweep {leaves:,} leaves", {"kind": "sweep", "leaves": leaves}, 1.0)
        for leaves in ((1_000, 10_000) if short else (1_000, 10_000, 100_000))
    ]
    return [
        Workload("chat", {"kind": "chat", "conversations": 300 if short else 2_000}, 0.25),
        *sweeps,
        Workload("deep chats", {"kind": "deep", "turns": 40 if short else 200}, 2.0),
        Workload("RAG", {"kind": "rag", "requests": 200 if short else 1_000}, 0.25),
    ]


class Peers:
    """The peers' processes, by name, and why those that do not run do not."""

    def __init__(self, names: list[str]) -> None:
        self.processes: dict[str, PeerProcess] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.failures: dict[tuple[str, str], str] = {}
        status = status_of("control")
        for name in names:
            try:
                if not status["installed"]:
                    raise PeerError(f"not installed: {status['reason']}")
                script = str(HERE / "drive_control.py")
                process = PeerProcess(PEERS[name], [str(python_of("control")), script, name])
                self.processes[name] = process
                self.facts[name] = process.ask(do="load") | {"versions": status["versions"]}
            except PeerError as error:
                self._lose(name, str(error))

    def _lose(self, name: str, reason: str) -> None:
        self.facts[name] = {"failure": reason}
        if name in self.processes:
            self.processes.pop(name).close()

    def run(self, name: str, workload: Workload, num_blocks: int, seconds: float) -> dict[str, Any]:
        """A peer's reply to one run; empty if it fails, now or before."""
        if name not in self.processes or (name, workload.name) in self.failures:
            return {}
        process = self.processes[name]
        try:
            return process.ask(
                do="run", workload=workload.spec, num_blocks=num_blocks, seconds=seconds
            )
        except PeerError as error:
            self.failures[name, workload.name] = str(error)
            if not process.is_alive():
                self._lose(name, str(error))
            return {}

    def close(self) -> None:
        for name in list(self.processes):
            self.processes.pop(name).close()


def measure(workload: Workload, runs: int, seconds: float, peers: Peers) -> dict[str, Result]:
    """Ours and the peers', in turn, ``runs`` times; by name, of those that run."""
    fill, timed, num_blocks = workload.requests()
    if workload.spec == {"kind": "chat", "conversations": 2_000}:
        digest = workloads.digest(timed)
        assert digest == workloads.CHAT_DIGEST, f"not the workload others ran: {digest}"
    if len(fill) >= LARGE and peers.processes:
        runs = 1
    ours: list[tuple[Times, Times, float, float, float]] = []
    theirs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(runs):
        more = workloads.further(**workload.spec)
        ours.append(one_run(fill, timed, num_blocks, more=more))
        for name in list(peers.processes):
            if reply := peers.run(name, workload, num_blocks, seconds):
                digest = workloads.digest(timed[: len(reply["stages_us"])])
                assert reply["digest"] == digest, f"{name} was given other requests"
                theirs.setdefault(name, []).append(reply)
    stages, matches, cpu, hit_rates, evicted = zip(*ours, strict=True)
    results = {OURS: Result(OURS, best(stages), min(cpu), hit_rates[0], evicted[0], best(matches))}
    for name, replies in theirs.items():
        # What all runs had time for.
        count = min(len(reply["stages_us"]) for reply in replies)
        results[name] = Result(
            PEERS[name],
            best([np.array(reply["stages_us"][:count]) for reply in replies]),
            min(reply["cpu_us"] for reply in replies),
            replies[0]["hit_rate"],
            replies[0]["evicted"],
            names=tuple(replies[0]["names"]),
        )
    return results


def show(workload: Workload, results: dict[str, Result], peers: Peers) -> None:
    """Our stages, then whole requests of all beside each other."""
    ours = results[OURS]
    head = ["microseconds", "requests", "match", *STAGES, "whole p50", "whole mean", "CPU", "hits"]
    print_table(f"{workload.name}: one request", [*head, "evicted"], [ours.row()])
    rows = []
    for result in list(results.values())[1:]:
        parts = ", ".join(
            f"{stage} {median:.0f}"
            for stage, median in zip(result.names, result.medians, strict=True)
        )
        whole = float(np.median(result.whole))
        base = float(np.median(ours.whole[: len(result.whole)]))  # of the same requests
        mean = float(result.whole.mean())
        hits, evicted = f"{result.hit_rate:.3f}", result.evicted
        line = [result.name, len(result.whole), whole, mean, result.cpu, hits, evicted]
        rows.append([*line, whole / base, result.cpu / ours.cpu, parts])
    if rows:
        head = ["", "requests", "whole p50", "whole mean", "CPU", "hits", "evicted"]
        head += ["ours is x faster", "by CPU"]
        print_table(f"{workload.name}: others, in turn", [*head, "stages p50"], rows)
    for (name, where), reason in peers.failures.items():
        if where == workload.name:
            print(f"{PEERS[name]}: {reason}")


def draw(found: dict[str, dict[str, Result]], path: Path) -> None:
    """Microseconds of a whole request as the tree grows."""
    sweeps = {name: each for name, each in found.items() if name.startswith("sweep")}
    leaves = [int(name.split()[1].replace(",", "")) for name in sweeps]
    series = {
        PEERS.get(name, OURS): [
            float(np.median(each[name].whole)) if name in each else None for each in sweeps.values()
        ]
        for name in (OURS, *PEERS)
        if any(name in each for each in sweeps.values())
    }
    title = "A whole request, by the size of the tree"
    plots.lines(path, title, "microseconds, p50", "leaves", leaves, series, logarithmic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a minute instead of ten")
    parser.add_argument("--runs", type=int, help="5, or 2 if short")
    parser.add_argument("--only", default="", help="workloads with this in their name")
    parser.add_argument("--seconds", type=float, default=20, help="of a peer's timed requests")
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        help="by name, or none; installed below RADIXKV_PEERS if that is set, or .peers/",
    )
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw the sweep there, as SVG or PNG")
    options = parser.parse_args()
    names = [] if options.peers == "none" else options.peers.split(",")
    if unknown := set(names) - set(PEERS):
        parser.error(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}, or none")
    chosen = [each for each in all_workloads(options.short) if options.only in each.name]
    if not chosen:
        there = ", ".join(each.name for each in all_workloads(options.short))
        parser.error(f"no workload has {options.only!r} in its name; there are {there}")
    print_head()
    found: dict[str, dict[str, Result]] = {}
    with on_cores(1):
        peers = Peers(names)
        try:
            for name, facts in peers.facts.items():
                said = facts.get("failure") or facts["versions"]
                print(f"{PEERS[name]}: {said}")
            for workload in chosen:
                runs = options.runs or (2 if options.short else 5)
                found[workload.name] = measure(workload, runs, options.seconds, peers)
                show(workload, found[workload.name], peers)
        finally:
            peers.close()
    results = {
        workload: {name: result.as_dict() for name, result in each.items()}
        for workload, each in found.items()
    }
    write_json(options.output, results, engines=peers.facts)
    if options.plot is not None:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
