"""The likeliest tokens, against a sort of the whole row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.decoding.likeliest import DEPTH, likeliest


def by_sorting(row: NDArray[np.float32], k: int) -> list[int]:
    order = np.argsort(-row, kind="stable")[: max(k, 0)]
    return [int(token) for token in order if np.isfinite(row[token])]


@given(st.integers(0, 2**32), st.integers(1, 5 * DEPTH), st.integers(0, 12), st.integers(1, 40))
def test_the_order_of_a_sort(seed: int, length: int, k: int, values: int) -> None:
    """Few values, so that many tie; and some that are none."""
    made = np.random.default_rng(seed)
    row = made.integers(0, values, length).astype(np.float32)
    row[made.random(length) < made.choice([0, 0.1, 0.95, 1])] = -np.inf
    assert likeliest(row, k).tolist() == by_sorting(row, k)


@pytest.mark.parametrize("length", [16 * DEPTH, 16 * DEPTH + 1, 17 * DEPTH - 1])
@pytest.mark.parametrize("k", [1, 7, 8, 9])
def test_the_best_may_be_anywhere(length: int, k: int) -> None:
    for place in (0, 1, 15, 16, length // 2, 16 * DEPTH - 1, length - 1):
        row = np.linspace(0, 1, length, dtype=np.float32)
        row[place] = 2.0
        assert likeliest(row, k).tolist() == by_sorting(row, k)
