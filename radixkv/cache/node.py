"""RadixNode: a run of blocks below a prefix."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixkv.cache.hashing import Namespace
from radixkv.cache.pool import BlockIds
from radixkv.cache.retention import DEFAULT_RETENTION, Retention, stronger

if TYPE_CHECKING:
    from radixkv.cache.children import Children
    from radixkv.cache.eviction import QueueEntry


class RadixNode:
    """A run of blocks below a prefix.

    All blocks are full, except that the last block of a *leaf* may be open: it then holds fewer
    than ``block_size`` tokens, belongs to no path, and serves as a source to copy from.

    Attributes
    ----------
    tokens : bytearray
        The run's tokens, four bytes each.
    blocks : array of int32
        Its physical blocks, ``ceil(num_tokens / block_size)`` of them.
    pins : int
        Sequences that end here, plus children with pins. While it is above 0 the full blocks, and
        with them all ancestors', are held.
    start : int
        Blocks before this run, from the namespace's root.
    last_used, created : int
        Readings of the tree's logical clock.
    hits : int
        Matches that used this run, or part of what it was then.
    num_used : int
        Leading blocks of the run that some match has used since they were stored.
    used_at : float
        Seconds, for `Residency` alone: when the run was last in use; 0 if nobody looked.
    """

    __slots__ = (
        "blocks",
        "children",
        "created",
        "entry",
        "hits",
        "last_used",
        "num_used",
        "parent",
        "pins",
        "retention",
        "serial",
        "start",
        "tokens",
        "used_at",
    )

    def __init__(
        self,
        parent: RadixNode | None,
        tokens: bytearray,
        blocks: BlockIds[int],
        start: int,
        clock: int,
        serial: int,
        retention: Retention,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks
        self.start = start
        self.last_used = clock
        self.created = clock
        self.serial = serial
        self.retention = retention
        self.hits = 0
        self.num_used = 0
        self.used_at = 0.0
        self.pins = 0
        self.children: Children | None = None
        self.entry: QueueEntry | None = None

    def path(self) -> list[RadixNode]:
        """The nodes from below the root down to this one; O(depth)."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def touch(self, clock: int) -> None:
        """Set the recency of the node and its ancestors; O(depth)."""
        above: RadixNode | None = self
        while above is not None:
            above.last_used = clock
            above = above.parent

    def use(self, clock: int, retention: Retention, seconds: Callable[[], float]) -> None:
        """A match uses all of this run and of its ancestors'; O(depth).

        That refreshes their recency, counts a hit, and lets them stay as long as the hint asks.
        """
        above: RadixNode | None = self
        while above is not None:
            above.last_used = clock
            above.hits += 1
            above.num_used = len(above.blocks)
            if above.retention is not retention:
                above.retention = stronger(above.retention, retention, seconds())
            above = above.parent

    def strengthen(self, retention: Retention, seconds: Callable[[], float]) -> None:
        """Let the node and its ancestors stay as long as the hint asks, at least; O(depth)."""
        above: RadixNode | None = self
        while above is not None:
            above.retention = stronger(above.retention, retention, seconds())
            above = above.parent


class RootNode(RadixNode):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, bytearray(), array("i"), 0, 0, -1, DEFAULT_RETENTION)
        self.namespace = namespace
