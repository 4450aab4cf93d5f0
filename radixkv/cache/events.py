"""What happened to cached blocks, for whoever wants to mirror the cache from outside.

Off unless a sink is given: naming blocks to the outside world costs a chained hash for each block
of the path, which the cache itself never needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from radixkv.cache.hashing import Namespace, chain_hashes, namespace_hash
from radixkv.cache.node import RadixNode, RootNode

RemovalReason = Literal["evicted", "superseded", "withdrawn", "reset"]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Full blocks became visible.

    Attributes
    ----------
    hashes : tuple of int
        Chained 64-bit content hashes, one a block.
    parent : int
        Chained hash of the block before the first; the namespace's own at the start.
    blocks : tuple of int
        Physical block ids.
    """

    namespace: Namespace
    parent: int
    hashes: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Full blocks are no longer visible, and why."""

    namespace: Namespace
    hashes: tuple[int, ...]
    reason: RemovalReason


Event = BlocksStored | BlocksRemoved
EventSink = Callable[[Event], None]


class Announcer:
    """Names blocks that come and go by their chained hashes, for whoever listens.

    Attributes
    ----------
    sink : callable or None
        Who listens; without one there is nothing to be announced.
    """

    def __init__(self, sink: EventSink | None, block_bytes: int) -> None:
        self.sink = sink
        self._block_bytes = block_bytes

    def _chain(self, node: RadixNode) -> tuple[Namespace, int, list[int]]:
        """Namespace, hash of the block before the node, hashes of the node; O(tokens above)."""
        path = node.path()
        root = path[0].parent
        assert isinstance(root, RootNode)
        parent = namespace_hash(root.namespace)
        for above in path[:-1]:
            parent = chain_hashes(parent, above.tokens, self._block_bytes)[-1]
        return root.namespace, parent, chain_hashes(parent, node.tokens, self._block_bytes)

    def stored(self, node: RadixNode, count: int) -> None:
        """The node's last ``count`` blocks, all full, have become visible."""
        assert self.sink is not None
        namespace, parent, hashes = self._chain(node)
        before = len(hashes) - count
        if before:
            parent = hashes[before - 1]
        blocks = tuple(node.blocks[before:])
        self.sink(BlocksStored(namespace, parent, tuple(hashes[before:]), blocks))

    def removed(self, node: RadixNode, count: int, reason: RemovalReason) -> None:
        """The node's last ``count`` blocks are about to go; an open one has no name."""
        assert self.sink is not None
        namespace, _, hashes = self._chain(node)
        gone = tuple(hashes[len(node.blocks) - count :])
        if gone:
            self.sink(BlocksRemoved(namespace, gone, reason))
