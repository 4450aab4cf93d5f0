"""How much memory does the tree itself take for each cached token?

Everything that the cache allocates while the chat workload fills a roomy pool: tokens, block ids,
nodes, children, the eviction queue. Measured by tracemalloc, without the fixed arrays of the pool,
which are reported a token of capacity.

    python benchmarks/metadata.py [--conversations 2000] [--output FILE]
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from pathlib import Path

from report import report
from workloads import chat, unique_tokens

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=2_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    requests = chat(options.conversations)
    rows = []
    for block_size in (1, 4, 16, 64):
        # Room for all, so that nothing is evicted and every unique token is cached.
        blocks = unique_tokens(requests) // block_size + 2 * options.conversations
        gc.collect()
        tracemalloc.start()
        cache = PrefixCache(CacheConfig(num_blocks=blocks, block_size=block_size))
        fixed = tracemalloc.get_traced_memory()[0]
        for request in requests:
            sequence = cache.acquire(request.prompt)
            sequence.extend(request.output)
            cache.commit(sequence, include_open=True)
            cache.release(sequence)
            cache.take_copies()
        del sequence
        gc.collect()
        filled = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        stats = cache.stats()
        rows.append(
            [
                f"block {block_size}",
                stats.cached_tokens,
                stats.nodes,
                (filled - fixed) / stats.cached_tokens,
                fixed / (blocks * block_size),
            ]
        )
    report(
        f"memory of the cache's own metadata, {options.conversations:,} chats",
        ["", "cached tokens", "nodes", "bytes a cached token", "pool, bytes a token of capacity"],
        rows,
        options.output,
    )


if __name__ == "__main__":
    main()
