"""BlockAllocator: the pool, the tree that may give blocks back, and the copies still to be made.

Whatever takes or gives up blocks of a table does it here, so that evicting, refusing and counting
happen in one place.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixkv.cache.copies import CopyOrder
from radixkv.cache.match import Match
from radixkv.cache.pool import BlockIds, BlockPool
from radixkv.cache.stats import Counters
from radixkv.cache.tree import RadixTree
from radixkv.errors import OutOfBlocksError

# Eviction frees at least so many blocks at once, so that most allocations find the free list long
# enough: but never more than this share of the pool, for a cached block is worth more than a free
# one. Small pools evict what is missing and no more.
EVICTION_PORTION = 64
EVICTION_SHARE = 256


class BlockAllocator:
    """Hands out blocks, evicting from the tree when the free list is too short.

    Attributes
    ----------
    pending : set of int
        Blocks whose KV the step now being scheduled will compute, or copy from such blocks.
    late : dict of int to CopyOrder
        Target -> the copy ordered of a pending block.
    """

    def __init__(self, pool: BlockPool, tree: RadixTree, counters: Counters) -> None:
        self.pool = pool
        self.tree = tree
        self.counters = counters
        self.pending: set[int] = set()
        self.late: dict[int, CopyOrder] = {}
        self._orders: list[CopyOrder] = []
        self._portion = min(EVICTION_PORTION, pool.num_blocks // EVICTION_SHARE)

    def require(self, count: int, match: Match | None = None) -> None:
        """Raise `OutOfBlocksError` unless ``count`` blocks are free or can be evicted.

        What was matched is about to be held, and cannot be evicted then.
        """
        kept = match.num_unpinned() if match is not None and count > self.pool.num_free else 0
        free, evictable = self.pool.num_free, self.tree.num_evictable - kept
        if count > free + evictable:
            held = self.pool.num_blocks - free - evictable
            raise OutOfBlocksError(count, free, evictable, held)

    def allocate(self, count: int) -> BlockIds[int]:
        """Take ``count`` blocks, each held by one table; may evict, and somewhat more than that.

        Raises
        ------
        OutOfBlocksError
            If there are not so many, free and evictable together. Nothing has been evicted.
        """
        missing = count - self.pool.num_free
        if missing > 0:
            if missing > self.tree.num_evictable:
                self.require(count)
            self.tree.evict(max(missing, min(self._portion, self.tree.num_evictable)))
        return self.pool.allocate(count)

    def release(self, blocks: BlockIds[int]) -> None:
        """A table gives up blocks that are no full blocks of the tree."""
        self.tree.release(blocks)
        if self.late:
            refs = self.pool.refs
            self.drop_late(block for block in blocks if not refs[block])

    # -- copies ----------------------------------------------------------------------------------

    def order_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Order a block copied. The source may be freed at once: copies precede all writes.

        But for late copies. Those of a late copy go back to the first source, which the step
        writes for sure, while who holds the copy may give it up before.
        """
        first = self.late.get(source)
        if first is not None and num_tokens <= first.num_tokens:
            source = first.source
        late = source in self.pending
        order = CopyOrder(source, target, late, num_tokens)
        if late:
            self.late[target] = order
            self.pending.add(target)
        self._orders.append(order)

    def spare_late(self, target: int, num_tokens: int) -> None:
        """A late copy into ``target`` ends before the slots that its holder is about to write.

        It was told to copy more before the holder was truncated.
        """
        order = self.late.get(target)
        if order is None or order.num_tokens <= num_tokens:
            return
        shorter = self.late[target] = order._replace(num_tokens=num_tokens)
        self._orders = [shorter if other is order else other for other in self._orders]

    def take_copies(self) -> list[CopyOrder]:
        """The orders since the last call, in order."""
        orders, self._orders = self._orders, []
        return orders

    def drop_late(self, blocks: Iterable[int]) -> None:
        """Cancel late copies into blocks that were freed: their next holder may write first."""
        dropped = self.late.keys() & set(blocks)
        if dropped:
            # Others into these blocks are of earlier holders, whose copies may rest on them.
            self._orders = [
                order
                for order in self._orders
                if not (order.after_write and order.target in dropped)
            ]
            self.pending -= dropped
            for block in dropped:
                del self.late[block]

    def settle(self) -> None:
        """Nothing is pending any more. What a failed step was to copy late was dropped before."""
        self.late.clear()
        self.pending.clear()
