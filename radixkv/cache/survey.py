"""What a tree and its pool look like now, as plain data of bounded size; reads only."""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.hashing import TOKEN_BYTES
from radixkv.cache.manager import PrefixCache
from radixkv.cache.node import RadixNode
from radixkv.cache.pool import FREE_OR_HELD
from radixkv.cache.sequence import Sequence

_last_used = attrgetter("last_used")


class TreeView(NamedTuple):
    """A part of the tree that hangs together.

    Attributes
    ----------
    nodes : list of RadixNode
        Parents before children. To be read before the cache goes on.
    num_hidden : dict of int to int
        Children of a node that are not among them, by its serial, where there are any.
    holders : dict of int to int
        Sequences whose tables hold a node's first block, by its serial, where there are any.
    """

    nodes: list[RadixNode]
    num_hidden: dict[int, int]
    holders: dict[int, int]


def survey_tree(cache: PrefixCache, limit: int) -> TreeView:
    """At most ``limit`` nodes: those that sequences hold, then leaves used last, with all above.

    O(limit + depth of the sequences + leaves), the last at the speed of numpy.
    """
    ends = [its.node for its in cache.sequences.values() if its.node is not None]
    holders = count_path_holders(ends)
    chosen: dict[int, RadixNode] = {}
    _add_paths(ends, chosen, limit)
    # Tables that hold an open block end at the node above it.
    refs = cache.pool.refs
    held = [(node, block) for block, node in cache.tree.open_nodes.items() if refs[block] > 1]
    for node, block in held:
        if len(node.tokens) < cache.block_bytes:
            holders[node.serial] = refs[block] - 1
    _add_paths([node for node, _ in held], chosen, limit)
    _add_paths(_used_last(cache.tree.queue.leaves(), limit), chosen, limit)
    return TreeView(list(chosen.values()), _num_hidden(chosen), holders)


def _used_last(leaves: list[RadixNode], limit: int) -> list[RadixNode]:
    """At most ``limit`` leaves, the last used first; of equals, the first in the list."""
    clocks = np.fromiter(map(_last_used, leaves), np.int64, len(leaves))
    return [leaves[place] for place in np.argsort(-clocks, kind="stable")[:limit].tolist()]


def _add_paths(ends: list[RadixNode], chosen: dict[int, RadixNode], limit: int) -> None:
    """Add whole paths to ``ends``, from the top, as long as there is room."""
    for end in ends:
        path = []
        node: RadixNode | None = end
        while node is not None and node.parent is not None and node.serial not in chosen:
            path.append(node)
            node = node.parent
        if len(chosen) + len(path) <= limit:
            for node in reversed(path):
                chosen[node.serial] = node
        if len(chosen) == limit:
            return


def _num_hidden(chosen: dict[int, RadixNode]) -> dict[int, int]:
    shown: dict[int, int] = {}
    for node in chosen.values():
        above = node.parent
        assert above is not None
        shown[above.serial] = shown.get(above.serial, 0) + 1
    hidden = {}
    for serial, node in chosen.items():
        if node.children is not None and (missing := len(node.children) - shown.get(serial, 0)):
            hidden[serial] = missing
    return hidden


def count_path_holders(ends: list[RadixNode]) -> dict[int, int]:
    """How many of the sequences that end at these nodes hold each node; O(nodes above them)."""
    held: dict[int, RadixNode] = {}
    holders: dict[int, int] = {}
    for end in ends:
        holders[end.serial] = holders.get(end.serial, 0) + 1
        node: RadixNode | None = end
        while node is not None and node.parent is not None and node.serial not in held:
            held[node.serial] = node
            node = node.parent
    # What is counted below is complete before it is added above.
    for node in sorted(held.values(), key=lambda node: -node.start):
        above = node.parent
        if above is not None and above.parent is not None:
            holders[above.serial] = holders.get(above.serial, 0) + holders[node.serial]
    return holders


class PoolView(NamedTuple):
    """All blocks.

    Attributes
    ----------
    tables : int64 (num_blocks,)
        Block tables that hold each block.
    cached : bool (num_blocks,)
        Whether the tree holds it.
    """

    tables: npt.NDArray[np.int64]
    cached: npt.NDArray[np.bool_]


def survey_pool(cache: PrefixCache) -> PoolView:
    """Who holds each block; O(blocks + entries of all tables), at the speed of numpy."""
    pool = cache.pool
    tables = [np.frombuffer(its.table, np.int32) for its in cache.sequences.values() if its.table]
    counts = np.zeros(pool.num_blocks, np.int64)
    if tables:
        counts += np.bincount(np.concatenate(tables), minlength=pool.num_blocks)
    # A copy: a view would keep the pool's own array from being resized, or show what comes later.
    cached = np.frombuffer(bytes(pool.place), np.uint8) != FREE_OR_HELD
    return PoolView(counts, cached)


def tail_of(sequence: Sequence, most: int) -> bytes:
    """The last tokens of a sequence, at most ``most`` of them, four bytes each."""
    return bytes(sequence.data[-most * TOKEN_BYTES :])
