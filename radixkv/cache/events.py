"""What happened to cached blocks, for whoever wants to mirror or watch the cache from outside.

Off unless somebody listens: naming blocks to the outside world costs a chained hash for each block
of the path, which the cache itself never needs. Who only wants to know what went and why asks for
`Removal`, which costs no hash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from radixkv.cache.hashing import Namespace, chain_hashes, namespace_hash
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.residency import Residency
from radixkv.cache.retention import Retention

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
    tokens : bytes
        Theirs, four bytes each, as from `token_bytes`.
    """

    namespace: Namespace
    parent: int
    hashes: tuple[int, ...]
    blocks: tuple[int, ...]
    tokens: bytes


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Full blocks are no longer visible, and why."""

    namespace: Namespace
    hashes: tuple[int, ...]
    reason: RemovalReason


@dataclass(frozen=True, slots=True)
class Removal:
    """Blocks at the end of a node's run are no longer visible: what they were, and why they went.

    Attributes
    ----------
    num_blocks : int
        Blocks that went; the last may have been open, which `BlocksRemoved` never names.
    tokens : bytes
        Theirs, four bytes each.
    start : int
        Blocks before them, from the namespace's root.
    last_used, created : int
        Readings of the tree's logical clock, of the node that had them.
    hits : int
        Matches that used that node.
    """

    namespace: Namespace
    reason: RemovalReason
    num_blocks: int
    tokens: bytes
    start: int
    last_used: int
    created: int
    hits: int
    retention: Retention


Event = BlocksStored | BlocksRemoved
EventSink = Callable[[Event], None]
RemovalSink = Callable[[Removal], None]


class Announcer:
    """Tells whoever listens of blocks that come and go.

    Attributes
    ----------
    sinks : list of callable
        Who wants blocks named by their chained hashes.
    removal_sinks : list of callable
        Who wants to know what went, and why.
    residency : Residency or None
        Who wants to know for how long.
    """

    def __init__(self, block_bytes: int) -> None:
        self.sinks: list[EventSink] = []
        self.removal_sinks: list[RemovalSink] = []
        self.residency: Residency | None = None
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
        if self.residency is not None:
            self.residency.stored(node, node.blocks[len(node.blocks) - count :])
        if not self.sinks:
            return
        namespace, parent, hashes = self._chain(node)
        before = len(hashes) - count
        if before:
            parent = hashes[before - 1]
        blocks = tuple(node.blocks[before:])
        tokens = bytes(node.tokens[before * self._block_bytes :])
        event = BlocksStored(namespace, parent, tuple(hashes[before:]), blocks, tokens)
        for sink in self.sinks:
            sink(event)

    def removed(self, node: RadixNode, count: int, reason: RemovalReason) -> None:
        """The node's last ``count`` blocks are about to go; an open one has no name."""
        if self.residency is not None and reason == "evicted":
            full = len(node.tokens) // self._block_bytes
            self.residency.evicted(node, node.blocks[len(node.blocks) - count : full])
        if self.removal_sinks:
            removal = self._removal(node, count, reason)
            for watcher in self.removal_sinks:
                watcher(removal)
        if not self.sinks:
            return
        namespace, _, hashes = self._chain(node)
        gone = tuple(hashes[len(node.blocks) - count :])
        if gone:
            event = BlocksRemoved(namespace, gone, reason)
            for sink in self.sinks:
                sink(event)

    def _removal(self, node: RadixNode, count: int, reason: RemovalReason) -> Removal:
        """What goes with the node's last ``count`` blocks; O(depth + tokens that go)."""
        above: RadixNode = node
        while above.parent is not None:
            above = above.parent
        assert isinstance(above, RootNode)
        kept = len(node.blocks) - count
        return Removal(
            above.namespace,
            reason,
            count,
            bytes(node.tokens[kept * self._block_bytes :]),
            node.start + kept,
            node.last_used,
            node.created,
            node.hits,
            node.retention,
        )
