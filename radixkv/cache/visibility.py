"""Visibility: when blocks become everyone's, and how they are taken back.

Only blocks whose KV is computed, or will be by the very step being scheduled, may be found by a
match. What a step promised and did not deliver is withdrawn, with all that was built on it.
"""

from __future__ import annotations

from array import array

from radixkv.cache.allocator import BlockAllocator
from radixkv.cache.events import RemovalReason
from radixkv.cache.node import RadixNode
from radixkv.cache.sequence import Sequence
from radixkv.cache.tree import Match


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
        self._unsettled: list[tuple[Sequence, int]] = []

    # -- showing ---------------------------------------------------------------------------------

    def promise(self, sequence: Sequence, stop: int) -> None:
        """The step being scheduled will compute the sequence's tokens up to ``stop``."""
        self.expect(sequence, sequence.num_computed)
        size = self._tree.block_size
        blocks = sequence.table[sequence.num_computed // size : -(-stop // size)]
        self._allocator.pending.update(blocks)

    def expect(self, sequence: Sequence, num_tokens: int) -> None:
        """If the step fails, the sequence has only ``num_tokens`` tokens computed."""
        self._unsettled.append((sequence, num_tokens))

    def commit(self, sequence: Sequence, full: int, pending: bool) -> bool:
        """Show the sequence's first ``full`` blocks; False if some must wait for their KV."""
        while sequence.num_tree_blocks < full:
            match = self.match_on(sequence, full * self._tree.block_bytes)
            if not match.num_blocks:
                self._attach(sequence, full)
            elif pending:
                # The step will write into these blocks of ours: they cannot be given up before.
                return False
            else:
                match.source = None
                self._allocator.counters.blocks_deduplicated += match.num_blocks
                self.advance(sequence, match)
        return True

    def match_on(self, sequence: Sequence, limit: int) -> Match:
        """What the tree has of the sequence's first ``limit`` bytes beyond its path."""
        node = sequence.node or self._tree.roots.get(sequence.namespace)
        offset = sequence.num_tree_blocks * self._tree.block_bytes
        data = sequence.data if limit >= len(sequence.data) else sequence.data[:limit]
        return self._tree.match(node, data, offset)

    def advance(self, sequence: Sequence, match: Match) -> None:
        """Hold the tree's blocks in place of the sequence's own identical (or unwritten) ones."""
        theirs = self._tree.blocks_of(match)
        done = sequence.num_tree_blocks
        mine = sequence.table[done : done + len(theirs)]
        self._tree.use(match, sequence.retention)
        self._tree.repin(sequence.node, match.node)
        sequence.node = match.node
        sequence.table[done : done + len(theirs)] = theirs
        sequence.num_tree_blocks += len(theirs)
        self._tree.release(mine)

    def _attach(self, sequence: Sequence, full: int) -> None:
        done, block_bytes = sequence.num_tree_blocks, self._tree.block_bytes
        end = sequence.node or self._tree.root(sequence.namespace)
        tokens = sequence.data[done * block_bytes : full * block_bytes]
        blocks = sequence.table[done:full]
        node = self._tree.attach(end, tokens, blocks, sequence.retention)
        if node is not sequence.node:
            self._tree.repin(sequence.node, node)
            sequence.node = node
        sequence.num_tree_blocks = full

    def commit_open(self, sequence: Sequence) -> None:
        """Show the last block, which is not full, for others to copy from."""
        block = sequence.table[-1]
        if block in self._tree.open_nodes or len(sequence.table) == sequence.num_tree_blocks:
            return
        end = sequence.node or self._tree.root(sequence.namespace)
        tokens = sequence.data[sequence.num_tree_blocks * self._tree.block_bytes :]
        kept = self._tree.attach_open(end, tokens, block, sequence.retention)
        if kept != block and self._pool.refs[block] == 1 and block not in self._allocator.pending:
            self._tree.retain_open(kept)
            sequence.table[-1] = kept
            self._tree.release(array("i", [block]))
            self._allocator.counters.blocks_deduplicated += 1

    # -- taking back -----------------------------------------------------------------------------

    def settle(self) -> None:
        """The step has run: everything promised is computed."""
        self._unsettled.clear()
        self._allocator.pending.clear()

    def abort(self) -> None:
        """The step has failed: withdraw everything promised."""
        unsettled, self._unsettled = self._unsettled, []
        self._allocator.pending.clear()
        for sequence, num_tokens in reversed(unsettled):
            self.withdraw(sequence, num_tokens)

    def retract(self, sequence: Sequence) -> None:
        """Withdraw what was promised of one sequence, which is about to be released."""
        mine = [num_tokens for other, num_tokens in self._unsettled if other is sequence]
        if mine:
            self._unsettled = [entry for entry in self._unsettled if entry[0] is not sequence]
            self.withdraw(sequence, min(mine))

    def withdraw(self, sequence: Sequence, num_tokens: int) -> None:
        """Take back what is visible of a sequence beyond ``num_tokens``, and all below it."""
        kept = num_tokens // self._tree.block_size
        last = sequence.table[-1] if sequence.table else -1
        if last in self._tree.open_nodes:
            self._tree.drop_open(last)
        if kept < sequence.num_tree_blocks:
            assert sequence.node is not None
            node = sequence.node
            while node.start > kept:
                assert node.parent is not None
                node = node.parent
            if node.start < kept:
                self._tree.split_at(node, kept - node.start)
            self.remove(node, "withdrawn")
        self.hide(sequence)

    def remove(self, node: RadixNode, reason: RemovalReason) -> None:
        """Take a node and all below it out of the tree; tables keep their blocks, unseen."""
        parent = node.parent
        assert parent is not None
        for sequence in self._sequences.values():
            if sequence.node is not None and node in sequence.node.path():
                for block in sequence.table[node.start : sequence.num_tree_blocks]:
                    self._pool.refs[block] += 1
                end = parent if parent.parent is not None else None
                self._tree.repin(sequence.node, end)
                sequence.node, sequence.num_tree_blocks = end, node.start
                self.hide(sequence)
        blocks = self._tree.remove(node, reason)
        self._allocator.counters.blocks_withdrawn += blocks

    def hide(self, sequence: Sequence) -> None:
        """Nothing of the sequence may become visible any more."""
        sequence.cacheable = False
