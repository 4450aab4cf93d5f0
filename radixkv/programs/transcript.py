"""Transcript: what a context says, token by token, and the places to go back to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.decoding import TokenLogprobs
from radixkv.errors import ContextError
from radixkv.programs.turns import Message


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A place to come back to; made by `Context.checkpoint`."""

    num_tokens: int
    num_pieces: int
    num_logprobs: int
    num_messages: int


class Transcript:
    """Tokens, and of what was generated the texts and log-probabilities.

    Attributes
    ----------
    tokens : array of int32
    pieces : list of str
        The text of each generation.
    logprobs : list of float
        One a sampled token, those that ended a generation among them.
    messages : list of messages
        What was appended as chat turns.
    inherited : (int, int)
        How many pieces and log-probabilities were there when it branched off.
    """

    __slots__ = ("_checkpoints", "inherited", "logprobs", "messages", "pieces", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.pieces: list[str] = []
        self.logprobs: list[float] = []
        self.messages: list[Message] = []
        self.inherited = (0, 0)
        self._checkpoints: list[Checkpoint] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def branch(self) -> Transcript:
        """An independent copy, which goes on by itself; O(tokens), as one memcpy."""
        twin = Transcript()
        twin.tokens = self.tokens[:]
        twin.pieces = self.pieces.copy()
        twin.logprobs = self.logprobs.copy()
        twin.messages = self.messages.copy()
        twin.inherited = (len(self.pieces), len(self.logprobs))
        return twin

    def become(self, winner: Transcript) -> None:
        """Say what a branch says; checkpoints stay good, for it begins as this does."""
        self.tokens = winner.tokens[:]
        self.pieces = winner.pieces.copy()
        self.logprobs = winner.logprobs.copy()
        self.messages = winner.messages.copy()

    def add(self, tokens: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        """Something was generated: the tokens that stay, its text, and all that was sampled."""
        self.tokens.extend(tokens)
        self.pieces.append(text)
        self.logprobs += [entry.logprob for entry in logprobs]

    # -- going back ------------------------------------------------------------------------------

    def mark(self) -> Checkpoint:
        place = Checkpoint(
            len(self.tokens), len(self.pieces), len(self.logprobs), len(self.messages)
        )
        self._checkpoints.append(place)
        return place

    def rewind(self, place: Checkpoint | None) -> None:
        """Forget what came after a checkpoint, the last one if None, and the later ones.

        Raises
        ------
        ContextError
            If the checkpoint is not one of this transcript's.
        """
        if place is None and self._checkpoints:
            place = self._checkpoints[-1]
        if place is None or place not in self._checkpoints:
            raise ContextError("there is no such checkpoint in this context; make one first")
        del self._checkpoints[self._checkpoints.index(place) + 1 :]
        del self.tokens[place.num_tokens :]
        del self.pieces[place.num_pieces :]
        del self.logprobs[place.num_logprobs :]
        del self.messages[place.num_messages :]
