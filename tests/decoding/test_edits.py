"""Allowed tokens, bans, biases and penalties: against transformers, by hand, and in a batch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as hf

from radixkv.decoding import LogitEdits, SamplingParams, SamplingRow, logit_edits, sample
from radixkv.decoding.apply import apply_edits
from radixkv.decoding.counts import TokenCounts
from radixkv.errors import RequestError

VOCAB = 12
INF = float("inf")
ids = st.lists(st.integers(0, VOCAB - 1), max_size=25)
seeds = st.integers(0, 2**32 - 1)


def edits_of(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    vocab: int = VOCAB,
) -> LogitEdits:
    edits = logit_edits(params, np.array(prompt, np.int32), vocab_size=vocab)
    assert edits is not None
    for token in generated:
        edits.push(token)
    return edits


def edited(
    row: Tensor,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    banned: Sequence[int] = (),
    **given: Any,
) -> Tensor:
    """One row of logits, changed: (vocab,) -> (vocab,)."""
    copy = row[None].clone()
    apply_edits(copy, [edits_of(SamplingParams(**given), prompt, generated, len(row))], [banned])
    return copy[0]


def by_hand(row: list[float], **given: Any) -> list[float]:
    return edited(torch.tensor(row), **given).tolist()


def random_row(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 4


def processed(processor: hf.LogitsProcessor, tokens: Sequence[int], row: Tensor) -> Tensor:
    return processor(torch.tensor([list(tokens)], dtype=torch.long), row[None].clone())[0]


# -- against transformers ------------------------------------------------------------------------


@settings(deadline=None)
@given(seed=seeds, prompt=ids, generated=ids, penalty=st.floats(0.05, 20))
def test_repetition_penalty_is_transformers(
    seed: int, prompt: list[int], generated: list[int], penalty: float
) -> None:
    row = random_row(seed)
    row[seed % VOCAB] = 0.0
    row[seed % 7] = -INF
    found = edited(row, prompt, generated, repetition_penalty=penalty + 0.001 * (penalty == 1))
    processor = hf.RepetitionPenaltyLogitsProcessor(penalty + 0.001 * (penalty == 1))
    assert torch.equal(found, processed(processor, prompt + generated, row))


@settings(deadline=None)
@given(
    seed=seeds,
    prompt=ids,
    generated=st.lists(st.integers(0, 2), max_size=8),
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_bad_words_ids_are_transformers_over_generated_tokens(
    seed: int, prompt: list[int], generated: list[int], words: list[list[int]]
) -> None:
    row = random_row(seed)
    found = edited(row, prompt, generated, bad_words_ids=words)
    # Older transformers overlook a word that is one token longer than the text; one that is in no
    # word stands before it.
    text = [VOCAB - 1, *generated]
    assert torch.equal(found, processed(hf.NoBadWordsLogitsProcessor(words), text, row))


@settings(deadline=None)
@given(seed=seeds, tokens=st.sets(st.integers(0, VOCAB - 1), min_size=1))
def test_a_bias_of_minus_100_is_transformers_suppress_tokens(seed: int, tokens: set[int]) -> None:
    row = random_row(seed)
    expected = processed(hf.SuppressTokensLogitsProcessor(sorted(tokens)), [], row)
    assert torch.equal(edited(row, logit_bias=dict.fromkeys(tokens, -100)), expected)
    assert torch.equal(edited(row, bad_words_ids=[[token] for token in tokens]), expected)
    others = sorted(set(range(VOCAB)) - tokens)
    if others:
        assert torch.equal(edited(row, allowed_token_ids=others), expected)
        banned = edited(row, banned=[*tokens, -1, VOCAB], allowed_token_ids=range(VOCAB))
        assert torch.equal(banned, expected)


@settings(deadline=None)
@given(
    seed=seeds,
    biases=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-99, 100), min_size=1),
)
def test_logit_bias_is_transformers_sequence_bias(seed: int, biases: dict[int, float]) -> None:
    row = random_row(seed)
    processor = hf.SequenceBiasLogitsProcessor({(i,): float(b) for i, b in biases.items()})
    assert torch.equal(edited(row, logit_bias=biases), processed(processor, [], row))


@settings(deadline=None)
@given(
    seed=seeds,
    prompt=ids,
    generated=ids,
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_presence_and_frequency_are_what_openai_writes(
    seed: int, prompt: list[int], generated: list[int], presence: float, frequency: float
) -> None:
    row = random_row(seed)
    params = {"presence_penalty": presence or 0.5, "frequency_penalty": frequency}
    times = torch.zeros(VOCAB, dtype=torch.float64)
    for token in generated:
        times[token] += 1
    expected = row.double() - frequency * times - params["presence_penalty"] * (times > 0)
    found = edited(row, prompt, generated, **params)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    unseen = times == 0
    assert torch.equal(found[unseen], row[unseen])


# -- by hand -------------------------------------------------------------------------------------


def test_penalties_by_hand() -> None:
    row = [2.0, -2.0, 0.0, 4.0, -1.0]
    seen = {"prompt": [0, 1], "generated": [3, 4, 3, 3]}
    assert by_hand(row, repetition_penalty=2, **seen) == [1.0, -4.0, 0.0, 2.0, -2.0]
    assert by_hand(row, repetition_penalty=0.5, **seen) == [4.0, -1.0, 0.0, 8.0, -0.5]
    assert by_hand(row, presence_penalty=0.5, **seen) == [2.0, -2.0, 0.0, 3.5, -1.5]
    assert by_hand(row, frequency_penalty=0.5, **seen) == [2.0, -2.0, 0.0, 2.5, -1.5]
    assert by_hand(row, frequency_penalty=-1, presence_penalty=2, **seen) == [2, -2, 0, 5, -2]
    # A token of the prompt that was generated too is still penalised once by repetition_penalty.
    assert by_hand([3.0, 1.0], repetition_penalty=3, prompt=[0], generated=[0, 0]) == [1.0, 1.0]


def test_bad_words_by_hand() -> None:
    row = [0.0] * 4
    words = [[1, 2], [3], [0, 1, 2], [1, 1, 0]]
    assert by_hand(row, bad_words_ids=words) == [0, 0, 0, -INF]
    assert by_hand(row, bad_words_ids=words, generated=[1]) == [0, 0, -INF, -INF]
    assert by_hand(row, bad_words_ids=words, generated=[1, 1]) == [-INF, 0, -INF, -INF]
    assert by_hand(row, bad_words_ids=words, generated=[1, 0]) == [0, 0, 0, -INF]
    # The prompt's end is no beginning of a bad word.
    assert by_hand(row, bad_words_ids=words, prompt=[1]) == [0, 0, 0, -INF]


def test_the_order_of_operations() -> None:
    row = [4.0, 4.0, 4.0, 4.0]
    # The bias goes first, so the penalty sees it: (4 - 8) * 2, not 4 / 2 - 8.
    biased = by_hand(row, prompt=[0], logit_bias={0: -8}, repetition_penalty=2)
    assert biased == [-8.0, 4.0, 4.0, 4.0]
    # Repetition goes before the other two: 4 / 2 - 1 - 1, not (4 - 1 - 1) / 2 = 1.
    given: dict[str, Any] = {"frequency_penalty": 1, "presence_penalty": 1}
    assert by_hand(row, generated=[0], repetition_penalty=2, **given) == [0.0, 4.0, 4.0, 4.0]
    # Nothing brings back what is forbidden.
    forbidden = by_hand(
        row,
        banned=[3],
        generated=[2, 2, 3],
        allowed_token_ids=[0, 2, 3],
        bad_words_ids=[[2]],
        logit_bias={1: 100, 2: 100, 3: 100},
        frequency_penalty=-2,
        repetition_penalty=0.1,
    )
    assert forbidden == [4.0, -INF, -INF, -INF]


@pytest.mark.parametrize("penalty", [1e-300, 1e-40, 1e40, 1e300])
def test_extreme_penalties_leave_numbers(penalty: float) -> None:
    found = edited(torch.tensor([3.0, 0.0, -3.0, 1.0]), [0, 1, 2], repetition_penalty=penalty)
    assert found.isfinite().all()
    assert (found[0] > found[3]) == (penalty < 1)


# -- the state of a branch -----------------------------------------------------------------------


@settings(deadline=None)
@given(
    prompt=ids,
    first=st.lists(st.integers(0, 60), max_size=70),
    second=st.lists(st.integers(0, 60), max_size=70),
)
def test_counts_and_their_copies(prompt: list[int], first: list[int], second: list[int]) -> None:
    counts = TokenCounts(np.unique(np.array(prompt, np.int64)))
    for token in first:
        counts.add(token)
    twin = counts.copy()
    for token in second:
        twin.add(token)
    for its, tokens in ((counts, first), (twin, first + second)):
        found = dict(zip(its.ids.tolist(), its.counts.tolist(), strict=True))
        assert found == Counter(tokens)
        assert set(its.fresh.tolist()) == set(tokens) - set(prompt)
        assert len(its.fresh) == len(set(tokens) - set(prompt))
    assert twin.prompt is counts.prompt


def test_branches_share_what_does_not_change_and_nothing_else() -> None:
    params = SamplingParams(presence_penalty=1, repetition_penalty=2, bad_words_ids=[[1, 2]])
    one = edits_of(params, [5, 6, 5], [1])
    two = one.copy()
    assert two.rules is one.rules
    two.push(3)
    logits = torch.full((2, VOCAB), 8.0)
    apply_edits(logits, [one, two], [(), ()])
    assert logits[0].tolist() == [8, 3, -INF, 8, 8, 4, 4, *[8] * 5]
    assert logits[1].tolist() == [8, 3, 8, 3, 8, 4, 4, *[8] * 5]


def test_parameters_that_edit_nothing_make_no_state() -> None:
    plain = SamplingParams(temperature=0.5, min_tokens=3, stop_token_ids=[1], logit_bias={})
    assert logit_edits(plain, np.array([1]), vocab_size=VOCAB) is None
    no_counts = edits_of(SamplingParams(logit_bias={3: 1}))
    assert no_counts.counts is None


@pytest.mark.parametrize("name", ["logit_bias", "bad_words_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name(name: str) -> None:
    def make(token: int) -> SamplingParams:
        values = {
            "logit_bias": {3: 1, token: 1},
            "bad_words_ids": [[token, 3]],
            "allowed_token_ids": [3, token],
        }
        return SamplingParams(**{name: values[name]})  # type: ignore[arg-type]

    assert logit_edits(make(VOCAB - 1), np.array([1]), vocab_size=VOCAB) is not None
    message = f"{name} names token id {VOCAB}, which is outside the vocabulary of {VOCAB} tokens"
    with pytest.raises(RequestError, match=message):
        logit_edits(make(VOCAB), np.array([1]), vocab_size=VOCAB)


# -- in a batch ----------------------------------------------------------------------------------

KINDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"logit_bias": {1: 5, 2: -100, 30: 3.5}},
    {"bad_words_ids": [[4], [5, 6], [7, 7, 7]]},
    {"allowed_token_ids": [*range(0, 100, 3)]},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": {8: 2}, "logprobs": 2},
    {"allowed_token_ids": [*range(50)], "bad_words_ids": [[1]], "presence_penalty": -1},
]
METHODS: list[dict[str, Any]] = [{"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}]


def mixed_rows(count: int, vocab: int) -> list[SamplingRow]:
    rng = random.Random(1)
    rows = []
    for i in range(count):
        params = SamplingParams(**(KINDS[i % len(KINDS)] | METHODS[i % len(METHODS)]))
        edits = logit_edits(params, np.array([rng.randrange(vocab)] * 3), vocab_size=vocab)
        for _ in range(rng.randrange(60)):
            if edits is not None:
                edits.push(rng.randrange(20))
        rows.append(SamplingRow(params, i, i % 3, 5 * i, (i,) if i % 5 == 0 else (), edits))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [100, 5003])
def test_kind_18_an_edited_row_never_depends_on_its_batch_mates(
    vocab: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(vocab)
    logits, rows = (torch.randn(48, vocab) * 3).to(dtype), mixed_rows(48, vocab)
    before = logits.clone()
    together = sample(logits, rows)
    assert together.valid.all()
    assert torch.equal(logits, before)
    order = random.Random(0).sample(range(48), 48)
    permuted = sample(logits[order], [rows[i] for i in order])
    assert permuted.token_ids.tolist() == together.token_ids[order].tolist()
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.token_ids.tolist() == [together.token_ids[i]]
        assert alone.logprobs == [together.logprobs[i]]
    batch = logits.float()
    apply_edits(batch, [row.edits for row in rows], [row.banned for row in rows])
    for i, row in enumerate(rows):
        one = logits[i : i + 1].float()
        apply_edits(one, [row.edits], [row.banned])
        assert torch.equal(one[0], batch[i])


def test_rows_without_edits_are_left_to_the_last_bit() -> None:
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    edits = edits_of(SamplingParams(allowed_token_ids=[1]))
    apply_edits(logits, [None, edits, None], [(), (), ()])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().tolist() == [[1]]


def test_logprobs_stay_those_of_the_model() -> None:
    row = torch.tensor([1.0, 3.0, 2.0])
    params = SamplingParams(temperature=0, logprobs=1, logit_bias={1: -100})
    result = sample(row[None], [SamplingRow(params, edits=edits_of(params, vocab=3))])
    (found,) = result.logprobs
    assert result.token_ids.tolist() == [2]
    assert found is not None
    assert found.rank == 2
    assert found.logprob == row.log_softmax(-1)[2].item()
    assert found.top == ((1, row.log_softmax(-1)[1].item()),)


@pytest.mark.parametrize("temperature", [0, 1])
def test_edits_that_leave_no_token_are_told_from_logits_that_are_not_finite(
    temperature: float,
) -> None:
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=[0, 1], bad_words_ids=[[0], [1]]
    )
    plain = SamplingParams(temperature=temperature)
    rows = [SamplingRow(params, edits=edits_of(params)), SamplingRow(plain), SamplingRow(plain)]
    logits = torch.zeros(3, VOCAB)
    logits[1, 3] = torch.nan
    result = sample(logits, rows)
    assert result.valid.tolist() == [False, False, True]
    assert result.exhausted.tolist() == [True, False, False]


# -- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", KINDS[1:], ids=lambda given: "+".join(given))
def test_distribution(given: dict[str, Any]) -> None:
    """Against probabilities worked out token by token in float64."""
    count, vocab = 20_000, 100
    prompt, generated = [1, 2, 2, 8, 30], [8, 9, 9, 5, 7, 7]
    row = random_row(3, vocab) / 3
    params = SamplingParams(**given)
    edits = edits_of(params, prompt, generated, vocab)
    rows = [SamplingRow(params, 77, 0, position, (), edits) for position in range(count)]
    hits = np.bincount(sample(row.expand(count, vocab), rows).token_ids, minlength=vocab)
    expected = exact(row.tolist(), params, prompt, generated) * count
    assert hits[expected == 0].sum() == 0
    common = expected >= 5
    observed = [*hits[common], hits[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    terms = [(o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True) if w > 0]
    freedom = len(terms) - 1
    # Wilson and Hilferty's approximation of the value exceeded with probability 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert sum(terms) < limit


def exact(
    row: list[float], params: SamplingParams, prompt: list[int], generated: list[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    scores = np.array(row)
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = -INF
        for word in params.bad_words_ids:
            if word[-1] == token and list(word[:-1]) == generated[len(generated) + 1 - len(word) :]:
                scores[token] = -INF
        bias = params.logit_bias.get(token, 0)
        scores[token] += -INF if bias == -100 else bias
        if token in prompt + generated:
            up = scores[token] > 0
            scores[token] *= params.repetition_penalty ** (-1 if up else 1)
        scores[token] -= params.frequency_penalty * generated.count(token)
        scores[token] -= params.presence_penalty * (token in generated)
    weights = np.exp(scores)
    return weights / weights.sum()
