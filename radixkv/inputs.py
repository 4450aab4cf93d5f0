"""Prompts, conversations and parameters as users give them: one, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, cast

from radixkv.decoding import BeamSearchParams, SamplingParams
from radixkv.engine.beams import Params
from radixkv.errors import RequestError

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


def as_conversations(
    conversations: Conversation | Sequence[Conversation],
) -> list[Conversation]:
    """A list of conversations, also of one."""
    if len(conversations) and isinstance(conversations[0], Mapping):
        return [cast(Conversation, conversations)]
    return list(cast("Sequence[Conversation]", conversations))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, also of one: a text, or token ids."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def params_for(
    prompts: Sequence[object],
    params: Params | Sequence[Params] | None,
    seed: int | None,
) -> list[Params]:
    """One set of parameters a prompt, with the seed filled in where none was given."""
    if params is None or isinstance(params, SamplingParams | BeamSearchParams):
        params = [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(f"{len(prompts)} prompts, but {len(params)} SamplingParams")
    return [_seeded(its, seed, index) for index, its in enumerate(params)]


def _seeded(params: Params, seed: int | None, index: int) -> Params:
    if isinstance(params, BeamSearchParams) or seed is None or params.seed is not None:
        return params
    return replace(params, seed=(seed + index) % 2**64)
