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
from radixkv.cache.pool import BlockIds

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
    """Names blocks that come and go by their chained hashes, if anybody listens."""

    def __init__(self, sink: EventSink | None, block_bytes: int) -> None:
        self._sink = sink
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

    def stored(self, node: RadixNode, tokens: bytearray, blocks: BlockIds[int]) -> None:
        """Full ``blocks`` were stored as a new node, or are about to lengthen this one."""
        if self._sink is None:
            return
        namespace, parent, hashes = self._chain(node)
        if node.blocks != blocks:
            parent = hashes[-1]
        stored = tuple(chain_hashes(parent, tokens, self._block_bytes))
        self._sink(BlocksStored(namespace, parent, stored, tuple(blocks)))

    def removed(self, node: RadixNode, count: int, reason: RemovalReason) -> None:
        """The node's last ``count`` blocks are about to go."""
        if self._sink is None:
            return
        namespace, _, hashes = self._chain(node)
        gone = tuple(hashes[len(node.blocks) - count :])
        if gone:
            self._sink(BlocksRemoved(namespace, gone, reason))
