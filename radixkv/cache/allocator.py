"""BlockAllocator: the pool, the tree that may give blocks back, and the copies still to be made.

Whatever takes blocks takes them here, so that evicting, refusing and counting happen in one place.
"""

from __future__ import annotations

from radixkv.cache.copies import CopyOrder
from radixkv.cache.pool import BlockIds, BlockPool
from radixkv.cache.stats import Counters
from radixkv.cache.tree import RadixTree
from radixkv.errors import OutOfBlocksError


class BlockAllocator:
    """Hands out blocks, evicting from the tree when the free list is too short.

    Attributes
    ----------
    pending : set of int
        Blocks whose KV the step now being scheduled will compute.
    """

    def __init__(self, pool: BlockPool, tree: RadixTree, counters: Counters) -> None:
        self.pool = pool
        self.tree = tree
        self.counters = counters
        self.pending: set[int] = set()
        self._orders: list[CopyOrder] = []

    def require(self, count: int) -> None:
        """Raise `OutOfBlocksError` unless ``count`` blocks are free or can be evicted."""
        free, evictable = self.pool.num_free, self.tree.num_evictable
        if count > free + evictable:
            held = self.pool.num_blocks - free - evictable
            raise OutOfBlocksError(count, free, evictable, held)

    def allocate(self, count: int) -> BlockIds[int]:
        """Take ``count`` blocks, each held by one table; may evict.

        Raises
        ------
        OutOfBlocksError
            If there are not so many, free and evictable together. Nothing has been evicted.
        """
        missing = count - self.pool.num_free
        if missing > 0:
            self.require(count)
            self.tree.evict(missing)
        return self.pool.allocate(count)

    def order_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Order a block's first tokens copied.

        The source may be freed at once: copies precede all writes. Only a source that is still to
        be computed is read later, and its holder takes part in the step until then.
        """
        after_write = source in self.pending
        if after_write:
            self.pending.add(target)
        self._orders.append(CopyOrder(source, target, num_tokens, after_write))

    def take_copies(self) -> list[CopyOrder]:
        """The orders since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders
