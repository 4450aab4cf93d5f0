"""Where each prompt leaves all that came before it, and which of those goes on most like it.

Prompts are put into a radix tree one by one. What a cache without bounds would share is the path a
prompt has in common with the tree; where it leaves, its siblings are the prompts that share exactly
this path. The likest of them is the one with which it has the most windows of tokens in common
behind that place, wherever they stand.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
_ODD = 0x9E3779B97F4A7C15


def common_length(left: Tokens, right: Tokens) -> int:
    """How many tokens two begin with in common."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def windows(tokens: Tokens, width: int) -> npt.NDArray[np.uint64]:
    """A hash of every window of so many tokens; uint64 (num_tokens - width + 1,)."""
    count = len(tokens) - width + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_ODD)
    mixed ^= mixed >> np.uint64(29)
    found = np.zeros(count, np.uint64)
    for place in range(width):
        found = found * np.uint64(0xD6E8FEB86659FD93) + mixed[place : place + count]
    return found


@dataclass(slots=True)
class _Node:
    tokens: Tokens
    first: int  # The prompt that made it.
    children: dict[int, _Node] = field(default_factory=dict)
    # Of prompts that leave here: who had a window first.
    owners: dict[int, int] = field(default_factory=dict)


class Divergence:
    """The tree of all prompts so far.

    Parameters
    ----------
    width : int
        Tokens of a window.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._root = _Node(np.zeros(0, np.int64), -1)
        self._prompts: list[Tokens] = []

    def add(self, tokens: Tokens) -> tuple[int, int | None]:
        """Add the next prompt.

        Returns
        -------
        shared : int
            How many of its tokens some earlier prompt begins with.
        likest : int or None
            The number of the sibling that goes on most like it, if any does.
        """
        number = len(self._prompts)
        self._prompts.append(tokens)
        node, place = self._root, 0
        while place < len(tokens):
            child = node.children.get(int(tokens[place]))
            if child is None:
                likest = None
                if node.children:
                    likest = self._likest(node, tokens, place, number)
                else:
                    self._own(node, number, place)
                node.children[int(tokens[place])] = _Node(tokens[place:], number)
                return place, likest
            equal = common_length(child.tokens, tokens[place:])
            place += equal
            if equal == len(child.tokens):
                node = child
            elif place < len(tokens):
                node.children[int(child.tokens[0])] = above = _Node(
                    child.tokens[:equal], child.first
                )
                above.children[int(child.tokens[equal])] = child
                child.tokens = child.tokens[equal:]
                self._own(above, child.first, place)
                node = above
        return place, None

    def _own(self, node: _Node, number: int, place: int) -> None:
        for each in windows(self._prompts[number][place:], self._width).tolist():
            node.owners.setdefault(each, number)

    def _likest(self, node: _Node, tokens: Tokens, place: int, number: int) -> int | None:
        hashes = windows(tokens[place:], self._width).tolist()
        votes = Counter(node.owners[each] for each in hashes if each in node.owners)
        best = max(votes, key=lambda each: (votes[each], -each), default=None)
        # Who is mostly like an earlier one would bring nothing new to compare with.
        if best is None or votes[best] < len(hashes) / 2:
            for each in hashes:
                node.owners.setdefault(each, number)
        return best


def next_run(left: Tokens, right: Tokens, place: int, width: int) -> tuple[int, int, int] | None:
    """What is equal next, behind a difference at ``place`` of both.

    Returns
    -------
    (left, right, length) or None
        Where the run begins in both, and its length of at least ``width``; the first window of the
        left one that occurs in the right one, drawn out to both sides.
    """
    where: dict[int, int] = {}
    for offset, each in enumerate(windows(right[place:], width).tolist()):
        where.setdefault(each, place + offset)
    for offset, each in enumerate(windows(left[place:], width).tolist()):
        there = where.get(each)
        if there is None:
            continue
        here = place + offset
        if not np.array_equal(left[here : here + width], right[there : there + width]):
            continue
        while here > place and there > place and left[here - 1] == right[there - 1]:
            here, there = here - 1, there - 1
        return here, there, common_length(left[here:], right[there:])
    return None
