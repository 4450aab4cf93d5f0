"""Log-probabilities as they are reported beside a sampled token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.decoding.likeliest import likeliest


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
    found = likeliest(row, k)
    top = tuple(zip(found.tolist(), row[found].tolist(), strict=True))
    return TokenLogprobs(float(own), int(rank), top)
