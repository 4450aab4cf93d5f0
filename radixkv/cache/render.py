"""The tree as text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE
from radixkv.cache.node import RadixNode
from radixkv.cache.tree import RadixTree

TokensToText = Callable[[list[int]], str]

PREVIEW_TOKENS = 12


def render_tree(tree: RadixTree, decode: TokensToText | None = None) -> str:
    """A line a node: tokens, blocks, how many sequences hold it, hits, and a preview.

    Parameters
    ----------
    tree : RadixTree
    decode : callable, optional
        Token ids -> text, for the preview; token ids are shown without it.
    """
    holders = count_holders(tree)
    lines = []
    for namespace, root in tree.roots.items():
        lines.append("root" + (f" {'/'.join(namespace)}" if namespace else ""))
        stack = [(child, "", last) for child, last in _youngest_first(root)]
        while stack:
            node, indent, last = stack.pop()
            branch = "└─ " if last else "├─ "
            lines.append(indent + branch + _describe(node, holders[node.serial], decode))
            below = indent + ("   " if last else "│  ")
            stack += [(child, below, youngest) for child, youngest in _youngest_first(node)]
    return "\n".join(lines) if lines else "(empty)"


def count_holders(tree: RadixTree) -> dict[int, int]:
    """Sequences whose tables hold a node's first block, by the node's serial; O(nodes)."""
    holders: dict[int, int] = {}
    for node in reversed(list(tree.nodes())):
        if tree.num_full(node):
            below = [child for child in node.children or () if child.pins]
            holders[node.serial] = node.pins + sum(holders[child.serial] - 1 for child in below)
        else:
            holders[node.serial] = tree.pool.refs[node.blocks[0]] - 1
    return holders


def _youngest_first(node: RadixNode) -> list[tuple[RadixNode, bool]]:
    """A node's children, the youngest first, and whether each is the youngest."""
    children = sorted(node.children or (), key=lambda child: child.created, reverse=True)
    return [(child, index == 0) for index, child in enumerate(children)]


def _describe(node: RadixNode, holders: int, decode: TokensToText | None) -> str:
    tokens = np.frombuffer(node.tokens[: PREVIEW_TOKENS * TOKEN_BYTES], TOKEN_DTYPE)
    preview = repr(decode(tokens.tolist())) if decode else " ".join(map(str, tokens))
    more = "…" if len(node.tokens) > PREVIEW_TOKENS * TOKEN_BYTES else ""
    mark = " ephemeral" if node.retention.ephemeral else ""
    return (
        f"{len(node.tokens) // TOKEN_BYTES} tokens in {len(node.blocks)} blocks, "
        f"held by {holders}, hits {node.hits}{mark}: {preview}{more}"
    )
