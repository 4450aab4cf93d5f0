"""One uniform number and a row of weights give a token: the inverse of the cumulative sum."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from radixkv.decoding.rowwise import BLOCK, block_sums


def draw(weights: Tensor, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Pick from each row the first token at which the cumulative weight exceeds the uniform share.

    Sums are float64 and taken in two steps, over blocks of tokens and within the block that was
    hit, so that no row is summed up token by token. A token of weight zero is never picked, however
    close to 1 the uniform number is and however the two sums round.

    Parameters
    ----------
    weights : (rows, vocab) float32
        Not negative; any scale.
    uniform : (rows,) float64
        In [0, 1]; 1 picks the last token that has a weight.

    Returns
    -------
    (rows,) int64
        Token ids; −1 for a row whose weights are all zero or not finite.
    """
    rows = np.arange(len(weights))
    padded = F.pad(weights, (0, -weights.shape[1] % BLOCK)) if weights.shape[1] % BLOCK else weights
    edges = block_sums(padded).cumsum(axis=-1)
    total = edges[:, -1]
    good = np.isfinite(total) & (total > 0)
    if not good.all():
        edges[~good] = np.arange(1, edges.shape[1] + 1)
        total = edges[:, -1]
    target = _below(uniform * total, total)
    block = (edges <= target[:, None]).sum(axis=-1)
    left = np.where(block > 0, edges[rows, block - 1], 0.0)
    hit = padded.view(len(rows), -1, BLOCK)[torch.from_numpy(rows), torch.from_numpy(block)]
    within = hit.double().cpu().numpy().cumsum(axis=-1)
    rest = _below(target - left, within[:, -1])
    token = block * BLOCK + (within <= rest[:, None]).sum(axis=-1)
    return np.where(good, token, -1)


def _below(value: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.minimum(value, np.nextafter(limit, 0.0))
