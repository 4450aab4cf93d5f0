"""Counters of the cache, as plain numbers that only grow, and the state of the pool."""

from __future__ import annotations

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
    """

    queries: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    copied_tokens: int = 0
    blocks_stored: int = 0
    blocks_evicted: int = 0
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
