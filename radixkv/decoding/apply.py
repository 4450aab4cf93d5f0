"""A batch of logits, changed as each row's `LogitEdits` say.

The order is vLLM's:

1. ``allowed_token_ids``: all other tokens are forbidden (so is, before this, what a grammar does
   not allow; see `forbid_all_but`);
2. ``bad_words``, ``bad_words_ids``, a bias of -100, and, while ``min_tokens`` are missing, the
   tokens that stop: these are forbidden;
3. ``logit_bias``: all other biases are added;
4. ``repetition_penalty``, then ``frequency_penalty``, then ``presence_penalty``.

A token that is forbidden once stays forbidden, and penalties see biased logits. Temperature and
filters come after all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.decoding.counts import NO_IDS, Ids
from radixkv.decoding.edits import LogitEdits

# Beyond it float32 rounds some penalties to 0 or infinity, and logits to what is no number.
STRONGEST = 1e30


def apply_edits(
    logits: Tensor, edits: Sequence[LogitEdits | None], banned: Sequence[Sequence[int]]
) -> None:
    """Change each row as its own edits say, all rows at once.

    No row is read or written for another's sake, and each cell's arithmetic is its own, so a row
    comes out the same to the last bit in every batch. Ids outside the vocabulary are ignored.

    Parameters
    ----------
    logits : (rows, vocab) float32, contiguous
        Changed in place.
    edits : sequence of LogitEdits or None
        One a row, or none at all.
    banned : sequence of sequence of int
        One a row: tokens that must not be sampled, besides.
    """
    rows = [(row, its) for row, its in enumerate(edits) if its is not None]
    _allow(logits, [(row, its.rules.allowed) for row, its in rows if its.rules.allowed is not None])
    forbidden = [(row, its.forbidden) for row, its in rows]
    forbidden += [(row, np.array(ids, np.int64)) for row, ids in enumerate(banned) if len(ids)]
    _Cells(logits, forbidden).write(-torch.inf)
    _bias(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_counts(logits, rows)


def _allow(logits: Tensor, allowed: Sequence[tuple[int, Ids]]) -> None:
    if allowed:
        cells = _Cells(logits, allowed)
        kept = cells.read()
        logits[torch.tensor([row for row, _ in allowed], device=logits.device)] = -torch.inf
        cells.write(kept)


def _bias(logits: Tensor, rows: Sequence[tuple[int, LogitEdits]]) -> None:
    biased = [(row, its.rules) for row, its in rows if len(its.rules.biased)]
    if biased:
        cells = _Cells(logits, [(row, rules.biased) for row, rules in biased])
        added = np.concatenate([rules.biases for _, rules in biased])
        cells.write(cells.read() + cells.each(added))


def _penalise_repetition(logits: Tensor, rows: Sequence[tuple[int, LogitEdits]]) -> None:
    penalties: list[float] = []
    seen: list[tuple[int, Ids]] = []
    for row, its in rows:
        penalty = its.rules.params.repetition_penalty
        if penalty != 1 and its.counts is not None:
            penalties.append(min(max(penalty, 1 / STRONGEST), STRONGEST))
            seen.append((row, np.concatenate((its.counts.prompt, its.counts.fresh))))
    if seen:
        cells = _Cells(logits, seen)
        old, factor = cells.read(), cells.spread(penalties)
        cells.write(torch.where(old > 0, old / factor, old * factor))


def _penalise_counts(logits: Tensor, rows: Sequence[tuple[int, LogitEdits]]) -> None:
    counted = [
        (row, its.rules.params, its.counts)
        for row, its in rows
        if its.counts is not None
        and (its.rules.params.frequency_penalty or its.rules.params.presence_penalty)
    ]
    if counted:
        cells = _Cells(logits, [(row, counts.ids) for row, _, counts in counted])
        times = cells.each(np.concatenate([counts.counts for *_, counts in counted]))
        frequency = cells.spread([params.frequency_penalty for _, params, _ in counted])
        presence = cells.spread([params.presence_penalty for _, params, _ in counted])
        cells.write(cells.read() - frequency * times - presence)


class _Cells:
    """Some tokens of each row as places in the flattened logits; no place comes twice."""

    def __init__(self, logits: Tensor, parts: Sequence[tuple[int, Ids]]) -> None:
        vocab = logits.shape[1]
        ids = np.concatenate([NO_IDS, *(ids for _, ids in parts)])
        self._lengths = np.array([len(ids) for _, ids in parts], np.int64)
        self._inside = (ids >= 0) & (ids < vocab)
        starts = np.array([row * vocab for row, _ in parts], np.int64)
        places = np.repeat(starts, self._lengths) + ids
        self.places = torch.from_numpy(places[self._inside]).to(logits.device)
        self._flat = logits.view(-1)

    def read(self) -> Tensor:
        return self._flat[self.places]

    def write(self, values: Tensor | float) -> None:
        self._flat[self.places] = values

    def spread(self, values: Iterable[float]) -> Tensor:
        """One value a row -> one a cell, float32."""
        return self.each(np.repeat(np.array(list(values), np.float32), self._lengths))

    def each(self, values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
        """One value a token -> one a cell, float32."""
        inside = values[self._inside].astype(np.float32)
        return torch.from_numpy(inside).to(self.places.device)
