"""Tokens, their distribution, and their independence of everything else in the batch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from radixkv.decoding import SamplingParams, SamplingRow, TokenLogprobs, sample, sampler
from radixkv.decoding.filters import weigh

GREEDY = SamplingParams(temperature=0)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def tokens(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    return sample(logits, rows).token_ids.tolist()


def chi_square_limit(freedom: int) -> float:
    """Wilson and Hilferty's approximation of the value exceeded with probability 1e-4."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_largest_and_of_equals_the_first(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 5000, dtype=dtype)
    logits[0, 4999] = 1
    logits[1, [4000, 77, 300]] = 2
    logits[3] = -torch.inf
    logits[3, 1234] = -1e4
    before = logits.clone()
    assert tokens(logits, [SamplingRow(GREEDY)] * 4) == [4999, 77, 0, 1234]
    assert torch.equal(logits, before)


def test_greedy_ignores_the_filters_and_the_seed() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.1, min_p=0.5, seed=4)
    assert tokens(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), [SamplingRow(params, 9, 9, 9)]) == [2]


@pytest.mark.parametrize("layout", ["transposed", "strided", "gradient"])
def test_any_layout_of_logits(layout: str) -> None:
    torch.manual_seed(0)
    plain = torch.randn(6, 100)
    logits = {
        "transposed": plain.T.contiguous().T,
        "strided": plain.repeat_interleave(2, dim=1)[:, ::2],
        "gradient": plain.clone().requires_grad_(),
    }[layout]
    rows = [SamplingRow(p, 1, 0, i) for i, p in enumerate([GREEDY, SamplingParams(top_p=0.9)] * 3)]
    assert tokens(logits, rows) == tokens(plain, rows)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.5, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=lambda p: f"t{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}",
)
def test_distribution(params: SamplingParams) -> None:
    torch.manual_seed(7)
    count, vocab = 20_000, 30
    logits = torch.randn(1, vocab) * 1.5
    rows = [SamplingRow(params, 42, 3, position) for position in range(count)]
    hits = np.bincount(tokens(logits.expand(count, vocab), rows), minlength=vocab)
    expected = weigh(logits.clone(), [params])[0].double().numpy()
    expected *= count / expected.sum()
    possible = expected > 0
    assert hits[~possible].sum() == 0
    common = expected >= 5
    rest = possible & ~common
    observed = [*hits[common], hits[rest].sum()]
    wanted = [*expected[common], expected[rest].sum()]
    terms = [(o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0]
    assert sum(terms) < chi_square_limit(len(terms) - 1)


@pytest.mark.parametrize("vary", ["seed", "branch", "position"])
def test_distribution_over_every_key(vary: str) -> None:
    probabilities = np.array([0.1, 0.2, 0.3, 0.4])
    logits = torch.tensor(probabilities).log().expand(8000, 4)
    base = SamplingRow(SamplingParams(), 5, 1, 17)
    rows = [base._replace(**{vary: i}) for i in range(8000)]
    hits = np.bincount(tokens(logits, rows), minlength=4)
    assert ((hits - 8000 * probabilities) ** 2 / (8000 * probabilities)).sum() < chi_square_limit(3)


def mixed_rows(count: int) -> list[SamplingRow]:
    kinds = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.8, top_p=0.95, logprobs=3),
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.3, min_p=0.02, logprobs=0),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(top_k=40, top_p=0.9, min_p=0.05),
    ]
    rows = []
    for i, params in zip(range(count), itertools.cycle(kinds), strict=False):
        banned = (i, 3 * i) if i % 3 == 0 else ()
        rows.append(SamplingRow(params, 1000 + i // 4, i % 4, 17 * i, banned))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1000, 50_257])
def test_kind_18_a_row_never_depends_on_its_batch_mates(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    logits, rows = (torch.randn(32, vocab) * 3).to(dtype), mixed_rows(32)
    together = sample(logits, rows)
    order = random.Random(0).sample(range(32), 32)
    permuted = sample(logits[order], [rows[i] for i in order])
    assert permuted.token_ids.tolist() == together.token_ids[order].tolist()
    assert permuted.logprobs == [together.logprobs[i] for i in order]
    for i in range(32):
        alone = sample(logits[i : i + 1], [rows[i]])
        assert alone.token_ids.tolist() == [together.token_ids[i]]
        assert alone.logprobs == [together.logprobs[i]]
    again = sample(logits, rows)
    assert again.token_ids.tolist() == together.token_ids.tolist()


def test_kind_18_branches_of_one_request_differ() -> None:
    logits = torch.zeros(8, 10_000)
    rows = [SamplingRow(SamplingParams(), 1, branch, 0) for branch in range(8)]
    assert len(set(tokens(logits, rows))) == 8
    rows = [SamplingRow(SamplingParams(), 1, 0, position) for position in range(8)]
    assert len(set(tokens(logits, rows))) == 8
    rows = [SamplingRow(SamplingParams(), seed, 0, 0) for seed in range(8)]
    assert len(set(tokens(logits, rows))) == 8


def test_kind_19_rows_that_are_not_finite_are_flagged_and_the_others_are_not_touched() -> None:
    torch.manual_seed(3)
    clean, rows = torch.randn(14, 600), mixed_rows(14)
    logits = clean.clone()
    logits[0, 599] = torch.nan
    logits[1, 0] = torch.nan
    logits[2] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    logits[5, 7] = -torch.inf
    result, expected = sample(logits, rows), sample(clean, rows)
    assert result.valid.tolist() == [False] * 5 + [True] * 9
    assert result.valid.dtype == np.bool_
    assert result.token_ids[:5].tolist() == [-1] * 5
    assert result.logprobs[:5] == [None] * 5
    assert result.token_ids[6:].tolist() == expected.token_ids[6:].tolist()
    assert result.logprobs[6:] == expected.logprobs[6:]
    assert expected.valid.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nan_anywhere_is_found(dtype: torch.dtype) -> None:
    for place in (0, 1, 15, 16, 63, 499, 500):
        logits = torch.zeros(2, 501, dtype=dtype)
        logits[0, place] = torch.nan
        for params in (GREEDY, SamplingParams()):
            assert sample(logits, [SamplingRow(params)] * 2).valid.tolist() == [False, True]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
def test_infinite_rows_are_found_greedy_or_not(params: SamplingParams) -> None:
    logits = torch.zeros(3, 300)
    logits[0, 7] = torch.inf
    logits[1] = -torch.inf
    result = sample(logits, [SamplingRow(params)] * 3)
    assert result.valid.tolist() == [False, False, True]
    assert result.token_ids[:2].tolist() == [-1, -1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=2)])
def test_banned_tokens_are_never_sampled(params: SamplingParams) -> None:
    logits = torch.tensor([[9.0, 5.0, 8.0, 4.5]]).expand(300, 4)
    banned = (0, 2, 77, -1)
    rows = [SamplingRow(params, 1, 0, i, banned if i % 2 else ()) for i in range(300)]
    picked = np.array(tokens(logits, rows))
    assert set(picked[1::2]) == ({1} if params.greedy else {1, 3})
    assert 0 in picked[::2]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.5)])
