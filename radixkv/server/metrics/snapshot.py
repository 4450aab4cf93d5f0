"""Snapshot: all that is counted, at one moment between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from radixkv.cache.stats import Counters, Histogram
from radixkv.engine.stats import EngineCounters
from radixkv.llm import LLM
from radixkv.server.metrics.watch import EngineWatch

HISTOGRAMS = (
    "first_token",
    "queue",
    "prefill",
    "decode",
    "end_to_end",
    "per_output_token",
    "inter_token",
    "step",
    "prompt_tokens",
    "generation_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The engine at one moment, copied: nothing in it changes any more.

    Attributes
    ----------
    free, held, cached : int
        Blocks that nobody has, that sequences hold, and that only the tree does (which can be
        evicted); together all blocks of the pool.
    shared : int
        Blocks that sharing saves now: those that the sequences' tables name, counted once a table,
        less those that are held.
    histograms : mapping of str to Histogram
        Those of `EngineWatch`, and of `Residency` as ``lifetime``, ``idle`` and ``reuse_gap``.
    finished : mapping of str to int
        Continuations that ended, by reason.
    events_published, events_dropped : int
        Batches of KV events, and events that were never sent.
    """

    engine: EngineCounters
    cache: Counters
    block_size: int
    running: int
    waiting: int
    free: int
    held: int
    cached: int
    shared: int
    histograms: Mapping[str, Histogram]
    finished: Mapping[str, int]
    events_published: int
    events_dropped: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.free + self.held + self.cached

    @property
    def usage(self) -> float:
        """Share of the pool that sequences hold; what is only cached can be taken at any time."""
        return self.held / self.num_blocks


def take(llm: LLM, watch: EngineWatch, events: Callable[[], tuple[int, int]]) -> Snapshot:
    """Copy what is counted; on the engine's thread. O(sequences), whatever the size of the tree.

    Parameters
    ----------
    llm : LLM
    watch : EngineWatch
    events : callable
        Batches of KV events that were published, and events that were dropped.
    """
    cache, scheduler = llm.cache, llm.engine.scheduler
    free, evictable = cache.pool.num_free, cache.tree.num_evictable
    held = cache.pool.num_blocks - free - evictable
    named = sum(len(sequence.table) for sequence in cache.sequences.values())
    residency = cache.measure_residency()
    histograms = {name: getattr(watch, name).copy() for name in HISTOGRAMS}
    histograms["lifetime"] = residency.lifetime.copy()
    histograms["idle"] = residency.idle.copy()
    histograms["reuse_gap"] = residency.reuse_gap.copy()
    published, dropped = events()
    return Snapshot(
        engine=replace(llm.engine.counters),
        cache=replace(cache.counters),
        block_size=cache.block_size,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        free=free,
        held=held,
        cached=evictable,
        shared=named - held,
        histograms=histograms,
        finished=dict(watch.finished),
        events_published=published,
        events_dropped=dropped,
    )
