"""What a context is given: texts, token ids, messages; and any of these with their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.programs.turns import Message

Content = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Content whose tokens were found before, on a thread that nobody waits for.

    Whoever appends it answers for its being what `Host.tokens_behind` gives there.

    Parameters
    ----------
    content : str, sequence of int or sequence of messages
    tokens : array of int32
    """

    content: Content
    tokens: array[int]

    @property
    def text(self) -> str:
        """Its text, empty if it was given as tokens."""
        return self.content if isinstance(self.content, str) else ""
