"""The line that says every few seconds how the engine does, in vLLM's form; while there is work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from radixkv.server.metrics.snapshot import Snapshot

log = logging.getLogger("radixkv.server")


def stats_line(before: Snapshot, now: Snapshot, seconds: float) -> str:
    """What happened between two snapshots.

    The hit rate is that of the prompts admitted in between; of all before, if none were.
    """
    queries = now.cache.query_tokens - before.cache.query_tokens
    hits = now.cache.hit_tokens - before.cache.hit_tokens
    if not queries:
        queries, hits = max(now.cache.query_tokens, 1), now.cache.hit_tokens
    generated = now.engine.sampled_tokens - before.engine.sampled_tokens
    copies = now.cache.copies_on_write - before.cache.copies_on_write
    prompt = now.cache.query_tokens - before.cache.query_tokens
    return (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"KV cache usage: {now.usage:.1%}, "
        f"Prefix cache hit rate: {hits / queries:.1%}, "
        f"Blocks shared: {now.shared}, Copies on write: {copies}"
    )


async def log_stats(snapshot: Callable[[], Awaitable[Snapshot]], seconds: float) -> None:
    """Log a line every so many seconds in which the engine took a step; until cancelled."""
    before, began = await snapshot(), time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        now, ended = await snapshot(), time.monotonic()
        if now.engine.steps != before.engine.steps:
            log.info(stats_line(before, now, ended - began))
        before, began = now, ended
