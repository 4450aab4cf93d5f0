"""What does the live page cost a server that is watched? No model: a tree as a busy server has one.

    python benchmarks/page.py [--runs N] [--output FILE]

Between any two snapshots the running sequences grow by a token, each sixteenth of them by a block,
and one comes and one goes. "take" runs on the engine's thread, between two steps; "encode" names,
labels and encodes for all watchers at once, on the texts' thread. CPU time of the thread, medians.
The share of a core is what the feed allows itself: at most five snapshots a second, and fewer where
they would cost more than `MOST_OF_A_CORE`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from measure import print_head, print_table, write_json

from radixkv.cache import PrefixCache, Sequence
from radixkv.config import CacheConfig
from radixkv.engine.stats import EngineCounters
from radixkv.server.page.feed import INTERVAL_SECONDS, MOST_OF_A_CORE, encode
from radixkv.server.page.pulse import Pulse
from radixkv.server.page.removals import RemovalLog
from radixkv.server.page.snapshot import Look
from radixkv.server.page.texts import Labels

# nodes, blocks of the pool, running sequences
SIZES = ((100, 2048, 16), (1000, 8192, 64), (10_000, 65_536, 256))
VOCABULARY = 30_000


class Scene:
    """A cache with so many nodes, and sequences that run on it."""

    def __init__(self, nodes: int, blocks: int, running: int) -> None:
        self.rng = random.Random(0)
        self.cache = PrefixCache(CacheConfig(num_blocks=blocks))
        self.texts = [self.words(64) for _ in range(8)]
        while self.cache.stats().nodes < nodes:
            for _ in range(max(nodes // 50, 1)):
                self.cache.release(self.start())
        self.sequences = [self.start() for _ in range(running)]

    def words(self, count: int) -> list[int]:
        """Tokens at random."""
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]

    def start(self) -> Sequence:
        """A sequence that shares a beginning of any length with others."""
        begin = self.rng.choice(self.texts)
        text = begin[: self.rng.randrange(16, len(begin) + 1)] + self.words(24)
        if len(text) < 200:
            self.texts = [*self.texts[-500:], text]
        sequence = self.cache.acquire(text)
        self.cache.commit(sequence, include_open=True)
        return sequence

    def step(self) -> None:
        """All grow by a token; the oldest ends, and another comes."""
        for sequence in self.sequences:
            sequence.append(self.rng.randrange(VOCABULARY))
            self.cache.commit(sequence)
        self.cache.release(self.sequences.pop(0))
        self.sequences.append(self.start())

    def llm(self, counters: EngineCounters) -> Any:
        """As much of an LLM as is looked at."""
        counters.steps += 1
        stream = SimpleNamespace(token_ids=[1], text="what was generated so far " * 4)
        requests = [
            SimpleNamespace(
                request_id=f"request-{place}",
                hold=None,
                branches=[SimpleNamespace(sequence=sequence, stream=stream)],
            )
            for place, sequence in enumerate(self.sequences)
        ]
        scheduler = SimpleNamespace(running=requests, waiting=[], holds=[])
        engine = SimpleNamespace(counters=counters, scheduler=scheduler)
        return SimpleNamespace(cache=self.cache, engine=engine)


def measure(nodes: int, blocks: int, running: int, runs: int) -> dict[str, Any]:
    """One row of the table."""
    scene, counters = Scene(nodes, blocks, running), EngineCounters()
    pulse = Pulse()
    log = RemovalLog(pulse)
    scene.cache.watch_removals(log)
    look = Look(pulse, log)
    labels = Labels(lambda ids: " ".join(map(str, ids)))
    take, encoded, sizes = [], [], []
    for _ in range(runs + 1):
        scene.step()
        snapshot = look.take(scene.llm(counters))
        assert snapshot is not None
        parts, seconds = encode(snapshot, labels)
        take.append(snapshot.cpu_seconds)
        encoded.append(seconds)
        sizes.append(sum(map(len, parts.values())))
    # The first one decodes all labels.
    cost = statistics.median(take[1:]) + statistics.median(encoded[1:])
    interval = max(INTERVAL_SECONDS, cost / MOST_OF_A_CORE)
    return {
        "nodes": f"{scene.cache.stats().nodes:,}",
        "blocks": blocks,
        "running": running,
        "take_ms": 1e3 * statistics.median(take[1:]),
        "encode_ms": 1e3 * statistics.median(encoded[1:]),
        "first_encode_ms": 1e3 * encoded[0],
        "kilobytes": statistics.median(sizes) / 1e3,
        "snapshots_per_second": 1 / interval,
        "percent_of_a_core": 100 * cost / (cost + interval),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [measure(*size, arguments.runs) for size in SIZES]
    print_head()
    print_table("A watched page", list(rows[0]), [list(row.values()) for row in rows])
    write_json(arguments.output, {"sizes": rows})


if __name__ == "__main__":
    main()
