"""Visibility: when blocks become everyone's, and how they are taken back.

Only blocks whose KV is computed, or will be by the very step being scheduled, may be found by a
match. What a step promised and did not deliver is withdrawn, with all that was built on it.
"""

from __future__ import annotations

from array import array

from radixkv.cache.allocator import BlockAllocator
from radixkv.cache.events import RemovalReason
from radixkv.cache.match import Match, longest_match
from radixkv.cache.node import RadixNode
from radixkv.cache.sequence import Sequence


class Visibility:
    """Commits sequences' blocks to the tree and withdraws them.

    Parameters
    ----------
    allocator : BlockAllocator
    sequences : dict
        The running sequences, by ``id``; the cache's own registry.
    """

    def __init__(self, allocator: BlockAllocator, sequences: dict[int, Sequence]) -> None:
        self._allocator = allocator
        self._pool = allocator.pool
        self._tree = allocator.tree
        self._sequences = sequences
        self._unsettled: dict[int, Sequence] = {}

    # -- showing ---------------------------------------------------------------------------------

    def commit(self, sequence: Sequence, full: int) -> bool:
        """Show the sequence's first ``full`` blocks; False if some must wait for their KV."""
        while sequence.num_tree_blocks < full:
            if self._is_new(sequence):
                return self._attach(sequence, full)
            match = self.match_on(sequence, full * self._tree.block_bytes)
            if self._is_pending(sequence, match):
                return False
            match.forget_source()
            self._allocator.counters.blocks_deduplicated += match.num_blocks
            self.advance(sequence, match)
        return True

    def _is_new(self, sequence: Sequence) -> bool:
        """Whether the tree lacks the sequence's next full block."""
        end = sequence.node or self._tree.roots.get(sequence.namespace)
        if end is None or end.children is None:
            return True
        block_bytes = self._tree.block_bytes
        start = sequence.num_tree_blocks * block_bytes
        return end.children.find(bytes(sequence.data[start : start + block_bytes])) is None

    def _is_pending(self, sequence: Sequence, match: Match) -> bool:
        """Whether the step being scheduled writes what would be given up or taken instead.

        The step was told where to write, and computed blocks are not given up for a promise.
        """
        pending, done = self._allocator.pending, sequence.num_tree_blocks
        return bool(pending) and not (
            pending.isdisjoint(sequence.table[done : done + match.num_blocks])
            and pending.isdisjoint(match.blocks())
        )

    def match_on(self, sequence: Sequence, limit: int) -> Match:
        """What the tree has of the sequence's first ``limit`` bytes beyond its path."""
        block_bytes = self._tree.block_bytes
        node = sequence.node or self._tree.roots.get(sequence.namespace)
        data = sequence.data if limit >= len(sequence.data) else sequence.data[:limit]
        return longest_match(node, data, sequence.num_tree_blocks * block_bytes, block_bytes)

    def advance(self, sequence: Sequence, match: Match) -> None:
        """Hold the tree's blocks in place of the sequence's own identical (or unwritten) ones."""
        theirs = match.blocks()
        done = sequence.num_tree_blocks
        mine = sequence.table[done : done + len(theirs)]
        node = self._tree.hold(match, sequence.retention)
        if sequence.node is not None:
            self._tree.unpin(sequence.node)
        sequence.node = node
        sequence.table[done : done + len(theirs)] = theirs
        sequence.num_tree_blocks += len(theirs)
        self._allocator.release(mine)

    def _attach(self, sequence: Sequence, full: int) -> bool:
        done, block_bytes = sequence.num_tree_blocks, self._tree.block_bytes
        # Forked while the tree had the same blocks, pending, and lost them before they settled.
        # What forks share begins with the first block that the tree lacks; it waits for one holder.
        if self._pool.refs[sequence.table[done]] > 1:
            return False
        end = sequence.node or self._tree.root(sequence.namespace)
        tokens = sequence.data[done * block_bytes : full * block_bytes]
        node = self._tree.attach(end, tokens, sequence.table[done:full], sequence.retention)
        if node is not sequence.node:
            self._tree.repin(sequence.node, node)
            sequence.node = node
        sequence.num_tree_blocks = full
        return True

    def commit_open(self, sequence: Sequence) -> None:
        """Show the last block, which is not full, for others to copy from."""
        block, pending = sequence.table[-1], self._allocator.pending
        if block in self._tree.open_nodes or len(sequence.table) == sequence.num_tree_blocks:
            return
        if block in self._allocator.late and sequence.promised_from is None:
            # All of it is still to be copied, and its holder may give it up: then the step could
            # fail with nobody left to take it back. It can be shown once the step has run.
            return
        end = sequence.node or self._tree.root(sequence.namespace)
        tokens = sequence.data[sequence.num_tree_blocks * self._tree.block_bytes :]
        kept = self._tree.attach_open(end, tokens, block, sequence.retention)
        if kept != block and self._pool.refs[block] == 1 and pending.isdisjoint((block, kept)):
            self._tree.retain_open(kept)
            sequence.table[-1] = kept
            self._allocator.release(array("i", [block]))
            self._allocator.counters.blocks_deduplicated += 1

    # -- promising -------------------------------------------------------------------------------

    def promise(self, sequence: Sequence, stop: int) -> None:
        """The step being scheduled will compute the sequence's tokens up to ``stop``."""
        size, start = self._tree.block_size, sequence.num_computed
        if stop == start:
            return
        self.expect(sequence, start)
        if sequence.promised_from is None:
            sequence.promised_from = start
        self._allocator.pending.update(sequence.table[start // size : -(-stop // size)])

    def expect(self, sequence: Sequence, num_tokens: int) -> None:
        """If the step fails, the sequence has only ``num_tokens`` tokens computed."""
        known = sequence.num_settled
        sequence.num_settled = num_tokens if known is None else min(known, num_tokens)
        self._unsettled[id(sequence)] = sequence

    def lean(self, sequence: Sequence, start: int) -> None:
        """Note if the sequence, whose table is new from ``start`` on, rests on pending blocks."""
        pending = self._allocator.pending
        if pending and not pending.isdisjoint(sequence.table[start:]):
            first = next(
                i for i in range(start, len(sequence.table)) if sequence.table[i] in pending
            )
            self.expect(sequence, first * self._tree.block_size)

    def settle(self) -> None:
        """The step has run: everything promised is computed."""
        for sequence in self._unsettled.values():
            sequence.num_settled = sequence.promised_from = None
        self._unsettled.clear()
        self._allocator.settle()

    def abort(self) -> None:
        """The step has failed: withdraw everything promised."""
        for sequence in list(self._unsettled.values()):
            assert sequence.num_settled is not None
            self.withdraw(sequence, sequence.num_settled)
        self.settle()  # Nothing is left of the step.

    def end(self, sequence: Sequence) -> None:
        """An unsettled sequence is about to be released: withdraw what was promised of it."""
        if sequence.promised_from is not None:
            self.withdraw(sequence, sequence.promised_from)
        del self._unsettled[id(sequence)]

    # -- taking back -----------------------------------------------------------------------------

    def withdraw(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back what is visible of a sequence beyond ``num_tokens``, and all built on it.

        That is all below it in the tree, whoever shares its blocks, and whoever was to copy from
        them in the step being scheduled. O(tables) for each sequence that is affected.
        """
        work = [(sequence, num_tokens)]
        while work:
            victim, kept = work.pop()
            if victim.promised_from is not None:
                kept = min(kept, victim.promised_from)
            lost = set(victim.table[kept // self._tree.block_size :])
            lost.update(o.target for o in self._allocator.late.values() if o.source in lost)
            self._take_back(victim, kept)
            for other in self._sequences.values():
                if other is not victim and not lost.isdisjoint(other.table):
                    first = next(i for i, block in enumerate(other.table) if block in lost)
                    safe = min(first * self._tree.block_size, other.num_computed)
                    if not other.withdrawn or safe < other.num_computed:
                        work.append((other, safe))
            self._allocator.drop_late(lost)
            self._allocator.pending -= lost

    def _take_back(self, sequence: Sequence, num_tokens: int) -> None:
        kept = num_tokens // self._tree.block_size
        if sequence.table and sequence.table[-1] in self._tree.open_nodes:
            self._tree.drop_open(sequence.table[-1])
        if kept < sequence.num_tree_blocks:
            assert sequence.node is not None
            node = sequence.node
            while node.start > kept:
                assert node.parent is not None
                node = node.parent
            if node.start < kept:
                self._tree.split_at(node, kept - node.start)  # and ``node`` is what is behind
            self.remove(node, "withdrawn")
        if sequence.num_settled is not None:
            num_tokens = min(num_tokens, sequence.num_settled)
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        sequence.num_cached = min(sequence.num_cached, num_tokens)
        sequence.promised_from = None
        sequence.withdrawn = True
        self.hide(sequence)

    def remove(self, node: RadixNode, reason: RemovalReason) -> None:
        """Take a node and all below it out of the tree; tables keep their blocks, unseen."""
        end = node.parent
        assert end is not None
        for sequence in self._sequences.values():
            if sequence.node is not None and node in sequence.node.path():
                for block in sequence.table[node.start : sequence.num_tree_blocks]:
                    self._pool.refs[block] += 1
                above = end if end.parent is not None else None
                self._tree.repin(sequence.node, above)
                sequence.node, sequence.num_tree_blocks = above, node.start
                self.hide(sequence)
        blocks = self._tree.remove(node, reason)
        self._allocator.counters.blocks_withdrawn += blocks

    def hide(self, sequence: Sequence) -> None:
        """Nothing of the sequence may become visible any more."""
        sequence.cacheable = False
