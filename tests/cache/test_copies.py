"""Copy orders in waves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import CopyOrder, copy_waves


@pytest.mark.parametrize(
    ("orders", "waves"),
    [
        ([], []),
        ([(0, 1), (0, 2)], [[(0, 1), (0, 2)]]),  # one source, two targets
        ([(0, 1), (1, 2)], [[(0, 1)], [(1, 2)]]),  # a chain
        ([(0, 1), (2, 0)], [[(0, 1), (2, 0)]]),  # the source is overwritten afterwards
        ([(0, 9), (1, 0), (9, 1)], [[(0, 9), (1, 0)], [(9, 1)]]),  # a swap through 9
        ([(0, 1), (2, 1)], [[(2, 1)]]),  # the later one counts
        ([(0, 1), (1, 2), (2, 3), (4, 5)], [[(0, 1)], [(1, 2)], [(2, 3), (4, 5)]]),
    ],
)
def test_waves(orders: list[tuple[int, int]], waves: list[list[tuple[int, int]]]) -> None:
    assert copy_waves(CopyOrder(*order) for order in orders) == waves


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_waves_give_what_one_by_one_gives(orders: list[tuple[int, int]]) -> None:
    one_by_one = np.arange(6)
    for source, target in orders:
        one_by_one[target] = one_by_one[source]
    in_waves = np.arange(6)
    for wave in copy_waves(CopyOrder(*order) for order in orders):
        assert len({target for _, target in wave}) == len(wave)
        in_waves[[t for _, t in wave]] = in_waves[[s for s, _ in wave]].copy()
    assert one_by_one.tolist() == in_waves.tolist()


def test_an_order_is_early_and_whole_unless_it_says_so() -> None:
    assert CopyOrder(1, 2) == (1, 2, False, 0)
