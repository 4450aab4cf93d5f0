"""The likeliest tokens of a row, without sorting the row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# A column's tokens; a maximum over columns side by side takes whole vectors.
DEPTH = 128


def likeliest(row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The tokens of the ``k`` largest finite numbers, largest first; of equal ones the lower id.

    The k-th largest of the maxima of some columns is no larger than the k-th largest number, so
    only columns that reach it are looked through.

    Parameters
    ----------
    row : (vocab,) float32
        Without NaN.
    k : int
        More than the vocabulary means all.
    """
    if k <= 0:
        return np.empty(0, np.int64)
    columns = len(row) // DEPTH
    if columns >= 2 * k:
        body = columns * DEPTH
        tops = row[:body].reshape(DEPTH, columns).max(0)
        bound = np.partition(tops, columns - k)[columns - k]
        reaching = np.arange(0, body, columns)[:, None] + np.flatnonzero(tops >= bound)
        tokens = np.concatenate((reaching.ravel(), np.arange(body, len(row))))
        found = tokens[row[tokens] >= bound]
    elif k < len(row):
        found = np.flatnonzero(row >= np.partition(row, len(row) - k)[len(row) - k])
    else:
        found = np.arange(len(row))
    found = found[np.lexsort((found, -row[found]))[:k]]
    finite: NDArray[np.int64] = found[np.isfinite(row[found])]
    return finite
