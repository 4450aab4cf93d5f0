"""Which block size? Memory held in vain, the cost of a lookup, and the books, for 1 to 128 tokens.

    python benchmarks/waste.py [--short] [--output FILE] [--plot FILE]

*Waste* is slots held over tokens needed. Needed is every distinct prefix of the running requests
once: what the best conceivable store would hold. Three ways to hold them: one contiguous stretch of
the longest request's length for each request; blocks without sharing; and this cache. 64 chats run
at once over 8 system prompts of 2,000 tokens; what they hold is counted after their prompts and at
ten points of their answers. Beside it, on the chat workload at a quarter of its tokens: the time of
a match and of a whole request, and the books' own bytes a cached token (`metadata.py`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import control_plane
import numpy as np
import plots
import workloads
from measure import print_head, print_table, write_json
from metadata import bytes_per_token

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
POINTS = 10  # of an answer at which is counted


@dataclass
class Held:
    """Slots held, summed over the points: by each way, and what was needed."""

    contiguous: int = 0
    unshared: int = 0
    shared: int = 0
    needed: int = 0

    def as_dict(self) -> dict[str, float]:
        ways = ("contiguous", "unshared", "shared")
        return {way: getattr(self, way) / self.needed for way in ways}


def distinct_tokens(running: list[workloads.Request], lengths: list[int]) -> int:
    """Distinct prefixes of so many tokens of each request."""
    cut = [
        workloads.Request(each.conversation, each.turn, each.group, each.tokens[:length], length)
        for each, length in zip(running, lengths, strict=True)
    ]
    return workloads.unique_tokens(cut)


def hold(running: list[workloads.Request], block_size: int) -> Held:
    """Run the requests at once, and count after their prompts and along their answers."""
    longest = max(len(each.tokens) for each in running)
    num_blocks = sum(-(-len(each.tokens) // block_size) for each in running)
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    sequences = []
    for each in running:
        sequences.append(cache.acquire(each.prompt))
        # What is computed is visible at once, as in a step that computes it for all.
        cache.commit(sequences[-1])
        cache.take_copies()
    held = Held()
    for point in range(POINTS + 1):
        for sequence, each in zip(sequences, running, strict=True):
            until = each.prompt_length + len(each.output) * point // POINTS
            sequence.extend(each.tokens[sequence.num_tokens : until])
            cache.commit(sequence)
        cache.take_copies()
        lengths = [sequence.num_tokens for sequence in sequences]
        stats = cache.stats()
        held.contiguous += longest * len(running)
        held.unshared += sum(-(-length // block_size) * block_size for length in lengths)
        held.shared += (stats.held_only + stats.held_and_cached) * block_size
        held.needed += distinct_tokens(running, lengths)
    for sequence in sequences:
        cache.release(sequence)
    return held


def measure(block_size: int, conversations: int) -> dict[str, Any]:
    """All that is known of a block size."""
    requests = workloads.chat(conversations=conversations)
    running = [each for each in requests if each.turn == 0][:64]
    num_blocks = -(-workloads.unique_tokens(requests) // 4 // block_size)
    runs = [control_plane.one_run([], requests, num_blocks, block_size) for _ in range(2)]
    whole = np.min([stages.sum(axis=1) for stages, *_ in runs], axis=0)
    match = np.min([matches for _, matches, *_ in runs], axis=0)
    books, *_ = bytes_per_token(requests, block_size)
    return hold(running, block_size).as_dict() | {
        "match_p50_us": float(np.median(match)),
        "whole_p50_us": float(np.median(whole)),
        "bytes_per_token": books,
        "hit_rate": runs[0][3],
    }


def row_of(size: int, kept: dict[str, Any]) -> list[Any]:
    ways = [f"{kept[way]:.3f}" for way in ("contiguous", "unshared", "shared")]
    rest = kept["match_p50_us"], kept["whole_p50_us"], kept["bytes_per_token"]
    return [str(size), *ways, *rest, f"{kept['hit_rate']:.3f}"]


def draw(results: dict[str, Any], path: Path) -> None:
    """Waste by block size."""
    series = {
        title: [kept[way] for kept in results.values()]
        for way, title in (
            ("contiguous", "contiguous reservation"),
            ("unshared", "blocks, not shared"),
            ("shared", "radixkv"),
        )
    }
    places = [int(size) for size in results]
    title = "Slots held over tokens needed, 64 chats"
    plots.lines(path, title, "x", "block size", places, series, logarithmic=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="fewer chats, three block sizes")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    parser.add_argument("--plot", type=Path, help="draw the waste there, as SVG or PNG")
    options = parser.parse_args()
    print_head()
    sizes = (1, 16, 128) if options.short else BLOCK_SIZES
    results = {str(size): measure(size, 80 if options.short else 500) for size in sizes}
    print_table(
        "Slots held over tokens needed; microseconds; bytes of the books a cached token",
        ["block size", "contiguous", "not shared", "ours", "match", "request", "bytes", "hits"],
        [row_of(int(size), kept) for size, kept in results.items()],
    )
    write_json(options.output, results)
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
