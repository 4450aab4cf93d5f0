"""Beam search over log-probabilities: which beams go on, which sequences have ended.

The search is the one of transformers' ``generate(num_beams=...)`` (version 5), written from its
definition. It knows tokens and scores, nothing of models or blocks. Scores are summed and divided
in float32, as there, so that ties and rounding fall the same way.

Penalties, biases and bans change the log-probabilities, not the logits, and nothing is normalised
after them: what is summed up is what they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.decoding.apply import apply_edits
from radixkv.decoding.beam_params import BeamSearchParams
from radixkv.decoding.edits import LogitEdits
from radixkv.decoding.likeliest import likeliest
from radixkv.decoding.logprobs import TokenLogprobs, describe


class Candidates(NamedTuple):
    """The best next tokens of one beam, in order; of equally good ones the lower id first.

    Parameters
    ----------
    token_ids : (k,) int64
        Empty if nothing may follow.
    scores : (k,) float32
        Log-probabilities after the beam's edits.
    logprobs : (k,) float32
        The model's own.
    details : tuple of TokenLogprobs
        One a token if they were asked for, else empty.
    """

    token_ids: NDArray[np.int64]
    scores: NDArray[np.float32]
    logprobs: NDArray[np.float32]
    details: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of generated tokens.

    Attributes
    ----------
    total : float
        Sum of its tokens' log-probabilities after edits: by this it is ranked.
    parent : int
        Place, among the running beams of the step before, of the one that it continues.
    logprob : float
        Sum of its tokens' log-probabilities as the model gave them.
    details : tuple of TokenLogprobs
        One a token if they were asked for, else empty.
    """

    token_ids: tuple[int, ...] = ()
    total: float = 0.0
    parent: int = 0
    logprob: float = 0.0
    details: tuple[TokenLogprobs, ...] = ()


class Hypothesis(NamedTuple):
    """A sequence that has ended; ``score`` is its total after the length penalty."""

    beam: Beam
    score: float


