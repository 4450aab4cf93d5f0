"""Log-probabilities as they are reported beside a sampled token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """What the model itself thought of one sampled token and of its alternatives.

    Parameters
    ----------
    logprob : float
        Of the sampled token.
    rank : int
        Its place among all tokens, from 1; of equally likely tokens the lower id comes first.
    top : tuple of (token id, log-probability)
        The likeliest tokens in order of rank, as many as were asked for. The sampled token is
        among them only if its rank is. Tokens of probability zero are left out.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def describe(row: NDArray[np.float32], token: int, k: int) -> TokenLogprobs:
    """Rank a sampled token and list the ``k`` likeliest.

    Parameters
    ----------
    row : (vocab,) float32
        Log-probabilities of every token.
    token : int
        The sampled one.
    k : int
        How many alternatives; more than the vocabulary means all.
    """
    own = row[token]
    rank = 1 + np.count_nonzero(row > own) + np.count_nonzero(row[:token] == own)
    return TokenLogprobs(float(own), int(rank), _likeliest(row, k))


def _likeliest(row: NDArray[np.float32], k: int) -> tuple[tuple[int, float], ...]:
    if k == 0:
        return ()
    # Every token that ties with the k-th is a candidate; the stable sort then prefers low ids.
    last = max(len(row) - k, 0)
    found = np.flatnonzero(row >= np.partition(row, last)[last])
    found = found[np.argsort(-row[found], kind="stable")[:k]]
    found = found[np.isfinite(row[found])]
    return tuple(zip(found.tolist(), row[found].tolist(), strict=True))
