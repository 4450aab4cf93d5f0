"""Which tokens may be drawn: temperature, then top_k, then top_p, then min_p.

The order and the sets that are kept are those of transformers' logits warpers: top_k keeps every
token that ties with the k-th; top_p keeps the token that crosses ``top_p``; min_p compares the
probabilities that both have left. Where equal logits lie on the border of top_p, as many are kept
as there; which ones, transformers leaves to an unstable sort, and here the lowest ids go first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.decoding.params import GREEDY_BELOW, SamplingParams
from radixkv.decoding.rowwise import ascending, at_least

# Beyond it every distribution is uniform, and float32 would round some temperatures to infinity.
HOTTEST = 1e30


class Filters:
    """What rows ask of `weigh`, a column each; made once for rows that stay the same.

    Parameters
    ----------
    params : sequence of SamplingParams
        One a row, none of them greedy.
    """

    __slots__ = ("min_p", "temperature", "top_k", "top_p")

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        self.temperature = np.clip([p.temperature for p in params], GREEDY_BELOW, HOTTEST)
        self.top_k = np.array([p.top_k for p in params])
        self.top_p = np.array([p.top_p for p in params])
        self.min_p = np.array([p.min_p for p in params])


def weigh(logits: Tensor, params: Sequence[SamplingParams] | Filters) -> Tensor:
    """Probabilities after temperature and filters, up to each row's own scale.

    Rows without top_k and top_p are not sorted.

    Parameters
    ----------
    logits : (rows, vocab) float32
        Overwritten.
    params : sequence of SamplingParams, or Filters
        One a row, none of them greedy.

    Returns
    -------
    (rows, vocab) float32
        Exactly zero for every token that was filtered out; a row need not sum to 1.
    """
    vocab = logits.shape[1]
    filters = params if isinstance(params, Filters) else Filters(params)
    temperature, top_p, min_p = filters.temperature, filters.top_p, filters.min_p
    top_k = np.where(filters.top_k < vocab, filters.top_k, 0)
    if (temperature != 1).any():
        logits /= _column(temperature, logits)
    if len(cut := np.flatnonzero((top_k > 0) | (top_p < 1))):
        rows = torch.from_numpy(cut).to(logits.device)
        part = logits if len(cut) == len(logits) else logits[rows]
        keep = _nucleus(part, top_k[cut], top_p[cut])
        part.masked_fill_(keep.logical_not_(), -torch.inf)
        if part is not logits:
            logits.index_copy_(0, rows, part)
    weights = logits.softmax(dim=-1)
    if min_p.any():
        floor = _column(min_p, weights) * weights.amax(dim=-1, keepdim=True)
        weights *= at_least(weights, floor)
    return weights


def _nucleus(logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """Where top_k (0: all) and top_p (1: all) keep a token: (rows, vocab) float32 -> bool."""
    vocab = logits.shape[1]
    ordered = ascending(logits)
    place = torch.from_numpy(np.where(top_k > 0, vocab - top_k, 0)).to(logits.device)
    kth = ordered.gather(1, place[:, None])
    if not (top_p < 1).any():
        return at_least(logits, kth)
    if top_k.any():
        ordered.masked_fill_(ordered < kth, -torch.inf)
    mass = ordered.softmax(dim=-1).cumsum(dim=-1)
    # With top_p = 1 this drops only what has underflowed to a mass of zero.
    share = _column(1 - top_p, logits)
    dropped = torch.searchsorted(mass, share, right=True).clamp_(max=vocab - 1)
    lowest = torch.maximum(ordered.gather(1, dropped), kth)
    keep = at_least(logits, lowest)
    surplus = (dropped - torch.searchsorted(ordered, lowest))[:, 0].cpu().numpy()
    for row in np.flatnonzero(surplus > 0):
        tied = (logits[row] == lowest[row]).nonzero()[: surplus[row], 0]
        keep[row, tied] = False
    return keep


def _column(values: NDArray[np.float64], like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float32)[:, None]).to(like.device)
