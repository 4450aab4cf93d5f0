"""What a context says and holds, and whether anything can be done with it now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixkv.engine.holds import Hold
from radixkv.errors import ContextBusyError, ContextClosedError
from radixkv.programs.host import Host
from radixkv.programs.pending import Pending
from radixkv.programs.transcript import Transcript
from radixkv.programs.turns import Message


@dataclass(frozen=True, slots=True)
class ContextStats:
    """What a context holds now.

    Attributes
    ----------
    num_tokens, num_computed : int
        All of its tokens, and those whose KV it holds.
    shared_blocks, own_blocks : int
        Blocks that others hold too, and those that only this context does. Both are 0 while a
        generation runs on them, and once they were given up for want of memory.
    """

    num_tokens: int
    num_computed: int
    shared_blocks: int
    own_blocks: int


class ContextView:
    """The part of a context that only looks; see `Context`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.closed = False
        self._hold = Hold()
        self._said = Transcript()
        self._pending: Pending[Any] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of its tokens; those of an unfinished generation come when that is finished."""
        self._settle()
        return tuple(self._said.tokens)

    @property
    def text(self) -> str:
        """All of its tokens as text, special ones among them."""
        self._settle()
        return self.host.decode(self._said.tokens)

    @property
    def generated(self) -> str:
        """What was generated in it since it was opened or forked."""
        self._settle()
        return "".join(self._said.pieces[self._said.inherited[0] :])

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of all tokens sampled since it was opened or forked.

        They are the model's own, before temperature and filters; the tokens that ended a
        generation count, also where they are no text.
        """
        self._settle()
        return tuple(self._said.logprobs[self._said.inherited[1] :])

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was appended as chat turns; the answers between them are not among them."""
        self._settle()
        return tuple(self._said.messages)

    @property
    def stats(self) -> ContextStats:
        """What it holds; O(nodes of the tree above it)."""
        self._settle()
        sequence = self._hold.sequence
        if sequence is None:
            return ContextStats(len(self._said.tokens), 0, 0, 0)
        own = sequence.num_own_blocks
        shared = sequence.num_blocks - own
        return ContextStats(len(self._said.tokens), sequence.num_computed, shared, own)

    def __len__(self) -> int:
        self._settle()
        return len(self._said.tokens)

    # -- one thing at a time ---------------------------------------------------------------------

    def occupy(self, pending: Pending[Any]) -> None:
        """Nothing else can be done with this context until ``pending`` has ended."""
        self._pending = pending

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.settle()
            if self._pending.concluded:
                self._pending = None

    def _check_free(self) -> None:
        """Raise unless it is open and no generation runs on it."""
        self._settle()
        if self.closed:
            raise ContextClosedError("the context was closed or joined; fork or open another")
        if self._pending is not None:
            raise ContextBusyError(
                "a generation of this context is not finished; ask for its result, run or await "
                "it, or cancel it, first"
            )
