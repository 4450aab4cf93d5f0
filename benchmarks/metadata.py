"""How much memory does the prefix cache itself need for a cached token? No KV, only the books.

    python benchmarks/metadata.py [--short] [--output FILE]

`tracemalloc` counts all that Python and numpy allocate between before the cache is made and after
it was filled by chats until nothing more fits: the tree's tokens and block tables, nodes, hash
tables, children in order, the eviction queue, the pool's references and its free list. Sequences
are released and the workload's own arrays were there before, so neither counts.
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from pathlib import Path

import workloads
from measure import print_head, print_table, write_json

from radixkv.cache import PrefixCache
from radixkv.config import CacheConfig

BLOCK_SIZES = (16, 32, 64)


def bytes_per_token(requests: list[workloads.Request], block_size: int) -> tuple[float, int, int]:
    """Bytes of the cache's own a cached token; cached tokens; nodes."""
    num_blocks = workloads.unique_tokens(requests) // 2 // block_size
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks, block_size=block_size))
    for request in requests:
        sequence = cache.acquire(request.tokens)
        cache.commit(sequence, include_open=True)
        cache.release(sequence)
        cache.take_copies()
    del sequence
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stats = cache.stats()
    assert stats.counters.blocks_evicted, "the cache was not filled"
    return (after - before) / stats.cached_tokens, stats.cached_tokens, stats.nodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tenth of the conversations")
    parser.add_argument("--output", type=Path, help="write the results there, as JSON")
    arguments = parser.parse_args()
    print_head()
    requests = workloads.chat(conversations=200 if arguments.short else 2_000)
    rows = [(size, *bytes_per_token(requests, size)) for size in BLOCK_SIZES]
    head = ["block size", "bytes a token", "cached tokens", "nodes"]
    print_table("Metadata of a full cache", head, rows)
    write_json(
        arguments.output, {str(size): {"bytes_per_token": value} for size, value, *_ in rows}
    )


if __name__ == "__main__":
    main()
