"""Children: the container that finds the next run below a node."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from radixkv.cache.hashing import BlockHash, common_prefix
from radixkv.cache.node import RadixNode

# Up to this many children are compared one by one; above it they are kept in order as well.
SCAN_LIMIT = 8


class Children:
    """The children of one node, found by the hash of their first block and told apart by tokens.

    A child whose only block is open has no full first block: it is found by likeness alone, as is
    the child that shares the longest part of a block with a sequence that diverges inside it.
    """

    __slots__ = ("_block_bytes", "_block_hash", "_by_hash", "_collided", "_open", "_ordered")

    def __init__(self, block_bytes: int, block_hash: BlockHash) -> None:
        self._block_bytes = block_bytes
        self._block_hash = block_hash
        self._by_hash: dict[int, RadixNode] = {}
        self._collided: list[RadixNode] = []
        self._open: list[RadixNode] = []
        self._ordered: SortedKeyList | None = None

    def __len__(self) -> int:
        return len(self._by_hash) + len(self._collided) + len(self._open)

    def __iter__(self) -> Iterator[RadixNode]:
        yield from self._by_hash.values()
        yield from self._collided
        yield from self._open

    def _first(self, node: RadixNode) -> bytes:
        return bytes(node.tokens[: self._block_bytes])

    @property
    def has_open(self) -> bool:
        """Whether any child's only block is open."""
        return bool(self._open)

    def find(self, first_block: bytes) -> RadixNode | None:
        """The child that begins with exactly this full block; O(1)."""
        node = self._by_hash.get(self._block_hash(first_block))
        if node is None or node.tokens.startswith(first_block):
            return node
        for other in self._collided:
            if other.tokens.startswith(first_block):
                return other
        return None

    def closest(self, first_block: bytes) -> tuple[RadixNode | None, int]:
        """The child whose first block shares the most leading tokens, and how many; O(log n).

        In the order of their bytes, neighbours share the longest prefixes; so the answer stands
        next to the place where ``first_block`` would be inserted.
        """
        candidates: Iterator[RadixNode] | list[RadixNode]
        if self._ordered is None:
            candidates = iter(self)
        else:
            place = self._ordered.bisect_key_left(first_block)
            candidates = self._ordered[max(place - 1, 0) : place + 1]
        best, best_common = None, 0
        size = self._block_bytes
        for node in candidates:
            common = common_prefix(node.tokens[:size], first_block)
            if common > best_common:
                best, best_common = node, common
        return best, best_common

    def add(self, node: RadixNode) -> None:
        """Add a child whose first block differs from every other child's; O(log n)."""
        first = self._first(node)
        if len(first) < self._block_bytes:
            self._open.append(node)
        elif self._by_hash.setdefault(self._block_hash(first), node) is not node:
            self._collided.append(node)
        if self._ordered is not None:
            self._ordered.add(node)
        elif len(self) > SCAN_LIMIT:
            self._ordered = SortedKeyList(self, key=self._first)

    def remove(self, node: RadixNode) -> None:
        """Take a child out; its tokens must be those it was added with. O(log n)."""
        first = self._first(node)
        if self._ordered is not None:
            self._ordered.remove(node)
        if len(first) < self._block_bytes:
            self._open.remove(node)
            return
        key = self._block_hash(first)
        if self._by_hash[key] is not node:
            self._collided.remove(node)
            return
        del self._by_hash[key]
        for other in self._collided:
            if self._block_hash(self._first(other)) == key:
                self._collided.remove(other)
                self._by_hash[key] = other
                break
