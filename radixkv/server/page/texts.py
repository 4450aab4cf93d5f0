"""What tokens say: labels, kept while they are shown, and the tokens of one node, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE
from radixkv.server.page.snapshot import LABEL_TOKENS, Snapshot

LABEL_CHARACTERS = 64
# A character may be spread over so many tokens.
MOST_TOKENS_A_CHARACTER = 6
UNFINISHED = "�"

Decode = Callable[[list[int]], str]


def token_ids(data: bytes | bytearray) -> list[int]:
    """The ids of packed tokens."""
    ids: list[int] = np.frombuffer(data, TOKEN_DTYPE).tolist()
    return ids


class Labels:
    """The beginnings of nodes' texts and the ends of holders', decoded once while they stand."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[bytes, str] = {}
        self._before: dict[bytes, str] = {}

    def of(self, data: bytes, *, end: bool = False) -> str:
        """The text of some tokens, or of its end, on one line."""
        text = self._known.get(data)
        if text is None:
            text = self._before.get(data)
            if text is None:
                text = self._decode(token_ids(data)).replace("\n", "⏎")
            self._known[data] = text
        return text[-LABEL_CHARACTERS:] if end else text[:LABEL_CHARACTERS]

    def turn(self) -> None:
        """A snapshot is done: what neither it nor the one before asked for is forgotten."""
        self._before, self._known = self._known, {}


def spell(ids: list[int], decode: Decode) -> list[tuple[str, int]]:
    """Each text with the number of tokens it takes: one, unless a character needs more."""
    pieces = []
    place = 0
    while place < len(ids):
        count = 1
        text = decode(ids[place : place + 1])
        while UNFINISHED in text and count < min(MOST_TOKENS_A_CHARACTER, len(ids) - place):
            count += 1
            longer = decode(ids[place : place + count])
            if UNFINISHED not in longer:
                text = longer
                break
        else:
            count = 1
        pieces.append((text, count))
        place += count
    return pieces


def describe(snapshot: Snapshot, labels: Labels) -> dict[str, Any]:
    """A snapshot as the page reads it, with texts."""
    places = {space: place for place, space in enumerate(snapshot.spaces)}
    tree = {
        "nodes": snapshot.nodes,
        "texts": [labels.of(head) for head in snapshot.heads],
        "used": snapshot.used_at,
    }
    holders = [
        {
            "key": its.key,
            "name": its.name,
            "kind": its.kind,
            "space": places.setdefault(its.namespace, len(places)),
            "node": its.ends_at,
            "tokens": its.num_tokens,
            "computed": its.num_computed,
            "blocks": its.num_blocks,
            "own": its.num_own,
            "generated": its.num_generated,
            "text": labels.of(its.tail, end=True) if its.text is None else its.text[-80:],
        }
        for its in snapshot.holders
    ]
    removals = [
        {
            "number": its.number,
            "at": round(its.at, 2),
            "unused": round(its.unused_for, 2),
            "reason": its.removal.reason,
            "blocks": its.removal.num_blocks,
            "tokens": len(its.removal.tokens) // TOKEN_BYTES,
            "start": its.removal.start,
            "hits": its.removal.hits,
            "ephemeral": its.removal.retention.ephemeral,
            "text": labels.of(its.removal.tokens[: LABEL_TOKENS * TOKEN_BYTES]),
        }
        for its in snapshot.removals
    ]
    labels.turn()
    return {
        "tree": {"spaces": ["/".join(space) for space in places], **tree},
        "holders": {
            "holders": holders,
            "num_holders": snapshot.num_holders,
            "waiting": snapshot.waiting,
            "num_waiting": snapshot.num_waiting,
            "num_running": snapshot.num_running,
        },
        "pool": snapshot.pool,
        "stats": snapshot.stats,
        "removals": {"removals": removals},
    }
