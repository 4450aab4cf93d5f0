"""The rows of a step that decode, kept from step to step while the same branches go on.

Most steps differ from the one before by a token in each row. What is known of such rows is worked
out once, and by whom it is needed only has to see that they are still the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.cache import Sequence
from radixkv.cache.hashing import TOKEN_BYTES, TOKEN_DTYPE
from radixkv.decoding import SamplingBatch, SamplingRow
from radixkv.engine.request import NOTHING, Branch

Tokens = npt.NDArray[np.int32]


@dataclass(slots=True, eq=False)
class ScheduledRow:
    """One sequence's share of a step.

    Attributes
    ----------
    start, stop : int
        Positions of its queries, half-open.
    computes : bool
        Whether their keys and values are computed and written; what is cached already is a query
        only where its logits are wanted, as behind a prompt that is cached to the end.
    samples : bool
        Whether a token is sampled behind them.
    decodes : bool
        Whether the one query is a token that was sampled in an earlier step.
    logits_from : int
        The first position whose logits are wanted, whether or not a token is sampled behind them.
    """

    branch: Branch
    start: int
    stop: int
    computes: bool = True
    samples: bool = True
    decodes: bool = False
    logits_from: int = NOTHING

    @property
    def num_logits(self) -> int:
        """Queries whose logits are wanted: the last ones."""
        return max(self.stop - self.logits_from, int(self.samples))

    @property
    def num_scored(self) -> int:
        """Logits that are wanted for tokens of the prompt: all but those that are sampled from."""
        return self.num_logits - self.samples

    @property
    def sequence(self) -> Sequence:
        assert self.branch.sequence is not None
        return self.branch.sequence


class Decodes:
    """Branches that go on by one token each, in the order of their rows.

    Attributes
    ----------
    branches : list of Branch
    sequences : list of Sequence
    stops : int64 array (rows,)
        Tokens of each sequence, the one that is now decoded among them.
    turn : int
        For how many steps they have been scheduled.
    tokens : int32 array (rows,)
        The tokens that are decoded.
    searching, ranked : bool
        Whether any of them is a beam, or one of more than are returned.
    """

    def __init__(
        self, branches: list[Branch], sequences: list[Sequence], tokens: Tokens | None
    ) -> None:
        self.branches = branches
        self.sequences = sequences
        self.tokens = _last_tokens(sequences) if tokens is None else tokens
        self.streams = [branch.stream for branch in branches]
        self.request_ids = [branch.request.request_id for branch in branches]
        self.indices = [branch.index for branch in branches]
        self.stops: npt.NDArray[np.int64] = np.array([s.num_tokens for s in sequences], np.int64)
        self.turn = 0
        self.searching = any(branch.request.beams is not None for branch in branches)
        self.ranked = any(branch.request.params.ranked for branch in branches)
        self._kept: SamplingBatch | None = None

    def __len__(self) -> int:
        return len(self.branches)

    def move_on(self, tokens: Tokens | None) -> None:
        """Every branch has another token, behind the one that was decoded; given if known."""
        self.tokens = _last_tokens(self.sequences) if tokens is None else tokens
        self.turn += 1
        self.stops += 1

    @property
    def rows(self) -> list[ScheduledRow]:
        """The rows of the step now scheduled, made anew; O(rows)."""
        return [
            ScheduledRow(branch, stop - 1, stop, decodes=True)
            for branch, stop in zip(self.branches, self.stops.tolist(), strict=True)
        ]

    def sampling(self) -> SamplingBatch:
        """What the sampler must know of the rows; kept while no branch's edits can change."""
        kept = self._kept
        if kept is None:
            pairs = zip(self.branches, self.stops.tolist(), strict=True)
            kept = SamplingBatch([sampling_row(branch, stop) for branch, stop in pairs])
            if not any(row.edited for row in kept.rows):
                self._kept = kept
        kept.positions = self.stops
        return kept


def _last_tokens(sequences: list[Sequence]) -> Tokens:
    last = b"".join([sequence.data[-TOKEN_BYTES:] for sequence in sequences])
    return np.frombuffer(last, TOKEN_DTYPE)


def sampling_row(branch: Branch, position: int) -> SamplingRow:
    """What the sampler must know to choose a branch's token at this position."""
    request, stream = branch.request, branch.stream
    return SamplingRow(
        request.params,
        request.seed,
        branch.index,
        position,
        stream.banned_tokens,
        stream.edits,
        None if stream.grammar is None else stream.grammar.allowed,
    )
