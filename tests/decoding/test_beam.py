"""The search by itself: against all sequences of a tiny vocabulary, and by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from radixkv.decoding import Beam, BeamSearch, BeamSearchParams, Candidates, propose
from radixkv.errors import RequestError, UnsupportedParameterError

VOCAB, END = 4, 3
Tokens = tuple[int, ...]


def table_of(seed: int, tokens: Tokens) -> torch.Tensor:
    """Logits behind these tokens; float32 (VOCAB,)."""
    rng = np.random.default_rng([seed, *tokens, len(tokens)])
    return torch.from_numpy(rng.normal(0, 1.5, VOCAB)).float()


def run(search: BeamSearch, seed: int) -> list[tuple[Tokens, float]]:
    while not search.done:
        logits = torch.stack([table_of(seed, beam.token_ids) for beam in search.running])
        proposed = propose(logits, search.num_candidates, banned=search.banned_tokens)
        search.advance([row for row in proposed if row is not None])
    return [(beam.token_ids, score) for beam, score in search.finished]


def brute_force(
    seed: int, length: int, min_tokens: int, penalty: float
) -> list[tuple[Tokens, float]]:
    """Every sequence that ends by END or at ``length``, with its score; best first."""
    found = []
    for size in range(1, length + 1):
        for tokens in itertools.product(range(VOCAB), repeat=size):
            early = END in tokens[:-1] or (END in tokens and size <= min_tokens)
            if early or (size < length and tokens[-1] != END):
                continue
            total = math.fsum(
                table_of(seed, tokens[:i]).double().log_softmax(0)[token].item()
                for i, token in enumerate(tokens)
            )
            found.append((tokens, total / size**penalty))
    return sorted(found, key=lambda pair: -pair[1])


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize("penalty", [-0.5, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_as_wide_as_all_sequences_finds_the_best(
    seed: int, penalty: float, min_tokens: int
) -> None:
    """With room for everything, nothing is lost on the way: the results are the best there are."""
    params = BeamSearchParams(
        beam_width=200,
        max_tokens=4,
        min_tokens=min_tokens,
        length_penalty=penalty,
        early_stopping="never",
    )
    search = BeamSearch(params, end_tokens=[END], max_new_tokens=4)
    expected = brute_force(seed, 4, min_tokens, penalty)
    found = run(search, seed)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_narrow_beam_follows_its_definition(width: int, early: bool | str) -> None:
    """Step by step over sorted lists of all continuations."""
    for seed, penalty in itertools.product(range(8), [0.5, 1.0, 2.0]):
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=5,
            length_penalty=penalty,
            early_stopping=early,  # type: ignore[arg-type]
        )
        found = run(BeamSearch(params, end_tokens=[END], max_new_tokens=5), seed)
        expected = by_definition(seed, width, penalty, early)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected])


def by_definition(
    seed: int, width: int, penalty: float, early: bool | str
) -> list[tuple[Tokens, float]]:
    running: list[tuple[Tokens, float]] = [((), 0.0)]
    finished: list[tuple[Tokens, float]] = []
    for length in range(1, 6):
        continued = [
            ((*tokens, token), total + table_of(seed, tokens).log_softmax(0)[token].item())
            for tokens, total in running
            for token in range(VOCAB)
        ]
        continued.sort(key=lambda pair: -pair[1])
        stops = [length == 5 or tokens[-1] == END for tokens, _ in continued]
        for (tokens, total), ends in list(zip(continued, stops, strict=True))[:width]:
            if ends:
                finished.append((tokens, total / length**penalty))
        finished = sorted(finished, key=lambda pair: -pair[1])[:width]
        running = [pair for pair, ends in zip(continued, stops, strict=True) if not ends][:width]
        if not running:
            break
        if len(finished) == width:
            reach = 5 if early == "never" else length
            if early is True or running[0][1] / reach**penalty <= finished[-1][1]:
                break
    return finished


def candidates(*pairs: tuple[int, float]) -> Candidates:
    tokens, logprobs = zip(*pairs, strict=True)
    values = np.array(logprobs, np.float32)
    return Candidates(np.array(tokens), values, values)


def beam(tokens: Tokens, total: float, parent: int = 0) -> Beam:
    return Beam(tokens, total, parent, total)


def test_one_step_by_hand() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9)
    search = BeamSearch(params, end_tokens=[END], max_new_tokens=9)
    assert search.num_candidates == 4
    search.advance([candidates((1, -0.5), (END, -1.0), (0, -1.5), (2, -2.0))])
    assert search.running == [beam((1,), -0.5), beam((0,), -1.5)]
    assert search.finished == [(beam((END,), -1.0), -1.0)]
    # Third of all is an end: too late to be a result, and nothing to go on from.
    search.advance(
        [
            candidates((0, -0.25), (2, -0.5), (END, -1.0), (1, -4.0)),
            candidates((2, -0.125), (END, -8.0), (0, -9.0), (1, -9.0)),
        ]
    )
    assert search.running == [beam((1, 0), -0.75), beam((1, 2), -1.0)]
    assert len(search.finished) == 1
    assert not search.done


def test_two_end_tokens_ask_for_three_times_the_beams() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=9, min_tokens=1)
    search = BeamSearch(params, end_tokens=[2, 3], max_new_tokens=9)
    assert search.num_candidates == 6
    assert sorted(search.banned_tokens) == [2, 3]
    search.advance([candidates((1, -0.5), (0, -1.5))])
    assert search.banned_tokens == ()


def test_a_search_that_is_done_takes_no_more() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=1)
    search = BeamSearch(params, end_tokens=[], max_new_tokens=1)
    with pytest.raises(ValueError, match="2 beams were proposed, 1 are running"):
        search.advance([candidates((1, -0.5))] * 2)
    search.advance([candidates((1, -0.5))])
    assert search.done
    with pytest.raises(ValueError, match="done"):
        search.advance([])


def test_proposals_are_ranked_and_ties_go_to_the_lower_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    before = logits.clone()
    first, second = propose(logits, 3, top=1)
    assert first is not None
    assert second is not None
    assert first.token_ids.tolist() == [1, 3, 2]
    assert first.logprobs.tolist() == logits.log_softmax(-1)[0, [1, 3, 2]].tolist()
    assert [entry.rank for entry in first.details] == [1, 2, 3]
    assert first.details[0].top == ((1, first.details[0].logprob),)
    assert second.token_ids.tolist() == [0, 1, 2]
    assert torch.equal(logits, before)


def test_banned_tokens_leave_the_others_as_they_are() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -torch.inf]])
    (found,) = propose(logits, 8, banned=[1, 99])
    assert found is not None
    assert found.token_ids.tolist() == [2, 0]
    assert found.logprobs.tolist() == logits.log_softmax(-1)[0, [2, 0]].tolist()
    (none,) = propose(logits, 8, banned=[0, 1, 2])
    assert none is not None
    assert len(none.token_ids) == len(none.scores) == 0


@pytest.mark.parametrize("bad", [[0, torch.nan, 1], [0, torch.inf, 1], [-torch.inf] * 3])
def test_logits_that_are_no_numbers(bad: list[float]) -> None:
    found = propose(torch.tensor([bad, [0.0, 1.0, 2.0]]), 2)
    assert found[0] is None
    assert found[1] is not None
    assert found[1].token_ids.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an int of at least 1"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2, "num_return_sequences": 3}, r"must not exceed beam_width \(2\)"),
        ({"beam_width": 2, "num_return_sequences": 0}, "at most beam_width"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": 6}, r"\[-5, 5\]"),
        ({"beam_width": 2, "early_stopping": "ever"}, 'True, False or "never"'),
        ({"beam_width": 2, "early_stopping": 1}, 'True, False or "never"'),
        ({"beam_width": 2, "min_tokens": 3, "max_tokens": 2}, "must not exceed max_tokens"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"beam_width": 2, "logprobs": -1}, "logprobs"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos"),
        ({"beam_width": 2, "repetition_penalty": 0}, "repetition_penalty"),
        ({"beam_width": 2, "allowed_token_ids": []}, "leaves no token to sample"),
        ({"beam_width": 2, "logit_bias": {1: 101}}, "each bias of logit_bias"),
        ({"beam_width": 2, "bad_words_ids": [[]]}, "bad_words_ids"),
        ({"beam_width": 2, "stop": [""]}, "stop"),
    ],
)
def test_parameters_are_checked(bad: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unknown", "message"),
    [
        ("num_beams", "use beam_width"),
        ("n", "use num_return_sequences"),
        ("temperature", "beams are not sampled"),
        ("stop_strings", "use stop"),
        ("max_new_tokens", "use max_tokens"),
        ("length_penality", "did you mean length_penalty"),
        ("frequency_penalty", "use repetition_penalty"),
    ],
)
def test_unknown_parameters_are_named(unknown: str, message: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=message):
        BeamSearchParams(beam_width=2, **{unknown: 1})


def test_values_become_plain() -> None:
    params = BeamSearchParams(
        beam_width=np.int64(3), length_penalty=2, stop_token_ids=range(2), logprobs=np.int32(1)
    )
    assert type(params.beam_width) is int
    assert params.length_penalty == 2.0
    assert params.stop_token_ids == (0, 1)
    assert hash(params) == hash(BeamSearchParams(**vars(params)))
