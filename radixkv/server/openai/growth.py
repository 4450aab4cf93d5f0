"""Growth: what one continuation has got since somebody looked, however many steps that were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from radixkv.decoding.logprobs import TokenLogprobs
from radixkv.server.answer import Piece


@dataclass(slots=True)
class Growth:
    """New text, tokens and perhaps the end of a continuation.

    Attributes
    ----------
    logprobs : list of (token id, TokenLogprobs)
        Where they were asked for.
    """

    index: int
    text: str = ""
    num_tokens: int = 0
    ending: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        delta = piece.delta
        self.text += delta.text
        self.ending = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if delta.token_id >= 0:
            self.num_tokens += 1
            if piece.logprobs is not None:
                self.logprobs.append((delta.token_id, piece.logprobs))


def growths(pieces: Sequence[Piece]) -> list[Growth]:
    """One for each continuation that has grown; none for those that failed."""
    found: dict[int, Growth] = {}
    for piece in pieces:
        index = piece.delta.index
        growth = found.get(index)
        if growth is None:
            growth = found[index] = Growth(index)
        growth.add(piece)
    return [growth for growth in found.values() if growth.ending != "error"]
