"""What was generated in a context, as far as its client knows: all of it came this way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from radixkv.errors import ContextError


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A place to come back to; made by `Context.checkpoint`."""

    name: str
    num_pieces: int
    num_logprobs: int


@dataclass(slots=True)
class Said:
    """Texts and log-probabilities of generations, and the places to go back to.

    Attributes
    ----------
    pieces : list of str
    logprobs : list of float
    inherited : (int, int)
        How many of each were there when it branched off.
    """

    pieces: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    inherited: tuple[int, int] = (0, 0)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    serial: int = 0

    def branch(self) -> Said:
        """An independent copy, which goes on by itself."""
        return Said(self.pieces.copy(), self.logprobs.copy(), self._size())

    def become(self, winner: Said) -> None:
        """Say what a branch says; checkpoints stay good."""
        self.pieces, self.logprobs = winner.pieces.copy(), winner.logprobs.copy()

    def add(self, text: str, logprobs: Iterable[float]) -> None:
        """Something was generated."""
        self.pieces.append(text)
        self.logprobs += logprobs

    def mark(self) -> Checkpoint:
        """A new checkpoint."""
        place = Checkpoint(f"mark-{self.serial}", *self._size())
        self.serial += 1
        self.checkpoints.append(place)
        return place

    def rewind(self, place: Checkpoint | None) -> Checkpoint:
        """Forget what came after a checkpoint, the last one if None; the one it was."""
        if place is None and self.checkpoints:
            place = self.checkpoints[-1]
        if place is None or place not in self.checkpoints:
            raise ContextError("there is no such checkpoint in this context; make one first")
        del self.checkpoints[self.checkpoints.index(place) + 1 :]
        del self.pieces[place.num_pieces :]
        del self.logprobs[place.num_logprobs :]
        return place

    def _size(self) -> tuple[int, int]:
        return len(self.pieces), len(self.logprobs)
