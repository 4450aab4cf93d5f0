"""What a tree and its pool look like now, as plain data of bounded size; reads only."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.hashing import TOKEN_BYTES, Namespace
from radixkv.cache.manager import PrefixCache
from radixkv.cache.node import RadixNode, RootNode
from radixkv.cache.pool import FREE_OR_HELD
from radixkv.cache.retention import Retention
from radixkv.cache.sequence import Sequence


class NodeView(NamedTuple):
    """One node.

    Attributes
    ----------
    serial, parent : int
        Names of the node and of the one above; 0 above those that begin a namespace. A split
        leaves the lower half its name.
    holders : int
        Sequences whose tables hold its full blocks.
    last_used, created : int
        Readings of the tree's logical clock.
    num_hidden : int
        Children that are not among the nodes given.
    head : bytes
        Its first tokens, four bytes each.
    """

    node: RadixNode
    serial: int
    parent: int
    namespace: Namespace
    num_blocks: int
    num_tokens: int
    start: int
    holders: int
    last_used: int
    created: int
    hits: int
    retention: Retention
    num_hidden: int
    head: bytes


def survey_tree(cache: PrefixCache, limit: int, head_tokens: int) -> list[NodeView]:
    """At most ``limit`` nodes, parents first: those that sequences hold, then the last used.

    Each comes with its first ``head_tokens`` tokens.
    O(children of the nodes given + nodes above sequences), whatever lies below.
    """
    holders = count_path_holders(cache)
    chosen = _held_nodes(cache, limit)
    _add_last_used(cache, chosen, limit)
    num_shown: dict[int, int] = {}
    for node in chosen.values():
        parent = node.parent
        assert parent is not None
        num_shown[parent.serial] = num_shown.get(parent.serial, 0) + 1
    namespaces: dict[int, Namespace] = {}
    views = []
    for node in sorted(chosen.values(), key=lambda node: (node.start, node.serial)):
        parent = node.parent
        assert parent is not None
        if isinstance(parent, RootNode):
            namespace, above = parent.namespace, 0
        else:
            namespace, above = namespaces[parent.serial], parent.serial
        namespaces[node.serial] = namespace
        children = 0 if node.children is None else len(node.children)
        views.append(
            NodeView(
                node,
                node.serial,
                above,
                namespace,
                len(node.blocks),
                len(node.tokens) // TOKEN_BYTES,
                node.start,
                holders.get(node.serial, 0),
                node.last_used,
                node.created,
                node.hits,
                node.retention,
                children - num_shown.get(node.serial, 0),
                bytes(node.tokens[: head_tokens * TOKEN_BYTES]),
            )
        )
    return views


def count_path_holders(cache: PrefixCache) -> dict[int, int]:
    """Sequences at or below each node that any sequence holds, by its serial."""
    held: dict[int, RadixNode] = {}
    holders: dict[int, int] = {}
    for sequence in cache.sequences.values():
        node = sequence.node
        if node is not None:
            holders[node.serial] = holders.get(node.serial, 0) + 1
        while node is not None and node.parent is not None and node.serial not in held:
            held[node.serial] = node
            node = node.parent
    for node in sorted(held.values(), key=lambda node: -node.start):
        parent = node.parent
        if parent is not None and parent.parent is not None:
            holders[parent.serial] = holders.get(parent.serial, 0) + holders[node.serial]
    return holders


def _held_nodes(cache: PrefixCache, limit: int) -> dict[int, RadixNode]:
    """Nodes that sequences hold, whole paths, as many as may be."""
    chosen: dict[int, RadixNode] = {}
    for sequence in cache.sequences.values():
        path = []
        node = sequence.node
        while node is not None and node.parent is not None and node.serial not in chosen:
            path.append(node)
            node = node.parent
        if len(chosen) + len(path) <= limit:
            chosen.update((node.serial, node) for node in path)
    return chosen


def _add_last_used(cache: PrefixCache, chosen: dict[int, RadixNode], limit: int) -> None:
    """Fill up with the nodes used last: no node was used later than the one above it."""
    heap: list[tuple[int, int, RadixNode]] = []

    def push(parent: RadixNode) -> None:
        children: Iterable[RadixNode] = parent.children or ()
        if parent.children is not None and len(parent.children) > limit:
            children = heapq.nlargest(limit, children, key=lambda child: child.last_used)
        for child in children:
            heapq.heappush(heap, (-child.last_used, child.serial, child))

    for root in cache.tree.roots.values():
        push(root)
    while heap:
        _, serial, node = heapq.heappop(heap)
        if serial not in chosen:
            if len(chosen) >= limit:
                # Held nodes may lie further on, but they are there already.
                return
            chosen[serial] = node
        if node.children is not None:
            push(node)


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
