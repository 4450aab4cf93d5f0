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
    lines = []
    for namespace, root in tree.roots.items():
        lines.append("root" + (f" {'/'.join(namespace)}" if namespace else ""))
        children = sorted(root.children or (), key=lambda node: node.created)
        for child in children:
            _render(tree, child, "", child is children[-1], decode, lines)
    return "\n".join(lines) if lines else "(empty)"


def _render(
    tree: RadixTree,
    node: RadixNode,
    indent: str,
    last: bool,
    decode: TokensToText | None,
    lines: list[str],
) -> None:
    lines.append(f"{indent}{'└─ ' if last else '├─ '}{_describe(tree, node, decode)}")
    indent += "   " if last else "│  "
    children = sorted(node.children or (), key=lambda child: child.created)
    for child in children:
        _render(tree, child, indent, child is children[-1], decode, lines)


def _describe(tree: RadixTree, node: RadixNode, decode: TokensToText | None) -> str:
    tokens = np.frombuffer(bytes(node.tokens[: PREVIEW_TOKENS * TOKEN_BYTES]), TOKEN_DTYPE)
    preview = repr(decode(tokens.tolist())) if decode else " ".join(map(str, tokens))
    more = "…" if len(node.tokens) > PREVIEW_TOKENS * TOKEN_BYTES else ""
    mark = " ephemeral" if node.retention.ephemeral else ""
    return (
        f"{len(node.tokens) // TOKEN_BYTES} tokens in {len(node.blocks)} blocks, "
        f"held by {tree.num_holders(node)}, hits {node.hits}{mark}: {preview}{more}"
    )
