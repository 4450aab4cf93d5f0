"""RadixTree: which token prefixes are cached, and in which blocks.

An edge is a run of blocks. A conversation of many turns is one edge that grows; a split happens
only where sequences diverge, or where one ends inside an edge and recency must differ. So every
sequence ends where a node's full blocks end, and holds the path to it by one pin on that node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from radixkv.cache.events import Announcer, RemovalReason
from radixkv.cache.eviction import EvictionQueue
from radixkv.cache.hashing import TOKEN_BYTES, BlockHash, Namespace, common_prefix_at
from radixkv.cache.node import Children, RadixNode, RootNode
from radixkv.cache.pool import BlockIds, BlockPool
from radixkv.cache.retention import DEFAULT_RETENTION, EPHEMERAL, Retention, stronger
from radixkv.cache.stats import Counters
from radixkv.errors import CacheInvariantError


@dataclass(slots=True)
class Match:
    """The longest cached prefix of some tokens.

    Attributes
    ----------
    node : RadixNode or None
        The deepest node with a matched full block, or where the match began.
    node_blocks : int
        Full blocks matched inside ``node``.
    num_blocks : int
        Full blocks matched in all.
    source, source_tokens : RadixNode or None, int
        Where the next block's first ``source_tokens`` tokens can be copied from.
    source_block : int
        The physical block to copy from; -1 for none.
    """

    node: RadixNode | None
    node_blocks: int = 0
    num_blocks: int = 0
    source: RadixNode | None = None
    source_tokens: int = 0
    source_block: int = -1


class RadixTree:
    """The tree over one pool of blocks, one root a namespace.

    Attributes
    ----------
    num_evictable : int
        Blocks that the tree holds and no table does.
    open_nodes : dict
        Open block -> the leaf that ends with it.
    clock : int
        Logical time: grows with every use, orders recency.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        queue: EvictionQueue,
        block_hash: BlockHash,
        counters: Counters,
        announcer: Announcer,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.queue = queue
        self.clock = 0
        self.num_evictable = 0
        self.roots: dict[Namespace, RootNode] = {}
        self.open_nodes: dict[int, RadixNode] = {}
        self._serial = 0
        self._block_hash = block_hash
        self._counters = counters
        self._announcer = announcer

    # -- reading ---------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> RootNode:
        """The namespace's root, made when it is not there."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = RootNode(namespace)
        return root

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the roots, parents before children; O(n)."""
        stack: list[RadixNode] = list(self.roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children is not None:
                stack.extend(node.children)

    def num_full(self, node: RadixNode) -> int:
        """Full blocks in the node's run."""
        return len(node.tokens) // self.block_bytes

    def has_open(self, node: RadixNode) -> bool:
        """Whether the node's last block is open."""
        return len(node.tokens) % self.block_bytes != 0

    def match(self, node: RadixNode | None, data: bytes | bytearray, offset: int = 0) -> Match:
        """The longest cached continuation of ``node`` along ``data[offset:]``.

        Neither splits nor touches anything. O(edges on the path) comparisons by memcmp.

        Parameters
        ----------
        node : RadixNode or None
            Where to begin: a root, or the node at the end of whose full blocks ``offset`` stands.
        data : bytes
            Tokens as from `token_bytes`.
        offset : int
            Bytes of ``data`` that lead to the end of ``node``; whole blocks.
        """
        match = Match(node)
        block_bytes, size = self.block_bytes, len(data)
        while node is not None and offset < size:
            if node.children is None:
                if len(node.tokens) % block_bytes:
                    self._match_open_end(match, node, data, offset)
                return match
            first = bytes(data[offset : offset + block_bytes])
            child = node.children.find(first) if len(first) == block_bytes else None
            if child is None:
                source, common = node.children.closest(first)
                if source is not None:
                    match.source, match.source_tokens = source, common
                    match.source_block = source.blocks[0]
                return match
            full = len(child.tokens) // block_bytes
            run = child.tokens if child.children is not None else child.tokens[: full * block_bytes]
            if data.startswith(run, offset):
                matched = full
            else:
                common = common_prefix_at(data, offset, child.tokens)
                matched = min(common // self.block_size, full)
            match.node, match.node_blocks = child, matched
            match.num_blocks += matched
            offset += matched * block_bytes
            if matched < full:
                if tokens := common - matched * self.block_size:
                    match.source, match.source_tokens = child, tokens
                    match.source_block = child.blocks[matched]
                return match
            node = child
        return match

    def _match_open_end(
        self, match: Match, node: RadixNode, data: bytes | bytearray, offset: int
    ) -> None:
        full = len(node.tokens) // self.block_bytes
        tokens = common_prefix_at(data, offset, node.tokens[full * self.block_bytes :])
        if tokens:
            match.source, match.source_tokens = node, tokens
            match.source_block = node.blocks[full]

    def blocks_of(self, match: Match) -> BlockIds[int]:
        """The matched blocks, from where the match began; int32 (match.num_blocks,)."""
        blocks = array("i")
        left = match.num_blocks
        if left:
            assert match.node is not None
            blocks = match.node.blocks[: match.node_blocks]
            node = match.node
            while len(blocks) < left:
                assert node.parent is not None
                node = node.parent
                blocks = node.blocks + blocks
        return blocks

    # -- holding ---------------------------------------------------------------------------------

    def pin(self, node: RadixNode) -> None:
        """One more sequence ends here; holds the whole path. O(1) amortised over the path."""
        above: RadixNode | None = node
        while above is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.num_evictable -= len(above.tokens) // self.block_bytes
            if above.entry is not None:
                self.refresh(above)
            above = above.parent

    def unpin(self, node: RadixNode) -> None:
        """One sequence fewer ends here."""
        above: RadixNode | None = node
        while above is not None:
            above.pins -= 1
            if above.pins:
                if above.pins < 0:
                    raise CacheInvariantError("a node was unpinned more often than pinned")
                return
            self.num_evictable += len(above.tokens) // self.block_bytes
            if above.children is None:
                self.refresh(above)
            above = above.parent

    def repin(self, old: RadixNode | None, new: RadixNode | None) -> None:
        """Move a sequence's end from one node to another; the new path is held throughout."""
        if new is not None:
            self.pin(new)
        if old is not None:
            self.unpin(old)

    def retain_open(self, block: int) -> None:
        """One more table holds an open block of the tree."""
        self.pool.retain((block,))
        if self.pool.refs[block] == 2:
            self.num_evictable -= 1
            self.refresh(self.open_nodes[block])

    def release(self, blocks: BlockIds[int]) -> None:
        """A table gives up blocks that are no full blocks of the tree."""
        self.pool.release(blocks)
        for block in blocks:
            if block in self.open_nodes and self.pool.refs[block] == 1:
                self.num_evictable += 1
                self.refresh(self.open_nodes[block])

    def refresh(self, node: RadixNode) -> None:
        """Put the node into the eviction queue, or take it out, as its state demands; O(log n)."""
        if node.children is None and node.parent is not None and self.num_unheld(node):
            self.queue.put(node)
        else:
            self.queue.discard(node)

    def num_unheld(self, node: RadixNode) -> int:
        """How many blocks at the end of a leaf nobody holds."""
        if not self.has_open(node):
            return 0 if node.pins else len(node.blocks)
        if self.pool.refs[node.blocks[-1]] > 1:
            return 0
        return 1 if node.pins else len(node.blocks)

    def num_holders(self, node: RadixNode) -> int:
        """Sequences whose tables hold the node's first block; O(nodes below)."""
        if not self.num_full(node):
            return self.pool.refs[node.blocks[0]] - 1
        children = list(node.children or ())
        ends = node.pins - sum(1 for child in children if child.pins)
        return ends + sum(self.num_holders(child) for child in children if child.pins)

    # -- using -----------------------------------------------------------------------------------

    def end_at(self, match: Match) -> RadixNode | None:
        """The node that ends where the match ends; may split one edge. None if none matched."""
        if not match.num_blocks:
            return None
        assert match.node is not None
        match.node = self.split_at(match.node, match.node_blocks)
        return match.node

    def split_at(self, node: RadixNode, count: int) -> RadixNode:
        """The node that ends after ``count`` of the node's full blocks; splits if it must."""
        return node if count == self.num_full(node) else self._split(node, count)

    def use(self, match: Match, retention: Retention) -> None:
        """Refresh the recency of what a match used, after `end_at`, and of nothing else."""
        node = self.end_at(match)
        if match.source is not None and match.source_tokens == self._left_of(match):
            node = match.source
        elif node is not None and self.has_open(node):
            self._detach_open(node)
        if node is None:
            return
        above: RadixNode | None = node
        while above is not None:
            above.hits += 1
            above.retention = stronger(above.retention, retention)
            above = above.parent
        self.touch(node)

    def _left_of(self, match: Match) -> int:
        """Tokens from the source block's first to the end of its node."""
        assert match.source is not None
        index = match.source.blocks.index(match.source_block)
        return len(match.source.tokens) // TOKEN_BYTES - index * self.block_size

    def touch(self, node: RadixNode) -> None:
        """Refresh the recency of a node and its ancestors; O(depth)."""
        self.clock += 1
        above: RadixNode | None = node
        while above is not None:
            above.last_used = self.clock
            above = above.parent
        if node.entry is not None:
            self.refresh(node)

    # -- growing ---------------------------------------------------------------------------------

    def _split(self, node: RadixNode, count: int) -> RadixNode:
        """Cut the edge after ``count`` blocks; a new upper node is made and returned.

        The lower half stays the node that sequences end at. Both get arrays of their own: a view
        would keep the whole edge alive.
        """
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        cut = count * self.block_bytes
        upper = self._new_node(parent, node.tokens[:cut], node.blocks[:count], node.start)
        upper.created, upper.last_used = node.created, node.last_used
        upper.hits, upper.retention = node.hits, node.retention
        upper.pins = 1 if node.pins else 0
        parent.children.remove(node)
        node.tokens = node.tokens[cut:]
        node.blocks = node.blocks[count:]
        node.start += count
        node.parent = upper
        self._add_to(upper, node)
        parent.children.add(upper)
        self._counters.splits += 1
        return upper

    def _detach_open(self, node: RadixNode) -> None:
        """Set a leaf's open block apart as a child, so that the leaf can have others."""
        full = self.num_full(node)
        cut = full * self.block_bytes
        child = self._new_node(node, node.tokens[cut:], node.blocks[full:], node.start + full)
        child.created, child.last_used = node.created, node.last_used
        child.retention = node.retention
        del node.tokens[cut:]
        del node.blocks[full:]
        self.open_nodes[child.blocks[0]] = child
        self._add_to(node, child)
        self.queue.discard(node)
        self.refresh(child)
        self._counters.splits += 1

    def _new_node(
        self, parent: RadixNode, tokens: bytearray, blocks: BlockIds[int], start: int
    ) -> RadixNode:
        self._serial += 1
        return RadixNode(parent, tokens, blocks, start, self.clock, self._serial, DEFAULT_RETENTION)

    def _add_to(self, parent: RadixNode, child: RadixNode) -> None:
        if parent.children is None:
            parent.children = Children(self.block_bytes, self._block_hash)
        parent.children.add(child)

    def attach(
        self, node: RadixNode, tokens: bytearray, blocks: BlockIds[int], retention: Retention
    ) -> RadixNode:
        """Make full blocks visible below ``node``, none of whose children begins with the first.

        The edge grows where nobody else ends on it, else a child is made. Open blocks that hold
        less of the same tokens are superseded. Returns the node that now ends with the blocks.
        """
        self._make_room(node, tokens[: self.block_bytes])
        self.pool.enter_tree(blocks)
        self._counters.blocks_stored += len(blocks)
        grows = node.pins == 1 and node.parent is not None and node.children is None
        if grows and node.retention == retention:
            self._announcer.stored(node, tokens, blocks)
            node.tokens += tokens
            node.blocks += blocks
        else:
            node = self._add_child(node, tokens, blocks, retention)
            self._announcer.stored(node, tokens, blocks)
            self.num_evictable += len(blocks)
        return node

    def attach_open(
        self, node: RadixNode, tokens: bytearray, block: int, retention: Retention
    ) -> int:
        """Make a block visible that holds only ``tokens``, fewer than a block's.

        Nothing is stored if the tree already holds these tokens and more. Returns the caller's
        block, or an identical one that was there before and should stand in its place.
        """
        cut = self.num_full(node) * self.block_bytes
        if cut < len(node.tokens):
            like: RadixNode | None = node
            held = node.tokens[cut:]
        else:
            like = node.children.closest(bytes(tokens))[0] if node.children is not None else None
            held = like.tokens[: self.block_bytes] if like is not None else bytearray()
        if like is not None and held.startswith(tokens):
            return like.blocks[-1] if held == tokens else block
        self._make_room(node, tokens)
        self.pool.enter_open(block)
        if node.parent is not None and node.children is None and node.retention == retention:
            node.tokens += tokens
            node.blocks.append(block)
            self.open_nodes[block] = node
            self.refresh(node)
        else:
            self.open_nodes[block] = self._add_child(node, tokens, array("i", [block]), retention)
        return block

    def _make_room(self, node: RadixNode, first: bytearray) -> None:
        """Supersede the open block that ``first`` extends; set any other open end apart."""
        if self.has_open(node):
            open_tokens = node.tokens[self.num_full(node) * self.block_bytes :]
            if first.startswith(open_tokens):
                self._cut(node, 1, "superseded")
            else:
                self._detach_open(node)
        elif node.children is not None:
            child, _ = node.children.closest(bytes(first))
            if child is not None and first.startswith(child.tokens):
                self._cut(child, 1, "superseded")

    def _add_child(
        self, node: RadixNode, tokens: bytearray, blocks: BlockIds[int], retention: Retention
    ) -> RadixNode:
        if isinstance(node, RootNode):
            self.roots[node.namespace] = node
        self.clock += 1
        child = self._new_node(node, tokens, blocks, node.start + len(node.blocks))
        child.retention = retention
        if node.parent is not None:
            child.last_used = node.last_used
        self._add_to(node, child)
        self.queue.discard(node)
        return child

    # -- shrinking -------------------------------------------------------------------------------

    def evict(self, count: int) -> None:
        """Free ``count`` blocks from the tails of unheld leaves; there must be that many.

        O(victims x log n), whatever the size of the tree.
        """
        self._counters.blocks_evicted += count
        while count > 0:
            node = self.queue.victim()
            take = min(count, self.num_unheld(node))
            self._cut(node, take, "evicted")
            count -= take

    def drop_open(self, block: int) -> None:
        """Give up an open block, so that its holder may go on writing into it."""
        self._cut(self.open_nodes[block], 1, "withdrawn")

    def remove(self, node: RadixNode, reason: RemovalReason) -> int:
        """Take a node out with all below it, none of it pinned; returns the number of blocks.

        Blocks that tables count in ``refs`` stay with them.
        """
        below, stack = [], [node]
        while stack:
            below.append(stack.pop())
            stack.extend(below[-1].children or ())
        for lower in reversed(below):
            self._cut(lower, len(lower.blocks), reason)
        return sum(len(lower.blocks) for lower in below)

    def _cut(self, node: RadixNode, count: int, reason: RemovalReason) -> None:
        """The one way out of the tree: drop the last ``count`` blocks of a leaf."""
        self._announcer.removed(node, count, reason)
        kept = len(node.blocks) - count
        blocks = node.blocks[kept:]
        if kept:
            if self.has_open(node):
                self._leave_open(blocks.pop())
            del node.tokens[kept * self.block_bytes :]
            del node.blocks[kept:]
            if node.pins:
                self.refresh(node)
        else:
            self._disown(node)
            if self.has_open(node):
                self._leave_open(blocks.pop())
        self.num_evictable -= len(blocks)
        self.pool.leave_tree(blocks)

    def _leave_open(self, block: int) -> None:
        del self.open_nodes[block]
        if self.pool.refs[block] == 1:
            self.num_evictable -= 1
        self.pool.leave_open(block)

    def _disown(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        parent.children.remove(node)
        self.queue.discard(node)
        if not len(parent.children):
            parent.children = None
            if isinstance(parent, RootNode):
                del self.roots[parent.namespace]
            else:
                self.refresh(parent)

    def forget(self, node: RadixNode, start: int) -> None:
        """Mark what nobody else has used from block ``start`` on as ephemeral; may split once."""
        while node.parent is not None and node.start + len(node.blocks) > start:
            below = node.children or ()
            if node.pins or node.hits or not all(child.retention.ephemeral for child in below):
                return
            if node.start < start:
                self._split(node, start - node.start)
            node.retention = EPHEMERAL
            self.refresh(node)
            node = node.parent
