"""Match: the longest cached prefix of some tokens. Looking neither splits nor touches anything."""

from __future__ import annotations

from array import array

from radixkv.cache.hashing import TOKEN_BYTES, common_prefix_at
from radixkv.cache.node import RadixNode
from radixkv.cache.pool import BlockIds


class Match:
    """The longest cached prefix of some tokens.

    Attributes
    ----------
    node : RadixNode or None
        The deepest node with a matched full block; None if there is none.
    node_blocks : int
        Full blocks matched inside ``node``.
    num_blocks : int
        Full blocks matched in all.
    source, source_tokens : RadixNode or None, int
        Where the next block's first ``source_tokens`` tokens can be copied from.
    source_block : int
        The physical block to copy from; -1 for none.
    source_whole : bool
        Whether the match reaches the end of ``source``, an open block that is used to its end.
    """

    __slots__ = (
        "node",
        "node_blocks",
        "num_blocks",
        "source",
        "source_block",
        "source_tokens",
        "source_whole",
    )

    def __init__(self) -> None:
        self.node: RadixNode | None = None
        self.node_blocks = 0
        self.num_blocks = 0
        self.source: RadixNode | None = None
        self.source_tokens = 0
        self.source_block = -1
        self.source_whole = False

    def forget_source(self) -> None:
        """Keep the full blocks alone."""
        self.source, self.source_block = None, -1
        self.source_tokens, self.source_whole = 0, False

    def blocks(self) -> BlockIds[int]:
        """The matched blocks, from where the match began; int32 (num_blocks,)."""
        node, left = self.node, self.num_blocks
        if node is None:
            return array("i")
        blocks = node.blocks[: self.node_blocks]
        while len(blocks) < left:
            node = node.parent
            assert node is not None
            blocks = node.blocks + blocks
        return blocks

    def num_unpinned(self) -> int:
        """Matched blocks that nobody holds yet; O(unpinned nodes on the path)."""
        if self.node is None or self.node.pins:
            return 0
        count, above = self.node_blocks, self.node.parent
        while above is not None and not above.pins:
            count += len(above.blocks)
            above = above.parent
        return count


def longest_match(
    node: RadixNode | None, data: bytes | bytearray, offset: int, block_bytes: int
) -> Match:
    """The longest cached continuation of ``node`` along ``data[offset:]``.

    O(edges on the path) comparisons by memcmp.

    Parameters
    ----------
    node : RadixNode or None
        Where to begin: a root, or the node at the end of whose full blocks ``offset`` stands.
    data : bytes
        Tokens as from `token_bytes`.
    offset : int
        Bytes of ``data`` that lead to the end of ``node``; whole blocks.
    block_bytes : int
        Bytes in a block.
    """
    match = Match()
    size = len(data)
    while node is not None and offset < size:
        children = node.children
        if children is None:
            _match_open_end(match, node, data, offset, block_bytes)
            break
        first = bytes(data[offset : offset + block_bytes])
        child = children.find(first) if len(first) == block_bytes else None
        if child is None:
            source, common = children.closest(first)
            if source is not None:
                match.source, match.source_block = source, source.blocks[0]
                match.source_tokens = common
                match.source_whole = common * TOKEN_BYTES == len(source.tokens)
            break
        run = child.tokens
        length = len(run)
        if data.startswith(run, offset):
            common = length
        elif size - offset < length and run.startswith(data[offset:]):
            common = size - offset
        else:
            common = common_prefix_at(data, offset, run) * TOKEN_BYTES
        matched = common // block_bytes
        match.node, match.node_blocks = child, matched
        match.num_blocks += matched
        rest = common - matched * block_bytes
        if rest:
            match.source, match.source_block = child, child.blocks[matched]
            match.source_tokens = rest // TOKEN_BYTES
            match.source_whole = common == length
        if rest or common < length:
            break
        node = child
        offset += length
    return match


def _match_open_end(
    match: Match, node: RadixNode, data: bytes | bytearray, offset: int, block_bytes: int
) -> None:
    """What follows the full blocks of a leaf: its open block, if it has one."""
    cut = len(node.tokens) - len(node.tokens) % block_bytes
    open_tokens = node.tokens[cut:]
    common = common_prefix_at(data, offset, open_tokens)
    if common:
        match.source, match.source_block = node, node.blocks[-1]
        match.source_tokens = common
        match.source_whole = common * TOKEN_BYTES == len(open_tokens)
