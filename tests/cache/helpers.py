"""Short ways to say what most tests of the cache say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from radixkv.cache import PrefixCache, Retention, Sequence
from radixkv.config import CacheConfig


def make_cache(num_blocks: int = 16, block_size: int = 4, **settings: Any) -> PrefixCache:
    return PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size, **settings))


def compute(cache: PrefixCache, tokens: Iterable[int], **how: Any) -> Sequence:
    """Acquire and commit, as if the KV had been computed; the sequence goes on living."""
    include_open = how.pop("include_open", False)
    sequence = cache.acquire(list(tokens), **how)
    cache.commit(sequence, include_open=include_open)
    cache.check()
    return sequence


def cached(
    cache: PrefixCache, tokens: Iterable[int], end: Retention | None = None, **how: Any
) -> None:
    """Leave these tokens' blocks in the cache, held by nobody."""
    cache.release(compute(cache, tokens, **how), end)
    cache.check()


def shape(cache: PrefixCache) -> list[tuple[int, int]]:
    """(start block, tokens) of every node, in order."""
    return sorted((node.start, len(node.tokens) // 4) for node in cache.tree.nodes())
