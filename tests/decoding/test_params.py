"""SamplingParams refuses what cannot work, and says what would."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.decoding import SamplingParams
from radixkv.errors import RadixKVError, RequestError, UnsupportedParameterError


def test_defaults() -> None:
    expected = {
        "n": 1,
        "best_of": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "bad_words": (),
        "bad_words_ids": (),
        "allowed_token_ids": None,
        "json_schema": None,
        "json_object": False,
        "regex": None,
        "grammar": None,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
    }
    assert dataclasses.asdict(SamplingParams()) == expected
    assert list(inspect.signature(SamplingParams).parameters) == list(expected)


def test_values_are_brought_to_plain_types() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=1,
        top_p=np.float32(0.5),
        seed=np.uint64(2**64 - 1),
        stop=["a", "b", "a"],
        stop_token_ids=np.array([7, 7, 3]),
        logit_bias={np.int64(7): np.float32(0.5), 3: -100},
        bad_words="cat",
        bad_words_ids=[np.array([5, 5]), (4,), [5, 5]],
        allowed_token_ids=np.array([7, 7, 3]),
    )
    assert (params.n, params.seed) == (2, 2**64 - 1)
    assert type(params.n) is int
    assert type(params.seed) is int
    assert type(params.temperature) is float
    assert params.top_p == 0.5
    assert type(params.top_p) is float
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (7, 3)
    assert repr(params.logit_bias) == "{3: -100.0, 7: 0.5}"
    assert params.bad_words == ("cat",)
    assert params.bad_words_ids == ((5, 5), (4,))
    assert params.allowed_token_ids == (7, 3)
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=(s for s in "xy")).stop == ("x", "y")


def test_it_is_an_immutable_value() -> None:
    biases = {9: 1.0, 2: -100.0}
    params = SamplingParams(stop="x", top_k=5, logit_bias=biases, bad_words_ids=[[1, 2]])
    same = SamplingParams(stop=["x"], top_k=5, logit_bias={2: -100, 9: 1}, bad_words_ids=((1, 2),))
    assert params == same
    assert hash(params) == hash(same)
    assert dataclasses.replace(params, n=3) == dataclasses.replace(same, n=3)
    biases[9] = 2.0
    assert params.logit_bias == {2: -100.0, 9: 1.0}
    with pytest.raises(TypeError, match="does not support item assignment"):
        params.logit_bias[9] = 2.0  # type: ignore[index]
    for twin in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(RequestError, match="n must be an int of at least 1"):
        dataclasses.replace(params, n=0)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, "n must be an int of at least 1, got 0"),
        ({"n": True}, "n must be an int of at least 1, got True"),
        ({"n": np.True_}, "n must be an int of at least 1"),
        ({"n": 1.0}, "n must be an int of at least 1, got 1.0"),
        ({"n": None}, "n must be an int of at least 1, got None"),
        ({"best_of": 0}, "best_of must be an int of at least 1 (at least n), got 0"),
        ({"best_of": 2.0}, "best_of must be an int"),
        ({"n": 3, "best_of": 2}, "best_of (2) must be at least n (3)"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature 0 would sample the same"),
        ({"max_tokens": 0}, "max_tokens must be an int of at least 1, got 0"),
        ({"max_tokens": "5"}, "max_tokens must be an int of at least 1, got '5'"),
        ({"min_tokens": -1}, "min_tokens must be an int of at least 0, got -1"),
        ({"min_tokens": 17}, "min_tokens (17) must not exceed max_tokens (16)"),
        ({"temperature": -0.1}, "temperature must be a number in [0, inf) (0 is greedy), got -0.1"),
        (
            {"temperature": math.nan},
            "temperature must be a number in [0, inf) (0 is greedy), got nan",
        ),
        ({"temperature": math.inf}, "(0 is greedy), got inf"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"temperature": None}, "temperature must be a number"),
        ({"temperature": torch.tensor(1.0)}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be a number in (0, 1] (1 keeps all), got 0"),
        ({"top_p": 1.01}, "top_p must be a number in (0, 1] (1 keeps all), got 1.01"),
        ({"top_p": math.nan}, "top_p must be a number in (0, 1]"),
        ({"top_k": -1}, "top_k must be an int of at least 0 (0 keeps all), got -1"),
        ({"top_k": 2.5}, "top_k must be an int"),
        ({"min_p": -0.1}, "min_p must be a number in [0, 1] (0 keeps all), got -0.1"),
        ({"min_p": 1.5}, "min_p must be a number in [0, 1]"),
        (
            {"seed": -1},
            "seed must be an int from 0 to 18446744073709551615 (None draws a fresh one)",
        ),
        ({"seed": 2**64}, "seed must be an int from 0 to 18446744073709551615"),
        ({"seed": False}, "seed must be an int"),
        ({"stop": ""}, "stop must not hold an empty string"),
        ({"stop": ["a", ""]}, "stop must not hold an empty string"),
        ({"stop": ["a", 3]}, "stop must hold strings only, got 3"),
        ({"stop": 3}, "stop must be a string or a list of strings, got 3"),
        ({"stop": b"x"}, "stop must be a string or a list of strings, got b'x'"),
        ({"stop": None}, "stop must be a string or a list of strings, got None"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, got 3"),
        ({"stop_token_ids": "3"}, "stop_token_ids must be a list of token ids, got '3'"),
        ({"stop_token_ids": [-1]}, "each of stop_token_ids must be an int of at least 0, got -1"),
        ({"stop_token_ids": [True]}, "each of stop_token_ids must be an int of at least 0"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty must be a number in (0, inf) (1 changes nothing), got 0",
        ),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a number in (0, inf)"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be a number in (0, inf)"),
        (
            {"presence_penalty": 2.1},
            "presence_penalty must be a number in [-2, 2] (0 changes nothing), got 2.1",
        ),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be a number in [-2, 2]"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a number in [-2, 2]"),
        (
            {"logit_bias": [(1, 2.0)]},
            "logit_bias must be a mapping of token ids to biases, like {42: -100}, got [(1, 2.0)]",
        ),
        ({"logit_bias": None}, "logit_bias must be a mapping"),
        (
            {"logit_bias": {"7": 1}},
            "each token id of logit_bias must be an int of at least 0, got '7'",
        ),
        ({"logit_bias": {-1: 1}}, "each token id of logit_bias must be an int of at least 0"),
        (
            {"logit_bias": {1: 100.5}},
            "each bias of logit_bias must be a number in [-100, 100] (-100 forbids the token), "
            "got 100.5",
        ),
        ({"logit_bias": {1: -math.inf}}, "each bias of logit_bias must be a number in [-100, 100]"),
        ({"logit_bias": {1: math.nan}}, "each bias of logit_bias must be a number"),
        ({"bad_words": [""]}, "bad_words must not hold an empty string"),
        ({"bad_words": [3]}, "bad_words must hold strings only, got 3"),
        ({"bad_words_ids": [3]}, "each of bad_words_ids must be a list of token ids, got 3"),
        ({"bad_words_ids": 3}, "bad_words_ids must be a list of lists of token ids, got 3"),
        ({"bad_words_ids": [[]]}, "bad_words_ids must not hold an empty list"),
        ({"bad_words_ids": [[-1]]}, "each id of bad_words_ids must be an int of at least 0"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty, which leaves no token to sample"),
        ({"allowed_token_ids": 3}, "allowed_token_ids must be a list of token ids, got 3"),
        ({"allowed_token_ids": [-1]}, "each of allowed_token_ids must be an int of at least 0"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1"),
        ({"include_stop_str_in_output": None}, "include_stop_str_in_output must be True or False"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens must be True or False, got 'no'"),
        ({"logprobs": -1}, "logprobs must be an int of at least 0 (None for none"),
        ({"logprobs": True}, "logprobs must be an int of at least 0 (None for none"),
    ],
    ids=str,
)
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert message in str(caught.value)
    assert isinstance(caught.value, RadixKVError | ValueError)
    assert not isinstance(caught.value, UnsupportedParameterError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_beams", "use beam_width (BeamSearchParams)"),
        ("beam_width", "use beam_width (BeamSearchParams)"),
        ("max_new_tokens", "use max_tokens"),
        ("do_sample", "use temperature (0 is greedy; above 0 samples)"),
        ("num_return_sequences", "use n"),
        ("stop_strings", "use stop"),
        ("eos_token_id", "use stop_token_ids"),
        ("top_logprobs", "use logprobs"),
        ("temprature", "did you mean temperature?"),
        ("Top_K", "did you mean top_k?"),
        ("max_new_token", "did you mean max_tokens?"),
        ("repeat_penalty", "use repetition_penalty"),
        ("suppress_tokens", "use logit_bias (a bias of -100 forbids a token)"),
        ("presence_penality", "did you mean presence_penalty?"),
        ("no_repeat_ngram_size", "is not supported by this version"),
        ("typical_p", "is not supported by this version"),
        (
            "zzzz",
            "the parameters are allowed_token_ids, bad_words, bad_words_ids, best_of, frequen",
        ),
    ],
)
def test_unknown_keywords_name_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        SamplingParams(**{name: 1})
    assert str(caught.value).startswith("SamplingParams: ")
    assert repr(name) in str(caught.value)
    assert hint in str(caught.value)


def test_every_unknown_keyword_is_named_at_once() -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        SamplingParams(n=2, num_beams=4, temprature=0.5)  # type: ignore[call-arg]
    assert "num_beams" in str(caught.value)
    assert "temprature" in str(caught.value)


def test_a_tiny_temperature_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-300).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_aliases_and_refusals_never_shadow_a_parameter() -> None:
    from radixkv.decoding.unknown import ALIASES, NOT_YET

    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not names & (ALIASES.keys() | NOT_YET)
    assert not ALIASES.keys() & NOT_YET
