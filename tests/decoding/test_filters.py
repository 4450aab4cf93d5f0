"""The filtered distributions are those of transformers' logits warpers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from radixkv.decoding import SamplingParams, filters
from radixkv.decoding.filters import weigh

TEMPERATURES = [0.3, 1.0, 1.7]
TOP_K = [0, 1, 5, 40]
TOP_P = [0.01, 0.5, 0.9, 1.0]
MIN_P = [0.0, 0.05, 0.6]
GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(TEMPERATURES, TOP_K, TOP_P, MIN_P)
]


def warped(row: Tensor, params: SamplingParams) -> Tensor:
    """The same by transformers, in the order of its `generate`: (vocab,) -> (vocab,)."""
    chain: list[hf.LogitsProcessor] = [hf.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    scores = row[None]
    for warper in chain:
        scores = warper(torch.empty(1, 0, dtype=torch.long), scores)
    return scores[0]


def compare(logits: Tensor, params: list[SamplingParams]) -> None:
    before = logits.clone()
    weights = weigh(logits.clone(), params)
    assert weights.dtype == torch.float32
    for weight, row, each in zip(weights, before, params, strict=True):
        scores = warped(row, each)
        kept = scores > -torch.inf
        assert torch.equal(weight[~kept], torch.zeros(int((~kept).sum())))
        # Only what float32's softmax cannot hold may be zero besides.
        assert (weight[kept & (scores > scores.max() - 80)] > 0).all()
        torch.testing.assert_close(
            weight / weight.sum(), scores.softmax(-1), rtol=2e-6, atol=0, msg=str(each)
        )


@pytest.mark.parametrize("vocab", [7, 257, 5003])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_equal_to_transformers_on_random_logits(vocab: int, scale: float) -> None:
    torch.manual_seed(vocab)
    compare(torch.randn(len(GRID), vocab) * scale, GRID)


def test_equal_to_transformers_on_a_flat_distribution_over_a_real_vocabulary() -> None:
    # Here top_p's border token weighs about 2e-5: the sums must agree to the last bit.
    torch.manual_seed(0)
    params = [SamplingParams(top_p=p / 100) for p in range(5, 100, 5)]
    logits = torch.randn(len(params), 49_152) * 0.1
    kept = weigh(logits.clone(), params) > 0
    for mask, row, each in zip(kept, logits, params, strict=True):
        assert torch.equal(mask, warped(row, each) > -torch.inf)


@settings(max_examples=200, deadline=None)
@given(
    row=st.lists(st.integers(-4, 4), min_size=2, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_equal_to_transformers_where_logits_tie(
    row: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor(row, dtype=torch.float32)
    kept = weigh(logits[None].clone(), [params])[0] > 0
    expected = warped(logits, params) > -torch.inf
    for value in set(row):
        tied = kept[logits == value]
        assert tied.sum() == expected[logits == value].sum()
        assert tied.tolist() == sorted(tied.tolist())


def test_kept_sets_by_hand() -> None:
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()

    def kept(**given: float) -> list[int]:
        return weigh(logits[None].clone(), [SamplingParams(**given)])[0].nonzero()[:, 0].tolist()  # type: ignore[arg-type]

    assert kept(top_k=2) == [0, 1]
    assert kept(top_k=5) == [0, 1, 2, 3, 4]
    assert kept(top_p=0.6) == [0, 1]
    assert kept(top_p=0.01) == [0]
    assert kept(min_p=0.25) == [0, 1, 2]
    # top_p reads what top_k has left: 0.5 / 0.85 of it is the first token.
    assert kept(top_k=3, top_p=0.58) == [0]
    assert kept(top_p=0.58) == [0, 1]
    # Temperature goes first: it flattens what top_p sees.
    assert kept(temperature=3.0, top_p=0.58) == [0, 1, 2]


def test_ties_on_the_border_of_top_p_drop_the_lowest_ids() -> None:
    weights = weigh(torch.zeros(1, 8), [SamplingParams(top_p=0.5)])
    assert weights[0].nonzero()[:, 0].tolist() == [4, 5, 6, 7]


def test_top_p_of_one_beside_a_row_with_top_p_keeps_its_tail() -> None:
    logits = torch.tensor([[0.0, -85.0, -86.0], [0.0, -1.0, -2.0]])
    weights = weigh(logits, [SamplingParams(top_k=2, min_p=0.0), SamplingParams(top_p=0.5)])
    assert (weights > 0).tolist() == [[True, True, False], [True, False, False]]


def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit() -> None:
    torch.manual_seed(1)
    for vocab in (1000, 50_257):
        params = GRID[:: len(GRID) // 24]
        logits = torch.randn(len(params), vocab) * 3
        together = weigh(logits.clone(), params)
        for row, each in enumerate(params):
            assert torch.equal(weigh(logits[row : row + 1].clone(), [each])[0], together[row])


def test_nothing_is_sorted_without_top_k_and_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows = []
    ascending = filters.ascending
    monkeypatch.setattr(
        filters, "ascending", lambda x: (sorted_rows.append(len(x)), ascending(x))[1]
    )
    logits = torch.randn(3, 50)
    weigh(logits.clone(), [SamplingParams(temperature=0.5, min_p=0.1, top_k=50)] * 3)
    assert sorted_rows == []
    weigh(logits.clone(), [SamplingParams(), SamplingParams(top_k=3), SamplingParams()])
    assert sorted_rows == [1]


@pytest.mark.parametrize("temperature", [1e-5, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[30.0, -torch.inf, 29.0, -1e4]])
    weights = weigh(logits, [SamplingParams(temperature=temperature)])
    expected = [[1.0, 0.0, 0.0, 0.0]] if temperature < 1 else [[1 / 3, 0.0, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
