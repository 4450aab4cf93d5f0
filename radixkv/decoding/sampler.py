"""Logits to tokens, for a whole batch at once.

A row's token depends on its own logits, parameters, seed, branch and position, and on nothing
else: not on its batch mates, their order, or what was sampled before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.decoding.apply import apply_edits
from radixkv.decoding.draw import draw
from radixkv.decoding.edits import LogitEdits
from radixkv.decoding.filters import Filters, weigh
from radixkv.decoding.grammar import forbid_all_but
from radixkv.decoding.logprobs import TokenLogprobs, describe
from radixkv.decoding.params import SamplingParams
from radixkv.decoding.rng import uniforms
from radixkv.decoding.rowwise import argmax
from radixkv.decoding.vocabulary import Mask


class SamplingRow(NamedTuple):
    """What the sampler must know of one row of logits.

    Parameters
    ----------
    params : SamplingParams
    seed : int
        In [0, 2**64): what `resolve_seed` made of ``params.seed``, once a request.
    branch : int
        Which of the request's continuations this is, from 0.
    position : int
        Index, in its sequence, of the token that is being sampled.
    banned : sequence of int
        Tokens that must not be sampled; ids outside the vocabulary are ignored.
    edits : LogitEdits or None
        Of this continuation: what its parameters change in the logits; None for nothing.
    allowed : (words,) int32 or None
        The tokens that its grammar allows, packed; see `GrammarState`. None for all.
    """

    params: SamplingParams
    seed: int = 0
    branch: int = 0
    position: int = 0
    banned: Sequence[int] = ()
    edits: LogitEdits | None = None
    allowed: Mask | None = None

    @property
    def edited(self) -> bool:
        """Whether anything is changed in its logits before a token is chosen."""
        return len(self.banned) > 0 or self.edits is not None or self.allowed is not None


class SamplingBatch:
    """Rows of one batch of logits, and what the sampler works out of them once.

    Rows whose logits are not edited are the same at every step but for their positions, so their
    batch can be kept.

    Attributes
    ----------
    rows : list of SamplingRow
    positions : (rows,) int array
        What stands in the rows at first, and may be replaced then.
    greedy, edited : (rows,) bool
    asked : list of int
        Rows whose log-probabilities are asked for.
    plain : bool
        Whether the largest logit is all that is asked for.
    """

    __slots__ = (
        "_filters",
        "asked",
        "branches",
        "edited",
        "greedy",
        "plain",
        "positions",
        "rows",
        "seeds",
    )

    def __init__(self, rows: Sequence[SamplingRow]) -> None:
        self.rows = list(rows)
        self.greedy = np.array([row.params.greedy for row in rows], bool)
        self.edited = np.array([row.edited for row in rows], bool)
        self.asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._filters: tuple[NDArray[np.int64], Filters] | None = None
        self.plain = bool(self.greedy.all()) and not self.edited.any() and not self.asked
        self.seeds = np.array([row.seed for row in rows], np.uint64)
        self.branches = np.array([row.branch for row in rows], np.uint64)
        self.positions: NDArray[np.integer[Any]] = np.array([r.position for r in rows], np.uint64)

    def __len__(self) -> int:
        return len(self.rows)

    def filters(self, index: NDArray[np.int64]) -> Filters:
        """Of the rows at ``index``; kept for the next time."""
        if self._filters is None or not np.array_equal(self._filters[0], index):
            self._filters = index, Filters([self.rows[i].params for i in index.tolist()])
        return self._filters[1]


class SampledTokens(NamedTuple):
    """One token a row.

    Parameters
    ----------
    token_ids : (rows,) int64
        −1 where the row is not valid.
    valid : (rows,) bool
        False where the logits hold a NaN or +inf, or leave no token to choose.
    exhausted : (rows,) bool
        True where only the row's own edits are to blame for that: they forbid every token.
    logprobs : list of TokenLogprobs or None
        One a row; None for rows that did not ask, or are not valid.
    """

    token_ids: NDArray[np.int64]
    valid: NDArray[np.bool_]
    exhausted: NDArray[np.bool_]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, rows: Sequence[SamplingRow] | SamplingBatch) -> SampledTokens:
    """Choose the next token of every row.

    First come a row's edits: its grammar, allowed tokens, bad words and banned tokens, biases,
    penalties (see `forbid_all_but` and `apply_edits`). Greedy rows then cost one argmax. Rows that
    sample are filtered in the order temperature, top_k, top_p, min_p, and draw one counter-based
    uniform number each.

    Parameters
    ----------
    logits : (rows, vocab) of any float dtype, on any device
        The model's own; not changed. Computed with in float32.
    rows : sequence of SamplingRow, or SamplingBatch
        One a row of ``logits``.

    Returns
    -------
    SampledTokens
        Rows that are not valid never raise, and leave the others untouched.

    Raises
    ------
    ValueError
        If ``logits`` is not (len(rows), vocab) with a vocabulary of at least one token.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows) or logits.shape[1] == 0:
        raise ValueError(f"logits must be ({len(rows)}, vocab), got {tuple(logits.shape)}")
    batch = rows if isinstance(rows, SamplingBatch) else SamplingBatch(rows)
    token_ids, best = argmax(logits)
    sound = np.isfinite(best)
    if batch.plain and sound.all():
        return SampledTokens(token_ids, sound, ~sound, [None] * len(batch))
    return _choose(logits, batch, token_ids, best)


