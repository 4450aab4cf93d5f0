"""The inverse of a cumulative sum, exact at its edges."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.decoding.draw import draw

ALMOST_ONE = 1 - 2.0**-53


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([1, 3, 255, 256, 257, 1024, 1500]),
    density=st.sampled_from([0.01, 0.5, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_equal_to_one_exact_cumulative_sum(vocab: int, density: float, seed: int) -> None:
    # Integers below 2**24 are exact in float32, and their sums exact in float64.
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 2**20, (6, vocab)) * (rng.random((6, vocab)) < density)
    weights[:, rng.integers(vocab)] = 7
    uniform = np.array([0.0, ALMOST_ONE, *rng.random(4)])
    cumulative = weights.cumsum(axis=1)
    picked = draw(torch.from_numpy(weights.astype(np.float32)), uniform)
    for row, token in enumerate(picked):
        share = min(uniform[row] * cumulative[row, -1], np.nextafter(cumulative[row, -1], 0))
        assert token == np.searchsorted(cumulative[row], share, side="right")
        assert weights[row, token] > 0


def test_a_token_of_weight_zero_is_never_picked_at_either_edge() -> None:
    torch.manual_seed(0)
    for vocab in (40, 256, 700, 49_152):
        weights = torch.rand(16, vocab).softmax(-1)
        weights[:, :9] = 0
        weights[:, -9:] = 0
        assert draw(weights, np.zeros(16)).tolist() == [9] * 16
        assert draw(weights, np.full(16, ALMOST_ONE)).tolist() == [vocab - 10] * 16


def test_whole_blocks_of_zeros_are_stepped_over() -> None:
    weights = torch.zeros(3, 2048)
    weights[:, 700] = weights[:, 1500] = 1e-30
    assert draw(weights, np.array([0.0, 0.5, ALMOST_ONE])).tolist() == [700, 1500, 1500]


def test_one_itself_picks_the_last_token_that_has_a_weight() -> None:
    weights = torch.tensor([[0.0, 0.3, 0.7, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert draw(weights, np.ones(2)).tolist() == [2, 0]


def test_two_ways_of_summing_a_block_may_round_apart() -> None:
    rng = np.random.default_rng(0)
    block = (10.0 ** rng.uniform(-20, 0, (2000, 256))).astype(np.float32)
    once, stepwise = block.sum(axis=1, dtype=np.float64), block.cumsum(axis=1, dtype=np.float64)
    block = block[once > stepwise[:, -1]]
    assert len(block) > 100
    weights = torch.from_numpy(np.concatenate([block, np.zeros_like(block)], axis=1))
    assert draw(weights, np.full(len(weights), ALMOST_ONE)).max() == 255


def test_blocks_are_summed_in_float64() -> None:
    # In float32 the ones beside 2**24 are rounded away.
    weights = torch.ones(1, 512)
    weights[0, [255, 256]] = 2.0**24
    total = 2 * (2**24 + 255)
    assert draw(weights, np.array([(2**24 + 254.5) / total])).tolist() == [255]
    assert draw(weights, np.array([(2**24 + 255.5) / total])).tolist() == [256]


def test_rows_without_a_distribution_are_flagged_and_the_others_are_not() -> None:
    weights = torch.ones(5, 300)
    weights[1] = 0
    weights[2, 299] = torch.nan
    weights[3, 0] = torch.inf
    picked = draw(weights, np.full(5, 0.5))
    assert picked.tolist() == [150, -1, -1, -1, 150]
