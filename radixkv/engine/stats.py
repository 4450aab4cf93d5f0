"""Counters of the engine: plain numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache import CacheStats


@dataclass(slots=True)
class EngineCounters:
    """Grow from the engine's making.

    Attributes
    ----------
    steps_grown : int
        Steps in which the same rows as in the one before went on decoding.
    prefilled_tokens : int
        Prompt tokens whose KV was computed; each prefix counts once, whoever shares it.
    recomputed_tokens : int
        Tokens that a preempted request had computed before, lost, and computed again.
    decoded_tokens : int
        Generated tokens whose KV was computed; the last one of a continuation never is.
    logits_only_tokens : int
        Queries that ran only for the logits behind a prompt that was cached to the end.
    kv_tokens_read, kv_tokens_unshared : int
        KV tokens that attention reads a full-attention layer, and would read without sharing.
    peak_blocks_held : int
        Most blocks that sequences held at one time.
    """

    steps: int = 0
    steps_grown: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    logits_only_tokens: int = 0
    decoded_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    requests: int = 0
    requests_failed: int = 0
    requests_aborted: int = 0
    kv_tokens_read: int = 0
    kv_tokens_unshared: int = 0
    peak_blocks_held: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's and the cache's counters and state at one moment."""

    running: int
    waiting: int
    engine: EngineCounters
    cache: CacheStats
