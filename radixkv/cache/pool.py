"""BlockPool: physical block ids, their references, and the free list.

A block's refcount is the number of block tables that hold it, plus one if a tree node does. For
full blocks of the tree the tables are not counted block by block: a sequence pins the node at
which it ends (`RadixTree.pin`), which holds the whole path in O(1). ``refs`` counts the rest:
blocks that only tables hold, and open blocks (not full), which the tree shares by copy alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from radixkv.errors import CacheInvariantError, ConfigError, OutOfBlocksError

BlockIds = array  # of int32, typecode "i"

FREE_OR_HELD, FULL, OPEN = 0, 1, 2

# From this many blocks on, a contiguous run of free blocks is worth looking for: attention on a
# CPU reads a run as a view, while scattered blocks must be gathered first.
CONTIGUOUS_RUN = 64
# A run is looked for among this many times its own length at the top of the free list, so that the
# cost of allocating does not grow with the pool.
RUN_WINDOW = 8


class BlockPool:
    """References and the free list of ``num_blocks`` physical blocks.

    Attributes
    ----------
    refs : list of int (num_blocks,)
        Tables that hold a block which is no full block of the tree, plus one for the tree if it
        holds it as an open block; 0 for full blocks of the tree and for free ones.
    place : bytearray (num_blocks,)
        ``FULL`` or ``OPEN`` if the tree holds the block so, else ``FREE_OR_HELD``.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.place = bytearray(num_blocks)
        # A stack whose top is its end: descending, so that pops come out ascending.
        self._free = array("i", range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._free)

    def free_blocks(self) -> list[int]:
        """The free list, next to be handed out first; O(free)."""
        return self._free[::-1].tolist()

    def allocate(self, count: int) -> BlockIds[int]:
        """Take ``count`` free blocks, each held by one table; contiguous where that pays.

        Raises
        ------
        OutOfBlocksError
            If fewer are free. Nothing has been taken.
        """
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free), 0, self.num_blocks - len(self._free))
        if not count:
            return array("i")
        if count >= CONTIGUOUS_RUN:
            self._bring_run_to_top(count)
        blocks = self._free[-count:]
        blocks.reverse()
        del self._free[-count:]
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        return blocks

    def _bring_run_to_top(self, count: int) -> None:
        """Sort the top of the free list; move its lowest run of ``count`` ids to the very top."""
        free = np.frombuffer(self._free, np.int32)[-RUN_WINDOW * count :]
        if (np.diff(free[-count:]) == -1).all():
            return
        free[::-1].sort()
        starts = np.flatnonzero(free[: len(free) - count + 1] - free[count - 1 :] == count - 1)
        if len(starts):
            first = int(starts[-1])
            run = free[first : first + count].copy()
            free[first:-count] = free[first + count :].copy()
            free[-count:] = run

    def retain(self, blocks: Iterable[int]) -> None:
        """One more table holds each of these blocks; none is free or a full block of the tree."""
        for block in blocks:
            if self.refs[block] < 1:
                raise CacheInvariantError(f"block {block} was retained though nobody holds it")
            self.refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference fewer on each of these blocks; what nobody holds any more becomes free.

        Raises
        ------
        CacheInvariantError
            On a double free, also one within ``blocks``. Nothing has been changed then.
        """
        refs = self.refs
        freed = array("i")
        for index, block in enumerate(blocks):
            count = refs[block] - 1
            if count < 0:
                for undone in blocks[:index]:
                    refs[undone] += 1
                raise CacheInvariantError(f"double free of block {block}")
            refs[block] = count
            if not count:
                freed.append(block)
        freed.reverse()
        self._free += freed

    def enter_tree(self, blocks: Iterable[int]) -> None:
        """Full blocks, each held by one table alone, become the tree's."""
        refs, place = self.refs, self.place
        for block in blocks:
            if refs[block] != 1 or place[block]:
                raise CacheInvariantError(
                    f"block {block} cannot enter the tree: refcount {refs[block]}, "
                    f"place {place[block]}"
                )
            refs[block] = 0
            place[block] = FULL

    def leave_tree(self, blocks: BlockIds[int]) -> None:
        """Full blocks are the tree's no more; those that no table counts in ``refs`` are free."""
        refs, place = self.refs, self.place
        held = False
        for block in blocks:
            if place[block] != FULL:
                raise CacheInvariantError(f"block {block} left the tree but was not in it")
            place[block] = FREE_OR_HELD
            if refs[block]:
                held = True
        freed = blocks[::-1]
        if held:
            freed = array("i", [block for block in freed if not refs[block]])
        self._free += freed

    def enter_open(self, block: int) -> None:
        """The tree takes one more reference to a block that is not full."""
        if self.refs[block] < 1 or self.place[block] != FREE_OR_HELD:
            raise CacheInvariantError(f"block {block} cannot become the tree's open block")
        self.refs[block] += 1
        self.place[block] = OPEN

    def leave_open(self, block: int) -> None:
        """The tree gives its reference to an open block up."""
        if self.place[block] != OPEN:
            raise CacheInvariantError(f"block {block} is not an open block of the tree")
        self.place[block] = FREE_OR_HELD
        self.release((block,))
