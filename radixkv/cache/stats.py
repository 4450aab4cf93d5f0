"""Counters of the cache, as plain numbers that only grow, and the state of the pool."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Grow from the cache's making; never reset, so that a reader can take differences.

    Attributes
    ----------
    query_tokens : int
        Prompt tokens of sequences that were acquired, each counted once however often its
        request was retried, chunked or preempted.
    hit_tokens : int
        Those of them whose KV was found in the cache.
    copied_tokens : int
        Those of the hits that were reused by copying part of a block.
    held_tokens : int
        Those of the hits that the sequence of a context still held from its last generation.
    tokens_evicted : int
        Tokens whose KV went with ``blocks_evicted``; the last block of a run may not be full.
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    held_tokens: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
    tokens_evicted: int = 0
    blocks_deduplicated: int = 0
    blocks_withdrawn: int = 0
    copies_on_write: int = 0
    forks: int = 0
    splits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters and the pool's state at one moment; blocks unless the name says tokens."""

    num_blocks: int
    block_size: int
    free: int
    held_only: int
    cached_only: int
    held_and_cached: int
    sequences: int
    nodes: int
    cached_tokens: int
    counters: Counters

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache; 0 before the first query."""
        return self.counters.hit_tokens / max(self.counters.query_tokens, 1)


class Histogram:
    """How often values fell below which bounds; grows, like the counters.

    Parameters
    ----------
    bounds : sequence of float
        Upper bounds, rising; a value belongs to the first that it does not exceed.

    Attributes
    ----------
    counts : list of int (len(bounds) + 1,)
        Values that belong to each bound, and those above all.
    total : float
        Sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Values that were counted."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """As it is now."""
        other = Histogram(self.bounds)
        other.counts, other.total = self.counts[:], self.total
        return other
