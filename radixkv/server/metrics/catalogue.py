"""The metrics: names, meanings, and what each reads from a snapshot.

Names are vLLM's where the meaning is the same; `docs/metrics.md` has both, and SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from radixkv.cache.stats import Histogram
from radixkv.server.metrics.snapshot import Snapshot

PREFIX = "radixkv:"


@dataclass(frozen=True)
class Single:
    """A gauge or a counter without labels of its own."""

    kind: str
    name: str
    meaning: str
    read: Callable[[Snapshot], float]


@dataclass(frozen=True)
class Labelled:
    """A gauge or a counter with one label, whose values are always the same few."""

    kind: str
    name: str
    meaning: str
    label: str
    read: Callable[[Snapshot], Mapping[str, float]]


@dataclass(frozen=True)
class Distribution:
    """A histogram."""

    name: str
    meaning: str
    read: Callable[[Snapshot], Histogram]
    kind: str = "histogram"


Metric = Single | Labelled | Distribution
counter = partial(Single, "counter")
gauge = partial(Single, "gauge")


def _histogram(name: str, meaning: str, key: str) -> Distribution:
    return Distribution(name, meaning, lambda s: s.histograms[key])


def _sources(s: Snapshot) -> dict[str, float]:
    hits, copied, held = s.cache.hit_tokens, s.cache.copied_tokens, s.cache.held_tokens
    return {"tree": hits - copied - held, "copied": copied, "held": held}


METRICS: tuple[Metric, ...] = (
    # -- now -------------------------------------------------------------------------------------
    gauge("num_requests_running", "Requests that run.", lambda s: s.running),
    gauge("num_requests_waiting", "Requests that wait to be admitted.", lambda s: s.waiting),
    gauge(
        "kv_cache_usage_perc",
        "Share of the blocks that running requests and contexts hold; 1 is all of them.",
        lambda s: s.usage,
    ),
    Labelled(
        "gauge",
        "kv_blocks",
        "Blocks that are free, held by sequences, or only cached (and can be evicted).",
        "state",
        lambda s: {"free": s.free, "held": s.held, "cached": s.cached},
    ),
    gauge(
        "kv_blocks_shared",
        "Blocks that sharing saves now: entries of block tables less the blocks that are held.",
        lambda s: s.shared,
    ),
    # -- the prefix cache ------------------------------------------------------------------------
    counter(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the cache, each once.",
        lambda s: s.cache.query_tokens,
    ),
    counter(
        "prefix_cache_hits",
        "Prompt tokens that were found in the cache, each once.",
        lambda s: s.cache.hit_tokens,
    ),
    Labelled(
        "counter",
        "cached_tokens",
        "Prompt tokens that were not computed: found in blocks of the tree, copied from inside "
        "a block, or still held by a context.",
        "source",
        _sources,
    ),
    counter("evicted_tokens", "Tokens that were evicted.", lambda s: s.cache.tokens_evicted),
    counter(
        "copies_on_write",
        "Blocks that were copied because a sequence wrote into one it shared.",
        lambda s: s.cache.copies_on_write,
    ),
    counter(
        "deduplicated_blocks",
        "Blocks that were computed twice, and are kept once.",
        lambda s: s.cache.blocks_deduplicated,
    ),
    _histogram(
        "kv_block_lifetime_seconds",
        "Time from a block's becoming visible to its eviction.",
        "lifetime",
    ),
    _histogram(
        "kv_block_idle_before_evict_seconds",
        "Time from a block's last use to its eviction.",
        "idle",
    ),
    _histogram(
        "kv_block_reuse_gap_seconds",
        "Time from a cached block's last use to the next.",
        "reuse_gap",
    ),
    # -- tokens ----------------------------------------------------------------------------------
    counter(
        "prompt_tokens",
        "Prompt tokens of admitted requests, cached or not.",
        lambda s: s.cache.query_tokens,
    ),
    counter("generation_tokens", "Tokens that were sampled.", lambda s: s.engine.sampled_tokens),
    counter(
        "prefilled_tokens",
        "Prompt tokens that were computed; a prefix once, whoever shares it.",
        lambda s: s.engine.prefilled_tokens,
    ),
    counter(
        "recomputed_tokens",
        "Tokens that a preempted request had lost, and that were computed again.",
        lambda s: s.engine.recomputed_tokens,
    ),
    counter(
        "kv_tokens_read",
        "Keys' tokens that attention reads, a full-attention layer.",
        lambda s: s.engine.kv_tokens_read,
    ),
    counter(
        "kv_tokens_unshared",
        "Keys' tokens that attention would read if no reads were shared.",
        lambda s: s.engine.kv_tokens_unshared,
    ),
    # -- requests --------------------------------------------------------------------------------
    counter("num_requests", "Requests that were taken.", lambda s: s.engine.requests),
    counter("num_preemptions", "Times a request was preempted.", lambda s: s.engine.preemptions),
    Labelled(
        "counter",
        "request_success",
        "Continuations that ended, by reason.",
        "finished_reason",
        lambda s: s.finished,
    ),
    _histogram(
        "time_to_first_token_seconds",
        "Time from a request's arrival to its first token.",
        "first_token",
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of a continuation.",
        "inter_token",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "A request's time after its first token, over its other tokens.",
        "per_output_token",
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "Time from a request's arrival to its end.",
        "end_to_end",
    ),
    _histogram(
        "request_queue_time_seconds",
        "Time from a request's arrival to its first admission.",
        "queue",
    ),
    _histogram(
        "request_prefill_time_seconds",
        "Time from a request's first admission to its first token.",
        "prefill",
    ),
    _histogram(
        "request_decode_time_seconds",
        "Time from a request's first token to its end.",
        "decode",
    ),
    _histogram("request_prompt_tokens", "Tokens of a request's prompt.", "prompt_tokens"),
    _histogram(
        "request_generation_tokens",
        "Tokens of a request's continuations.",
        "generation_tokens",
    ),
    # -- the engine ------------------------------------------------------------------------------
    _histogram("engine_step_seconds", "Time of a step.", "step"),
    counter(
        "kv_event_batches",
        "Batches of KV events that were published, heartbeats among them.",
        lambda s: s.events_published,
    ),
    counter(
        "kv_events_dropped",
        "KV events that were never sent, because they came faster than they could be.",
        lambda s: s.events_dropped,
    ),
)
