"""The queue of unheld leaves: a heap in the order of a policy's keys.

It holds exactly the leaves whose last block nobody holds, so picking a victim costs
O(log n) whatever the size of the tree. A leaf that is taken out leaves an empty entry behind, which
is dropped when it comes up, or when there are as many empty entries as leaves.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from sortedcontainers import SortedList

from radixkv.cache.node import RadixNode
from radixkv.cache.policies import EvictionPolicy, Key

QueueEntry = list[Any]  # [key, serial, tick, node], or None for the node once it was taken out

# Empty entries are let be up to this many, however few leaves there are.
EMPTY_ENTRIES = 64


class EvictionQueue:
    """The evictable leaves in the order of a policy.

    A leaf's place is not moved at every use: it is looked up anew when the leaf comes up first.

    Parameters
    ----------
    policy : EvictionPolicy
    clock : callable
        Seconds; `time.monotonic` unless a test brings its own.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.clock = clock
        self._heap: list[QueueEntry] = []
        self._num_empty = 0
        self._tick = itertools.count()  # Two entries never compare by their nodes.
        # Leaves whose hint runs out: (expires_at, serial, node), by time and by serial.
        self._expiring: SortedList = SortedList()
        self._expiry: dict[int, tuple[float, int, RadixNode]] = {}

    def __len__(self) -> int:
        return len(self._heap) - self._num_empty

    def put(self, node: RadixNode) -> None:
        """Add a leaf, or compute its place anew; O(log n)."""
        if node.entry is not None:
            self.discard(node)
        expires_at = node.retention.expires_at
        # One reading for both: else a hint that runs out in between would never be demoted.
        now = self.clock() if expires_at != math.inf else 0.0
        node.entry = [self.policy.key(node, now), node.serial, next(self._tick), node]
        heappush(self._heap, node.entry)
        if now < expires_at != math.inf:
            expiry = self._expiry[node.serial] = (expires_at, node.serial, node)
            self._expiring.add(expiry)

    def _current_key(self, node: RadixNode) -> Key:
        expires = node.retention.expires_at != math.inf
        return self.policy.key(node, self.clock() if expires else 0.0)

    def discard(self, node: RadixNode) -> None:
        """Take a leaf out if it is in; O(1), amortised."""
        if node.entry is None:
            return
        node.entry[-1] = None
        node.entry = None
        self._num_empty += 1
        if self._num_empty > EMPTY_ENTRIES and self._num_empty * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[-1] is not None]
            heapify(self._heap)
            self._num_empty = 0
        if self._expiry and (expiry := self._expiry.pop(node.serial, None)) is not None:
            self._expiring.remove(expiry)

    def victim(self) -> RadixNode:
        """The leaf to evict from next; it stays in the queue. O(log n), amortised over uses."""
        if self._expiring:
            self._demote_expired()
        heap, moved = self._heap, None
        while True:
            entry = heap[0]
            node: RadixNode | None = entry[-1]
            if node is None:
                heappop(heap)
                self._num_empty -= 1
            # A place computed in this very call is good, even if the policy rolls dice.
            elif entry is moved or entry[0] == self._current_key(node):
                return node
            else:
                moved = [self._current_key(node), node.serial, next(self._tick), node]
                node.entry = moved
                heapreplace(heap, moved)

    def _demote_expired(self) -> None:
        now = self.clock()
        while self._expiring and self._expiring[0][0] <= now:
            self.put(self._expiring[0][2])

    def leaves(self) -> list[RadixNode]:
        """All evictable leaves, in no order; O(n)."""
        return [entry[-1] for entry in self._heap if entry[-1] is not None]

    def nodes(self) -> list[RadixNode]:
        """All evictable leaves, the next victim first; O(n log n)."""
        return sorted(self.leaves(), key=lambda node: (self._current_key(node), node.serial))
