"""Residency: how long blocks stay cached, and how long they wait between two uses, in seconds.

The tree itself knows only logical time, which orders uses and costs nothing. Whoever wants seconds
calls `PrefixCache.measure_residency`; from then on each use, release and stored run reads a clock.
All blocks of an edge share their recency, so a use is one value for each edge of the path, counted
once a block: nothing has to be sampled.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.cache.stats import Histogram

if TYPE_CHECKING:
    from radixkv.cache.node import RadixNode
    from radixkv.cache.pool import BlockIds

BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 86400)


class Residency:
    """Times of full blocks; of those that were cached before it came nothing is known.

    Parameters
    ----------
    num_blocks : int
        In the pool.
    clock : callable
        Seconds; `time.monotonic` unless a test brings its own.

    Attributes
    ----------
    lifetime : Histogram
        From a block's becoming visible to its eviction.
    idle : Histogram
        From a block's last use to its eviction.
    reuse_gap : Histogram
        From a block's last use to the match that finds it again. Being held at its end, by a
        sequence that is released, is a use.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lifetime = Histogram(BOUNDS)
        self.idle = Histogram(BOUNDS)
        self.reuse_gap = Histogram(BOUNDS)
        self._stored_at = array("d", bytes(8 * num_blocks))

    def stored(self, node: RadixNode, blocks: BlockIds[int]) -> None:
        """Full blocks have become visible at the node's end."""
        now = node.used_at = self.clock()
        stored_at = self._stored_at
        for block in blocks:
            stored_at[block] = now

    def used(self, node: RadixNode) -> None:
        """A match uses the node and its ancestors; O(depth)."""
        now = self.clock()
        above = node
        while above.parent is not None:
            if above.used_at:
                self.reuse_gap.observe(now - above.used_at, len(above.blocks))
            above.used_at = now
            above = above.parent

    def touched(self, node: RadixNode) -> None:
        """A sequence that held the node and its ancestors is released; O(depth)."""
        now = self.clock()
        above = node
        while above.parent is not None:
            above.used_at = now
            above = above.parent

    def evicted(self, node: RadixNode, blocks: BlockIds[int]) -> None:
        """Full blocks at the node's end are about to be evicted."""
        now = self.clock()
        for block in blocks:
            if self._stored_at[block]:
                self.lifetime.observe(now - self._stored_at[block])
        if node.used_at:
            self.idle.observe(now - node.used_at, len(blocks))
