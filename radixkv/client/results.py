"""What comes of generations, scores and choices, and what a context holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class TokenLogprobs(NamedTuple):
    """As `radixkv.decoding.TokenLogprobs`: of one token, and of its alternatives.

    Parameters
    ----------
    logprob : float
    rank : int
        From 1.
    top : tuple of (token id, log-probability)
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What a generation gave; the names are those of `RequestOutput` and `Completion`.

    Attributes
    ----------
    text : str
    token_ids : tuple of int
        All tokens that were sampled.
    finish_reason : str
        "stop" or "length".
    stop_reason : str, int or None
        The stop string or stop token that ended it.
    logprobs : tuple of TokenLogprobs
        One a sampled token.
    prompt_logprobs : tuple of (TokenLogprobs or None), or None
        One a token before it, if they were asked for.
    num_prompt_tokens, num_cached_tokens : int
        Tokens before it, and those of them that did not have to be computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_prompt_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Output:
        """From the server's JSON."""
        prompt = result["prompt_logprobs"]
        return cls(
            text=result["text"],
            token_ids=tuple(result["token_ids"]),
            finish_reason=result["finish_reason"],
            stop_reason=result["stop_reason"],
            logprobs=tuple(_logprobs(entry) for entry in result["logprobs"]),
            prompt_logprobs=None
            if prompt is None
            else tuple(None if entry is None else _logprobs(entry) for entry in prompt),
            num_prompt_tokens=result["num_prompt_tokens"],
            num_cached_tokens=result["num_cached_tokens"],
        )


@dataclass(frozen=True, slots=True)
class Score:
    """What the model thinks of a text behind a context.

    Attributes
    ----------
    token_ids : tuple of int
    logprobs : tuple of float
        One a token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Score:
        """From the server's JSON."""
        return cls(tuple(result["token_ids"]), floats(result["logprobs"]))

    @property
    def total(self) -> float:
        """Log-probability of the whole text."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The same a token, so that texts of different lengths can be compared."""
        return self.total / len(self.logprobs)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of several texts a context went on with.

    Attributes
    ----------
    index : int
    text : str
        The option itself; empty if it was given as tokens.
    scores : tuple of Score
        Of all options, in order.
    """

    index: int
    text: str
    scores: tuple[Score, ...]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Choice:
        """From the server's JSON."""
        return cls(result["index"], result["text"], tuple(map(Score.of, result["scores"])))


@dataclass(frozen=True, slots=True)
class ContextStats:
    """What a context holds on the server, now; see `radixkv.programs.ContextStats`."""

    num_tokens: int
    num_computed: int
    shared_blocks: int
    own_blocks: int


def floats(values: Iterable[float | None]) -> tuple[float, ...]:
    """Log-probabilities; JSON has no infinities, so a token that cannot be has None."""
    return tuple(-math.inf if value is None else value for value in values)


def _logprobs(entry: Mapping[str, Any]) -> TokenLogprobs:
    tokens, values = [token for token, _ in entry["top"]], [value for _, value in entry["top"]]
    top = tuple(zip(tokens, floats(values), strict=True))
    return TokenLogprobs(floats([entry["logprob"]])[0], entry["rank"], top)
