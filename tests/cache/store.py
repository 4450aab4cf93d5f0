"""FakeStore: KV as fingerprints, so that reading the wrong block shows.

Every slot carries a hash of the namespace and of all tokens up to it. Reading through a block
table must give the sequence's own fingerprints; that catches every aliasing and copy-on-write
fault. Slots that nobody wrote, and those of free blocks, are poisoned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache import CopyOrder, PrefixCache, Sequence, copy_waves

POISON = -1


def fingerprint(namespace: tuple[str, ...], tokens: tuple[int, ...]) -> int:
    return hash((namespace, tokens)) & 0x7FFFFFFFFFFFFFFF


class Write(NamedTuple):
    """What a step was told to compute: where, and what must be there afterwards."""

    sequence: Sequence
    slots: npt.NDArray[np.int64]
    values: npt.NDArray[np.int64]


def write_of(cache: PrefixCache, sequence: Sequence, start: int, stop: int) -> Write:
    """Plan the computing of tokens start..stop; a shared block must not be written (law 6)."""
    tokens = tuple(sequence.tokens.tolist())
    slots = sequence.slots(start, stop)
    for block in set((slots // cache.block_size).tolist()):
        count = cache.pool.refs[block]
        assert count == 1, f"law 6: a block with refcount {count} is written"
        assert block not in cache.pool.free_blocks(), "law 6: a free block is written"
    values = [fingerprint(sequence.namespace, tokens[: end + 1]) for end in range(start, stop)]
    return Write(sequence, slots, np.array(values, np.int64))


class FakeStore:
    """slot -> fingerprint, for all blocks of a pool; int64 (num_blocks, block_size)."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.slots = np.full((cache.pool.num_blocks, cache.block_size), POISON, np.int64)

    def clone(self) -> FakeStore:
        twin = FakeStore(self.cache)
        twin.slots = self.slots.copy()
        return twin

    def run(self, orders: list[CopyOrder], writes: Iterable[Write] = ()) -> None:
        """One step of an engine: copies, then writes, then the late copies."""
        for wave in copy_waves(order for order in orders if not order.after_write):
            targets = [target for _, target in wave]
            self.slots[targets] = self.slots[[source for source, _ in wave]].copy()
        for write in writes:
            self.slots.reshape(-1)[write.slots] = write.values
        for source, target, late, count in orders:
            if late:
                self.slots[target, :count] = self.slots[source, :count]

    def poison(self, sequence: Sequence, start: int) -> None:
        """The KV of tokens from ``start`` on has turned out to be garbage."""
        self.slots.reshape(-1)[sequence.slots(start, sequence.num_tokens)] = POISON

    def poison_free(self, orders: Iterable[CopyOrder] = ()) -> None:
        """Free blocks lose their content, but for what is still to be copied from them."""
        sources = {order.source for order in orders}
        self.slots[[b for b in self.cache.pool.free_blocks() if b not in sources]] = POISON

    def verify(self, sequence: Sequence, stop: int | None = None) -> None:
        """The sequence reads its own KV for all that it takes for computed."""
        stop = sequence.num_computed if stop is None else stop
        tokens = tuple(sequence.tokens.tolist())
        for position, slot in enumerate(sequence.slots(0, stop).tolist()):
            expected = fingerprint(sequence.namespace, tokens[: position + 1])
            found = self.slots.reshape(-1)[slot]
            assert found == expected, f"token {position} reads another token's KV"