@torch.inference_mode()
def propose(
    logits: Tensor,
    k: int,
    *,
    edits: Sequence[LogitEdits | None] = (),
    banned: Sequence[int] = (),
    top: int | None = None,
) -> list[Candidates | None]:
    """The ``k`` best next tokens of each beam.

    Parameters
    ----------
    logits : (beams, vocab) of any float dtype, on any device
        Not changed. Computed with in float32.
    k : int
        More than there are possible tokens means all of these.
    edits : sequence of LogitEdits or None
        One a beam, or none at all: what they do is done to log-probabilities.
    banned : sequence of int
        Tokens that must come behind no beam; the others' log-probabilities stay as they are.
    top : int or None
        What ``details`` lists beside each token; None for no details.

    Returns
    -------
    list of Candidates or None
        None where the logits hold a NaN or +inf, or are all -inf.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    scores = logprobs
    if banned or any(its is not None for its in edits):
        scores = logprobs.clone(memory_format=torch.contiguous_format)
        apply_edits(scores, edits, [banned] * len(scores))
    rows = zip(logprobs.cpu().numpy(), scores.cpu().numpy(), strict=True)
    return [_propose(own, edited, k, top) for own, edited in rows]


def _propose(
    own: NDArray[np.float32], edited: NDArray[np.float32], k: int, top: int | None
) -> Candidates | None:
    # Whatever is wrong with one logit makes the whole line NaN.
    if np.isnan(own.max()):
        return None
    found = likeliest(edited, k)
    details = () if top is None else tuple(describe(own, token, top) for token in found.tolist())
    return Candidates(found, edited[found], own[found], details)


class BeamSearch:
    """One prompt's search, step by step.

    Parameters
    ----------
    params : BeamSearchParams
    end_tokens : collection of int
        Tokens that end a sequence.
    max_new_tokens : int
        ``params.max_tokens``, or less if the model's context leaves less.

    Attributes
    ----------
    running : list of Beam
        Best first; one empty beam before the first step. Fewer than ``beam_width`` only where
        the vocabulary, bans or stop strings leave no more.
    finished : list of Hypothesis
        The best that have ended, best first, at most ``beam_width``.
    done : bool
        Whether nothing that runs is to be continued.
    """

    def __init__(
        self, params: BeamSearchParams, *, end_tokens: Collection[int], max_new_tokens: int
    ) -> None:
        self.params = params
        self.end_tokens = frozenset(end_tokens)
        self.max_new_tokens = max_new_tokens
        self.running = [Beam()]
        self.finished: list[Hypothesis] = []
        self.done = False

    @property
    def num_tokens(self) -> int:
        """Tokens of each running beam."""
        return len(self.running[0].token_ids)

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: enough that ``beam_width`` are left if all others end."""
        return max(2, 1 + len(self.end_tokens)) * self.params.beam_width

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Tokens that must not come next: those that end, until min_tokens are there."""
        return tuple(self.end_tokens) if self.num_tokens < self.params.min_tokens else ()

    def advance(
        self, candidates: Sequence[Candidates], stops: Callable[[Beam], bool] | None = None
    ) -> None:
        """Continue every running beam by one token, and keep the best.

        Parameters
        ----------
        candidates : sequence of Candidates
            One a running beam, in their order, each of ``num_candidates`` tokens or all there are.
        stops : callable, optional
            Whether a beam ends by what its last token completes: a stop string, say. Asked only
            of beams that nothing else ends, best first, and until it is clear who goes on.

        Raises
        ------
        ValueError
            If the search is done, or the number of candidates is not that of the running beams.
        """
        if self.done or len(candidates) != len(self.running):
            raise ValueError(
                f"{len(candidates)} beams were proposed, {len(self.running)} are running"
                + (", and the search is done" if self.done else "")
            )
        width, length = self.params.beam_width, self.num_tokens + 1
        going: list[Beam] = []
        ended: list[Hypothesis] = []
        for place, beam in enumerate(self._best(candidates)):
            if place >= width and len(going) >= width:
                break
            ends = length == self.max_new_tokens or beam.token_ids[-1] in self.end_tokens
            if not ends and not (stops is not None and stops(beam)):
                going.append(beam)
            # Who ends among the others is no result: they are looked at only to go on from.
            elif place < width:
                ended.append(Hypothesis(beam, self._score(beam.total, length)))
        ranked = sorted(self.finished + ended, key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[:width]
        self.running = going[:width]
        self.done = not self.running or not self._can_improve(length)

    def _best(self, candidates: Sequence[Candidates]) -> list[Beam]:
        """The best continuations of all beams together, best first."""
        totals = np.concatenate(
            [
                np.float32(beam.total) + proposed.scores
                for beam, proposed in zip(self.running, candidates, strict=True)
            ]
        )
        places = [
            (parent, rank)
            for parent, proposed in enumerate(candidates)
            for rank in range(len(proposed.token_ids))
        ]
        beams = []
        for at in np.argsort(-totals, kind="stable")[: self.num_candidates].tolist():
            parent, rank = places[at]
            before, proposed = self.running[parent], candidates[parent]
            beams.append(
                Beam(
                    (*before.token_ids, int(proposed.token_ids[rank])),
                    float(totals[at]),
                    parent,
                    float(np.float32(before.logprob) + proposed.logprobs[rank]),
                    before.details + proposed.details[rank : rank + 1],
                )
            )
        return beams

    def _score(self, total: float, length: int) -> float:
        return float(np.float32(total) / np.float32(length**self.params.length_penalty))

    def _can_improve(self, length: int) -> bool:
        """Whether a running beam may still become one of the results, as ``early_stopping`` asks.

        With False this only guesses where the penalty favours long sequences; see
        https://github.com/huggingface/transformers/pull/20901.
        """
        if len(self.finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            length = self.max_new_tokens
        return self._score(self.running[0].total, length) > self.finished[-1].score
