"""One state machine with three oracles: structure, content, and a naive dictionary.

Structure: `PrefixCache.check`. Content: every slot of a fake KV store carries a fingerprint of the
namespace and all tokens up to it, so that reading through a block table shows every aliasing and
copy-on-write fault. Dictionary: what a cache that never evicts would have matched.
"""

from __future__ import annotations

import numpy as np

from radixkv.cache import PrefixCache, Sequence, copy_waves

POISON = -1


def fingerprint(namespace: tuple[str, ...], tokens: tuple[int, ...]) -> int:
    return hash((namespace, tokens)) & 0x7FFFFFFFFFFFFFFF


class FakeStore:
    """KV as fingerprints: slot -> hash of everything up to that token."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.size = cache.block_size
        self.slots = np.full(cache.config.num_blocks * self.size, POISON, np.int64)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        blocks = self.slots.reshape(-1, self.size)
        sources = [source for source, _ in pairs]
        blocks[[target for _, target in pairs]] = blocks[sources].copy()

    def write(self, sequence: Sequence, start: int, stop: int) -> None:
        """Compute tokens start..stop; a shared block must not be written."""
        tokens = tuple(sequence.tokens.tolist())
        for position, slot in zip(range(start, stop), sequence.slots(start, stop), strict=True):
            block = int(slot) // self.size
            count = self.cache.pool.refs[block]
            assert count == 1, f"law 6: a block with refcount {count} is written"
            self.slots[slot] = fingerprint(sequence.namespace, tokens[: position + 1])

    def verify(self, sequence: Sequence, stop: int) -> None:
        tokens = tuple(sequence.tokens.tolist())
        for position, slot in enumerate(sequence.slots(0, stop).tolist()):
            expected = fingerprint(sequence.namespace, tokens[: position + 1])
            assert self.slots[slot] == expected, f"token {position} reads another token's KV"

    def free_blocks_lose_their_content(self) -> None:
        self.slots.reshape(-1, self.size)[self.cache.pool.free_blocks()] = POISON
