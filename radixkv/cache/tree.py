"""RadixTree: which token prefixes are cached, and in which blocks.

An edge is a run of blocks. A conversation of many turns is one edge that grows; a split happens
only where sequences diverge, or where one ends inside an edge and recency must differ. So every
sequence ends where a node's full blocks end, and holds the path to it by one pin on that node.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from radixkv.cache.children import Children
from radixkv.cache.events import Announcer, RemovalReason
from radixkv.cache.eviction import EvictionQueue
from radixkv.cache.hashing import TOKEN_BYTES, BlockHash, Namespace
from radixkv.cache.match import Match
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.pool import BlockIds, BlockPool
from radixkv.cache.retention import Retention
from radixkv.cache.stats import Counters
from radixkv.errors import CacheInvariantError


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
        """The namespace's root; one that has no children is not kept."""
        return self.roots.get(namespace) or RootNode(namespace)

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

    def num_unheld(self, node: RadixNode) -> int:
        """How many blocks at the end of a leaf nobody holds."""
        if not self.has_open(node):
            return 0 if node.pins else len(node.blocks)
        if self.pool.refs[node.blocks[-1]] > 1:
            return 0
        return 1 if node.pins else len(node.blocks)

    # -- holding ---------------------------------------------------------------------------------

    def hold(self, match: Match, retention: Retention) -> RadixNode | None:
        """Use what was matched, and pin where it ends for one more sequence; see `use`."""
        if (node := self.use(match, retention)) is not None:
            self.pin(node)
        return node

    def pin(self, node: RadixNode) -> None:
        """One more sequence ends here; holds the whole path. O(nodes that nobody held before)."""
        above: RadixNode | None = node
        while above is not None:
            above.pins += 1
            if above.pins > 1:
                return
            self.num_evictable -= len(above.tokens) // self.block_bytes
            if above.entry is not None and not self.num_unheld(above):
                self.queue.discard(above)
            above = above.parent

    def unpin(self, node: RadixNode) -> None:
        """One sequence fewer ends here. O(nodes that nobody holds any more)."""
        above: RadixNode | None = node
        while above is not None:
            if above.pins < 1:
                raise CacheInvariantError("a node was unpinned more often than pinned")
            above.pins -= 1
            if above.pins:
                return
            self.num_evictable += len(above.tokens) // self.block_bytes
            if above.children is None:
                self.enqueue(above)
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
            self.queue.discard(self.open_nodes[block])

    def release(self, blocks: BlockIds[int]) -> None:
        """A table gives up blocks that are no full blocks of the tree."""
        self.pool.release(blocks)
        open_nodes, refs = self.open_nodes, self.pool.refs
        for block in blocks:
            if block in open_nodes and refs[block] == 1:
                self.num_evictable += 1
                self.enqueue(open_nodes[block])

    def enqueue(self, node: RadixNode) -> None:
        """Let a leaf be evicted, if nobody holds its last block; O(log n)."""
        if node.entry is None and node.parent is not None and self.num_unheld(node):
            self.queue.put(node)

    # -- using -----------------------------------------------------------------------------------

    def split_at(self, node: RadixNode, count: int) -> RadixNode:
        """The node that ends after ``count`` of the node's full blocks; splits if it must."""
        return node if count == len(node.tokens) // self.block_bytes else self._split(node, count)

    def use(self, match: Match, retention: Retention) -> RadixNode | None:
        """Refresh the recency of what a match uses, and of nothing else; may split one edge.

        Returns the node that ends where the match's full blocks end; None if there are none.
        """
        node = None
        if match.num_blocks:
            assert match.node is not None
            node = match.node = self.split_at(match.node, match.node_blocks)
        used = node
        if match.source_whole:
            used = match.source
        elif node is not None and len(node.tokens) % self.block_bytes:
            self._detach_open(node)
        if used is not None:
            if self._announcer.residency is not None:
                self._announcer.residency.used(used)
            self.clock += 1
            used.use(self.clock, retention, self.queue.clock)
        return node

    def touch(self, node: RadixNode) -> None:
        """Refresh the recency of a node and its ancestors; O(depth)."""
        if self._announcer.residency is not None:
            self._announcer.residency.touched(node)
        self.clock += 1
        node.touch(self.clock)

    def forget(self, node: RadixNode, start: int, retention: Retention) -> None:
        """Weaken the hint on what nobody else uses from block ``start`` on; may split once."""
        while node.parent is not None and not node.pins:
            if node.children is None and not self.num_unheld(node):
                return
            first = max(start - node.start, node.num_used)
            below = node.children or ()
            if first >= len(node.blocks) or any(c.retention != retention for c in below):
                return
            if first:
                self._split(node, first)
            node.retention = retention
            if node.entry is not None:
                self.queue.put(node)
            node = node.parent

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
        tokens, blocks = node.tokens[:cut], node.blocks[:count]
        upper = self._new_node(parent, tokens, blocks, node.start, node.retention)
        upper.created, upper.last_used, upper.used_at = node.created, node.last_used, node.used_at
        upper.hits = node.hits
        upper.num_used = min(node.num_used, count)
        node.num_used = max(node.num_used - count, 0)
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
        tokens, blocks = node.tokens[cut:], node.blocks[full:]
        child = self._new_node(node, tokens, blocks, node.start + full, node.retention)
        child.created, child.last_used, child.used_at = node.created, node.last_used, node.used_at
        child.num_used = int(node.num_used > full)
        self.queue.discard(node)
        del node.tokens[cut:]
        del node.blocks[full:]
        self.open_nodes[child.blocks[0]] = child
        self._add_to(node, child)
        self.enqueue(child)
        self._counters.splits += 1

    def _new_node(
        self,
        parent: RadixNode,
        tokens: bytearray,
        blocks: BlockIds[int],
        start: int,
        retention: Retention,
    ) -> RadixNode:
        self._serial += 1
        return RadixNode(parent, tokens, blocks, start, self.clock, self._serial, retention)

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
        self._make_room(node, tokens)
        self.pool.enter_tree(blocks)
        self._counters.blocks_stored += len(blocks)
        grows = node.pins == 1 and node.parent is not None and node.children is None
        if grows and node.retention == retention:
            node.tokens += tokens
            node.blocks += blocks
        else:
            node = self._add_child(node, tokens, blocks, retention)
            self.num_evictable += len(blocks)
        self._announcer.stored(node, len(blocks))
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
        else:
            self.open_nodes[block] = self._add_child(node, tokens, array("i", [block]), retention)
        return block

    def _make_room(self, node: RadixNode, tokens: bytearray) -> None:
        """Supersede the open block that ``tokens`` extend; set any other open end apart."""
        if len(node.tokens) % self.block_bytes:
            if tokens.startswith(node.tokens[self.num_full(node) * self.block_bytes :]):
                self._cut(node, 1, "superseded")
            else:
                self._detach_open(node)
        elif node.children is not None and node.children.has_open:
            child, _ = node.children.closest(bytes(tokens[: self.block_bytes]))
            if child is not None and tokens.startswith(child.tokens):
                self._cut(child, 1, "superseded")

    def _add_child(
        self, node: RadixNode, tokens: bytearray, blocks: BlockIds[int], retention: Retention
    ) -> RadixNode:
        if isinstance(node, RootNode):
            self.roots[node.namespace] = node
        self.clock += 1
        child = self._new_node(node, tokens, blocks, node.start + len(node.blocks), retention)
        if node.parent is not None:
            child.last_used = node.last_used
        self._add_to(node, child)
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
            left = (len(node.blocks) - take) * self.block_bytes
            self._counters.tokens_evicted += (len(node.tokens) - left) // TOKEN_BYTES
            self._cut(node, take, "evicted")
            count -= take

    def drop_open(self, block: int) -> None:
        """Give an open block up, so that its holder may go on writing into it."""
        self._cut(self.open_nodes[block], 1, "withdrawn")

    def remove(self, node: RadixNode, reason: RemovalReason) -> int:
        """Take a node out with all below it, none of it pinned; returns the number of blocks.

        Blocks that tables count in ``refs`` stay with them.
        """
        below, stack = [], [node]
        while stack:
            below.append(stack.pop())
            stack.extend(below[-1].children or ())
        total = sum(len(lower.blocks) for lower in below)
        for lower in reversed(below):
            self._cut(lower, len(lower.blocks), reason)
        return total

    def _cut(self, node: RadixNode, count: int, reason: RemovalReason) -> None:
        """The one way out of the tree: drop the last ``count`` blocks of a leaf."""
        self._announcer.removed(node, count, reason)
        blocks, tokens = node.blocks, node.tokens
        has_open = len(tokens) % self.block_bytes
        kept = len(blocks) - count
        if kept:
            del tokens[kept * self.block_bytes :]
            node.blocks = blocks[:kept]
            node.num_used = min(node.num_used, kept)
            blocks = blocks[kept:]
            if node.pins:  # What is left of the run is held.
                self.queue.discard(node)
        else:
            self._disown(node)
        if has_open:
            self._leave_open(blocks.pop())
        if blocks:
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
                self.enqueue(parent)
