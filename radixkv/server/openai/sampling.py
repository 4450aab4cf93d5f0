"""Fields to the engine's own parameters, which check their values themselves."""

from __future__ import annotations

import json
from typing import Any

from radixkv.cache import DEFAULT_RETENTION, EPHEMERAL, Retention
from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.engine.beams import Params
from radixkv.errors import RequestError, UnsupportedParameterError
from radixkv.llm import LLM
from radixkv.server.openai.fields import ResponseFormat, SharedFields, StructuredOutputs

SAME = (
    "min_tokens",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
OF_SAMPLES = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "prompt_logprobs",
)
OF_BEAMS = ("beam_width", "length_penalty", "early_stopping")

# Policies that look at a hint, see `radixkv.cache.policies`.
KNOW_EPHEMERAL = ("lru", "priority")
KNOW_TIME = ("priority",)


def num_branches(body: SharedFields) -> int:
    """Continuations of a prompt that run at a time."""
    if body.use_beam_search:
        return body.beam_width or body.n or 1
    return max(body.best_of or 1, body.n or 1)


def make_params(body: SharedFields, *, max_tokens: int, logprobs: int | None) -> Params:
    """What each prompt of a request asks of the decoder.

    Raises
    ------
    RequestError
        A value that cannot work, or fields that exclude each other.
    """
    given = _given(body, SAME) | {"max_tokens": max_tokens, "logprobs": logprobs}
    if body.logit_bias is not None:
        given["logit_bias"] = _biases(body.logit_bias)
    if body.use_beam_search:
        return _beams(body, given)
    if misplaced := _given(body, OF_BEAMS):
        raise RequestError(f"{', '.join(misplaced)} needs use_beam_search: true")
    given |= _given(body, OF_SAMPLES)
    if body.top_k is not None:
        given["top_k"] = max(body.top_k, 0) if body.top_k >= -1 else body.top_k  # -1: all
    return SamplingParams(**given, **_constraints(body))


def _beams(body: SharedFields, given: dict[str, Any]) -> BeamSearchParams:
    samples = _given(body, (*OF_SAMPLES, "top_k")) | _constraints(body)
    count = samples.pop("n", 1)
    given |= {"beam_width": count, "num_return_sequences": count} | _given(body, OF_BEAMS)
    if samples.pop("prompt_logprobs", None) is not None:
        raise UnsupportedParameterError("prompt_logprobs is not supported with use_beam_search")
    return BeamSearchParams(**given, **samples)


def _given(body: SharedFields, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        wrong = next(token for token in biases if not token.lstrip("-").isdecimal())
        raise RequestError(f"logit_bias: {wrong!r} is no token id") from None


def _constraints(body: SharedFields) -> dict[str, Any]:
    """The grammars among the fields, by the names of SamplingParams; at most one of each kind."""
    found: list[tuple[str, str, Any]] = []
    for field, name in (
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_grammar", "grammar"),
    ):
        if (value := getattr(body, field)) is not None:
            found.append((field, name, value))
    if body.guided_choice is not None:
        found.append(("guided_choice", "grammar", one_of(body.guided_choice)))
    if body.response_format is not None:
        found += _of_format(body.response_format)
    if body.structured_outputs is not None:
        found += _of_structured(body.structured_outputs)
    if len(found) > 1:
        names = " and ".join(field for field, _, _ in found)
        raise RequestError(f"{names} exclude each other; a text obeys one of them")
    return {name: value for _, name, value in found}


def _of_format(wanted: ResponseFormat) -> list[tuple[str, str, Any]]:
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise RequestError("response_format: json_schema is missing")
        return [("response_format", "json_schema", wanted.json_schema.schema_)]
    if wanted.json_schema is not None:
        raise RequestError(f'response_format: json_schema does not go with type "{wanted.type}"')
    return [("response_format", "json_object", True)] if wanted.type == "json_object" else []


def _of_structured(wanted: StructuredOutputs) -> list[tuple[str, str, Any]]:
    given = {
        "json_schema": wanted.json_,
        "json_object": wanted.json_object or None,
        "regex": wanted.regex,
        "grammar": None if wanted.choice is None else one_of(wanted.choice),
    }
    found = [("structured_outputs", name, value) for name, value in given.items()]
    if wanted.grammar is not None:
        found.append(("structured_outputs", "grammar", wanted.grammar))
    return [entry for entry in found if entry[2] is not None]


def one_of(choices: list[str]) -> str:
    """A grammar of which each text is one of these."""
    if not choices or not all(choices):
        raise RequestError("choice must hold at least one text, and no empty one")
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def make_retention(body: SharedFields, llm: LLM) -> Retention:
    """How long the request's blocks are wanted.

    Raises
    ------
    UnsupportedParameterError
        If the cache's eviction policy would not look at it.
    """
    wanted, policy = body.cache_retention, llm.cache.config.eviction
    if wanted is None or wanted == "default":
        return DEFAULT_RETENTION
    looks = KNOW_EPHEMERAL if wanted == "ephemeral" else KNOW_TIME
    if isinstance(policy, str) and policy not in looks:
        raise UnsupportedParameterError(
            f"cache_retention {wanted!r} means nothing to the eviction policy {policy!r}; leave it "
            f"out, or start the server with --eviction {looks[-1]}"
        )
    return EPHEMERAL if wanted == "ephemeral" else Retention.for_seconds(float(wanted))
