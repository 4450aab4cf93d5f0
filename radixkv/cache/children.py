"""Children: the container that finds the next run below a node."""

from __future__ import annotations

from collections.abc import Iterator

from sortedcontainers import SortedKeyList

from radixkv.cache.hashing import TOKEN_BYTES, BlockHash, common_prefix
from radixkv.cache.node import RadixNode

# Up to this many children that begin alike are compared one by one; more are kept in order.
SCAN_LIMIT = 8


class Children:
    """The children of one node, found by the hash of their first block and told apart by tokens.

    A child whose only block is open has no full first block: it is found by likeness alone, as is
    the child that shares the longest part of a block with a sequence that diverges inside it.
    """

    __slots__ = ("_alike", "_block_bytes", "_block_hash", "_by_hash", "_collided", "_num_open")

    def __init__(self, block_bytes: int, block_hash: BlockHash) -> None:
        self._block_bytes = block_bytes
        self._block_hash = block_hash
        self._by_hash: dict[int, RadixNode] = {}
        self._collided: list[RadixNode] = []
        self._num_open = 0
        # By their first token: only these can share a part of a block.
        self._alike: dict[bytes, list[RadixNode] | SortedKeyList] = {}

    def __len__(self) -> int:
        return len(self._by_hash) + len(self._collided) + self._num_open

    def __iter__(self) -> Iterator[RadixNode]:
        for alike in self._alike.values():
            yield from alike

    def _first(self, node: RadixNode) -> bytes:
        return bytes(node.tokens[: self._block_bytes])

    @property
    def has_open(self) -> bool:
        """Whether any child's only block is open."""
        return self._num_open > 0

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
        candidates = self._alike.get(first_block[:TOKEN_BYTES], ())
        if isinstance(candidates, SortedKeyList):
            place = candidates.bisect_key_left(first_block)
            candidates = candidates[max(place - 1, 0) : place + 1]
        best, best_common = None, 0
        for node in candidates:
            common = common_prefix(node.tokens, first_block)
            if common > best_common:
                best, best_common = node, common
        return best, best_common

    def add(self, node: RadixNode) -> None:
        """Add a child whose first block differs from every other child's; O(log n)."""
        first = self._first(node)
        if len(first) < self._block_bytes:
            self._num_open += 1
        elif self._by_hash.setdefault(self._block_hash(first), node) is not node:
            self._collided.append(node)
        token = first[:TOKEN_BYTES]
        alike = self._alike.get(token)
        if alike is None:
            self._alike[token] = [node]
        elif isinstance(alike, SortedKeyList):
            alike.add(node)
        else:
            alike.append(node)
            if len(alike) > SCAN_LIMIT:
                self._alike[token] = SortedKeyList(alike, key=self._first)

    def remove(self, node: RadixNode) -> None:
        """Take a child out; its tokens must be those it was added with. O(log n)."""
        first = self._first(node)
        token = first[:TOKEN_BYTES]
        alike = self._alike[token]
        alike.remove(node)
        if not alike:
            del self._alike[token]
        if len(first) < self._block_bytes:
            self._num_open -= 1
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