def test_a_row_with_every_token_banned_is_not_valid(params: SamplingParams) -> None:
    rows = [SamplingRow(params, banned=range(4)), SamplingRow(params)]
    result = sample(torch.tensor([[1.0, 2.0, 3.0, 4.0]]).expand(2, 4), rows)
    assert result.valid.tolist() == [False, True]
    assert result.token_ids.tolist() == [-1, 3]


def test_logprobs_are_of_the_raw_distribution() -> None:
    torch.manual_seed(4)
    logits = (torch.randn(3, 40) * 2).bfloat16()
    params = SamplingParams(temperature=0.2, top_k=2, logprobs=4)
    result = sample(logits, [SamplingRow(params, 1, 0, i, (5,)) for i in range(3)])
    expected = logits.float().log_softmax(-1)
    for row, token, found in zip(expected, result.token_ids, result.logprobs, strict=True):
        assert isinstance(found, TokenLogprobs)
        assert found.logprob == row[token].item()
        assert found.rank == 1 + int((row > row[token]).sum())
        best = row.topk(4)
        assert [i for i, _ in found.top] == best.indices.tolist()
        assert [p for _, p in found.top] == best.values.tolist()


def test_kind_17_logprobs_lists_the_k_likeliest_and_never_one_more() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0, logprobs=2)
    (found,) = sample(logits, [SamplingRow(params, banned=(0, 1, 2))]).logprobs
    assert found is not None
    assert found.rank == 4
    assert [token for token, _ in found.top] == [0, 1]


def test_logprobs_of_zero_give_the_sampled_token_alone() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    (found,) = sample(logits, [SamplingRow(SamplingParams(temperature=0, logprobs=0))]).logprobs
    assert found is not None
    assert found == (pytest.approx(-0.31326166), 1, ())
    assert sample(logits, [SamplingRow(GREEDY)]).logprobs == [None]


def test_ties_rank_by_id_and_impossible_tokens_are_not_listed() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -torch.inf, 2.0, 0.0]])
    params = SamplingParams(temperature=0, logprobs=2)
    (found,) = sample(logits, [SamplingRow(params, banned=(1, 2))]).logprobs
    assert found is not None
    assert found.rank == 3
    assert [token for token, _ in found.top] == [1, 2]
    (found,) = sample(logits, [SamplingRow(SamplingParams(temperature=0, logprobs=99))]).logprobs
    assert found is not None
    assert [token for token, _ in found.top] == [1, 2, 4, 0, 5]


def test_a_greedy_batch_pays_for_nothing_but_the_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("called")

    for name in ("weigh", "draw", "describe", "uniforms", "_edit"):
        monkeypatch.setattr(sampler, name, never)
    assert tokens(torch.eye(5), [SamplingRow(GREEDY)] * 5) == [0, 1, 2, 3, 4]


def test_an_empty_batch_and_wrong_shapes() -> None:
    result = sample(torch.empty(0, 10), [])
    assert (len(result.token_ids), len(result.valid), result.logprobs) == (0, 0, [])
    assert tokens(torch.zeros(1, 1), [SamplingRow(SamplingParams())]) == [0]
    for logits in (torch.zeros(2, 5), torch.zeros(5), torch.zeros(1, 0)):
        with pytest.raises(ValueError, match=r"logits must be \(1, vocab\)"):
            sample(logits, [SamplingRow(GREEDY)])
