"""The laws of the cache, as far as its state can show them.

Numbers are those of the design. Laws that speak of what a call does (5: a match returns what was
asked for; 7: retained before allocated; 11: misuse raises; 13: counted once; 14: same tokens) are
checked where the state shows their trace, and otherwise by the tests that watch the calls. That
only the tree holds blocks once all sequences have ended (12) follows from 1 and 2.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from radixkv.cache.allocator import BlockAllocator
from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.pool import FULL, OPEN, BlockPool
from radixkv.cache.sequence import Sequence
from radixkv.cache.tree import RadixTree
from radixkv.errors import CacheInvariantError


def _demand(condition: object, law: int, message: str) -> None:
    if not condition:
        raise CacheInvariantError(f"law {law}: {message}")


def check_laws(allocator: BlockAllocator, sequences: list[Sequence]) -> None:
    """Raise `CacheInvariantError` if any law is broken; O(blocks + nodes + tables)."""
    pool, tree = allocator.pool, allocator.tree
    nodes = list(tree.nodes())
    tables = Counter(block for sequence in sequences for block in sequence.table)
    _check_refcounts(pool, tree, nodes, tables)
    _check_pins(nodes, sequences)
    for node in nodes:
        _check_node(tree, node)
    _check_siblings(tree, nodes)
    for sequence in sequences:
        _check_sequence(pool, tree, sequence)
    _check_queue(pool, tree, nodes, tables)
    _check_promises(allocator, sequences)
    counters = allocator.counters
    _demand(counters.hit_tokens <= counters.query_tokens, 13, "more hits than queries")
    _demand(counters.copied_tokens <= counters.hit_tokens, 13, "more copied than hit")


def _check_refcounts(
    pool: BlockPool, tree: RadixTree, nodes: list[RadixNode], tables: Counter[int]
) -> None:
    free = pool.free_blocks()
    place = bytearray(pool.num_blocks)
    refs = [tables[block] for block in range(pool.num_blocks)]
    for node in nodes:
        full = tree.num_full(node)
        for index, block in enumerate(node.blocks):
            _demand(not place[block], 3, f"block {block} is in two places of the tree")
            place[block] = FULL if index < full else OPEN
            # What pins hold is not counted block by block; see `_check_pins`.
            refs[block] = 0 if index < full else refs[block] + 1
            if index >= full:
                _demand(tree.open_nodes.get(block) is node, 3, "an open block lost its node")
    _demand(place == pool.place, 1, "the pool and the tree disagree on what is cached")
    _demand(refs == pool.refs, 1, "refcounts differ from tables and tree")
    _demand(place.count(OPEN) == len(tree.open_nodes), 3, "an open block is not in the tree")
    _demand(len(set(free)) == len(free), 2, "a block is on the free list twice")
    used = {block for block in range(pool.num_blocks) if refs[block] or place[block]}
    _demand(not used & set(free), 2, "a free block is in use")
    _demand(len(used) + len(free) == pool.num_blocks, 2, "a block is neither free nor in use")


def _check_pins(nodes: list[RadixNode], sequences: list[Sequence]) -> None:
    ends = Counter(id(sequence.node) for sequence in sequences if sequence.node is not None)
    for node in nodes:
        pinned_children = sum(1 for child in node.children or () if child.pins)
        _demand(node.pins == ends[id(node)] + pinned_children, 1, "pins differ from the tables")
    known = {id(node) for node in nodes}
    _demand(set(ends) <= known, 6, "a sequence ends at a node that has left the tree")


def _check_node(tree: RadixTree, node: RadixNode) -> None:
    parent = node.parent
    assert parent is not None
    tokens = len(node.tokens) // TOKEN_BYTES
    _demand(tokens > 0, 3, "a node without tokens")
    _demand(len(node.blocks) == -(-tokens // tree.block_size), 3, "tokens and blocks disagree")
    _demand(not tree.has_open(node) or node.children is None, 8, "an open block has children")
    _demand(node.start == parent.start + len(parent.blocks), 3, "a node is at the wrong depth")
    _demand(node.children is None or len(node.children), 8, "an empty container of children")
    if not isinstance(parent, RootNode):
        _demand(parent.last_used >= node.last_used, 10, "a child was used after its parent")


def _check_siblings(tree: RadixTree, nodes: list[RadixNode]) -> None:
    parents: list[RadixNode] = [*tree.roots.values(), *nodes]
    for parent in parents:
        if parent.children is None:
            continue
        firsts = sorted(bytes(child.tokens[: tree.block_bytes]) for child in parent.children)
        _demand(len(firsts) == len(parent.children), 9, "children are counted wrongly")
        for left, right in pairwise(firsts):
            _demand(not right.startswith(left), 9, "two children hold the same tokens")
        for child in parent.children:
            _demand(child.parent is parent, 3, "a child has another parent")
            first = bytes(child.tokens[: tree.block_bytes])
            if len(first) == tree.block_bytes:
                found = parent.children.find(first)
                _demand(found is child, 5, "a child cannot be found by its tokens")
            alike = parent.children.closest(first)[0]
            _demand(alike is child, 5, "a child cannot be found by likeness")
    for root in tree.roots.values():
        _demand(root.children is not None, 12, "an empty namespace was kept")


def _check_sequence(pool: BlockPool, tree: RadixTree, sequence: Sequence) -> None:
    table, known = sequence.table, sequence.num_tree_blocks
    _demand(len(set(table)) == len(table), 3, "a table holds a block twice")
    needed = -(-sequence.num_tokens // tree.block_size)
    _demand(len(table) == needed, 1, "a table has blocks that its tokens do not need")
    _demand(sequence.num_computed <= sequence.num_tokens, 4, "more computed than there are tokens")
    computed = -(-sequence.num_computed // tree.block_size)
    _demand(sequence.withdrawn or known <= computed, 4, "visible, but not computed")
    path = sequence.node.path() if sequence.node is not None else []
    blocks = [block for node in path for block in node.blocks[: tree.num_full(node)]]
    _demand(blocks == table[:known].tolist(), 3, "a table differs from the path it holds")
    tokens = b"".join(node.tokens[: tree.num_full(node) * tree.block_bytes] for node in path)
    size = min(len(tokens), len(sequence.data))
    _demand(tokens[:size] == sequence.data[:size], 5, "a shared block has other tokens")
    if path:
        _demand(path[0].parent is tree.roots.get(sequence.namespace), 5, "wrong namespace")
    full = [block for block in table[known:] if pool.place[block] == FULL]
    _demand(not full, 3, f"holds the tree's blocks {full}, but not their ancestors")


def _check_promises(allocator: BlockAllocator, sequences: list[Sequence]) -> None:
    waiting: set[int] = set()
    for sequence in sequences:
        settled, promised = sequence.num_settled, sequence.promised_from
        _demand(promised is None or settled is not None, 4, "promised, but not to be withdrawn")
        if settled is not None:
            waiting.update(sequence.table[settled // allocator.tree.block_size :])
        rests = not allocator.pending.isdisjoint(sequence.table)
        _demand(not rests or settled is not None, 4, "rests on a promise without knowing it")
    _demand(allocator.pending <= waiting, 4, "a block is pending that no sequence waits for")
    _demand(allocator.late.keys() <= allocator.pending, 4, "a late copy into a settled block")


def _check_queue(
    pool: BlockPool, tree: RadixTree, nodes: list[RadixNode], tables: Counter[int]
) -> None:
    unheld = [block for block in range(pool.num_blocks) if pool.place[block] and not tables[block]]
    _demand(len(unheld) == tree.num_evictable, 2, "the count of evictable blocks is off")
    evictable = set()
    for node in nodes:
        held = [tables[block] > 0 for block in node.blocks]
        if node.children is None and not held[-1]:
            evictable.add(node.serial)
            trailing = len(held) if not any(held) else held[::-1].index(True)
            _demand(trailing == tree.num_unheld(node), 6, "a held block could be evicted")
    queued = [node.serial for node in tree.queue.nodes()]
    _demand(len(queued) == len(set(queued)), 6, "a leaf is queued twice")
    _demand(set(queued) == evictable, 6, "the queue differs from the unheld leaves")
    _demand(len(tree.queue) == sum(node.entry is not None for node in nodes), 6, "a lost place")