@torch.inference_mode()
def _choose(
    logits: Tensor,
    batch: SamplingBatch,
    token_ids: NDArray[np.int64],
    best: NDArray[np.float64],
) -> SampledTokens:
    """The same, where more is asked for than the largest logit; ``best`` and its place given."""
    sound = np.isfinite(best)
    valid = sound.copy()
    if len(index := np.flatnonzero(batch.greedy & batch.edited & valid)):
        token_ids[index], best[index] = argmax(_edit(logits, batch, index))
        valid &= np.isfinite(best)
    if len(index := np.flatnonzero(~batch.greedy & valid)):
        weights = weigh(_edit(logits, batch, index), batch.filters(index))
        keys = (batch.seeds[index], batch.branches[index], batch.positions[index])
        token_ids[index] = draw(weights, uniforms(*keys))
        valid &= token_ids >= 0
    token_ids[~valid] = -1
    return SampledTokens(token_ids, valid, sound & ~valid, _logprobs(logits, batch, token_ids))


def _edit(logits: Tensor, batch: SamplingBatch, index: NDArray[np.int64]) -> Tensor:
    """Copy the rows at ``index`` to float32 and change each as its request says."""
    if len(index) == len(batch):
        copy = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    else:
        copy = logits[torch.from_numpy(index).to(logits.device)].float()
    if not batch.edited[index].any():
        return copy
    chosen = [batch.rows[i] for i in index.tolist()]
    masks = [(place, row.allowed) for place, row in enumerate(chosen) if row.allowed is not None]
    if masks:
        forbid_all_but(copy, masks)
    if any(len(row.banned) or row.edits is not None for row in chosen):
        apply_edits(copy, [row.edits for row in chosen], [row.banned for row in chosen])
    return copy


def _logprobs(
    logits: Tensor, batch: SamplingBatch, token_ids: NDArray[np.int64]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of the raw logits, for the valid rows that asked for them."""
    found: list[TokenLogprobs | None] = [None] * len(batch)
    asked = [i for i in batch.asked if token_ids[i] >= 0]
    if asked:
        index = torch.tensor(asked, device=logits.device)
        table = logits[index].float().log_softmax(dim=-1).cpu().numpy()
        for i, line in zip(asked, table, strict=True):
            found[i] = describe(line, int(token_ids[i]), batch.rows[i].params.logprobs or 0)
    return found
