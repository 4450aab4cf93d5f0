"""What a request asks of the decoder, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from radixkv.decoding import checks
from radixkv.decoding.biases import TokenBiases
from radixkv.decoding.constraint import Constraint, constraint_of, grammar_text, schema_text
from radixkv.decoding.unknown import names_unknown_keywords
from radixkv.errors import RequestError

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would only overflow float32."""

MAX_SEED = 2**64 - 1

FLAGS = ("ignore_eos", "include_stop_str_in_output", "json_object", "skip_special_tokens")


@names_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. Immutable; derive another with `dataclasses.replace`.

    Parameters
    ----------
    n : int
        Continuations of the prompt, each sampled from its own stream of random numbers.
    best_of : int or None
        Sample so many, at least ``n``, and return the ``n`` with the highest mean log-probability
        a token, in this order; not with temperature 0, which would make all of them the same.
        None: all that are sampled are returned, in the order of their random numbers.
    max_tokens : int
        Most tokens of each continuation; the end token counts.
    min_tokens : int
        Tokens before which neither an end token nor a stop string ends a continuation.
    temperature : float
        Logits are divided by it; 0 (or anything under 1e-5) takes the likeliest token.
    top_p : float
        Keep the likeliest tokens whose probability sums to ``top_p``; 1 keeps all.
    top_k : int
        Keep the ``top_k`` likeliest tokens; 0 keeps all.
    min_p : float
        Keep tokens at least ``min_p`` times as likely as the likeliest; 0 keeps all.
    repetition_penalty : float
        Of each token in the prompt or generated so far, a positive logit is divided by it and a
        negative one multiplied; 1 changes nothing. As transformers defines it.
    presence_penalty, frequency_penalty : float
        In [-2, 2]. From the logit of each token generated so far (the prompt does not count) the
        first is subtracted once, the second as often as the token was generated.
    logit_bias : mapping of int to float
        Added to the logits of these token ids: in [-100, 100], and -100 forbids the token. Kept
        as an immutable mapping.
    bad_words : str or sequence of str
        Words never generated, at a text's beginning or behind a space; kept as a tuple.
    bad_words_ids : sequence of sequence of int
        The same by token ids: the last of each is forbidden where the others were generated just
        before it.
    allowed_token_ids : sequence of int or None
        The only tokens that may be sampled, so add the end token if it shall be one of them;
        None: all.
    json_schema : str, mapping, pydantic model's class, or None
        The text is JSON that is valid by this schema, on one line, with its properties in the
        schema's order. A schema of which a grammar cannot promise all is refused. Kept as JSON.
    json_object : bool
        The text is some JSON object.
    regex : str or None
        The whole text matches this regular expression.
    grammar : str or None
        The text follows these rules in GBNF, as llama.cpp has it, from the rule ``root``. Of
        ``json_schema``, ``json_object``, ``regex`` and ``grammar`` one at the most is given.
    seed : int or None
        The same seed gives the same tokens, whatever else is in the batch. None: fresh entropy.
    stop : str or sequence of str
        Text that ends a continuation; kept as a tuple.
    stop_token_ids : sequence of int
        Tokens that end a continuation, besides the model's own; kept as a tuple.
    ignore_eos : bool
        Go on after the model's end token.
    include_stop_str_in_output : bool
        Leave the stop string that matched at the end of the text.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    logprobs : int or None
        None: none. 0: log-probability and rank of each sampled token. k: also the k likeliest.
        They are those of the model's own distribution, before temperature and filters.
    prompt_logprobs : int or None
        None: none. 0: log-probability and rank of each token of the prompt but the first. k: also
        the k likeliest. Tokens that are cached are read again for it, but not computed again.

    Raises
    ------
    RequestError
        A value that cannot work; the message says what would.
    UnsupportedParameterError
        A keyword that is not a parameter; the message names the nearest one that is.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = TokenBiases({})
    bad_words: str | Sequence[str] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    json_schema: str | Mapping[str, Any] | type | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every value and bring it to its plain type (numpy scalars are welcome)."""
        plain = {**self._plain_lengths(), **self._plain_filters(), **self._plain_edits()}
        plain |= self._plain_grammars()
        if self.seed is not None:
            hint = "None draws a fresh one"
            plain["seed"] = checks.integer("seed", self.seed, low=0, high=MAX_SEED, hint=hint)
        if self.logprobs is not None:
            hint = "None for none, 0 for the sampled token's, k for the k likeliest beside it"
            plain["logprobs"] = checks.integer("logprobs", self.logprobs, low=0, hint=hint)
        if self.prompt_logprobs is not None:
            hint = "None for none, 0 for each token's own, k for the k likeliest beside it"
            plain["prompt_logprobs"] = checks.integer(
                "prompt_logprobs", self.prompt_logprobs, low=0, hint=hint
            )
        for name in FLAGS:
            checks.boolean(name, getattr(self, name))
        for name, value in plain.items():
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of ({self.best_of}) must be at least n ({self.n}): so many are sampled, and "
                "n of them returned"
            )
        if self.ranked and self.greedy:
            raise RequestError(
                f"best_of={self.best_of} with temperature 0 would sample the same text each time; "
                "set a temperature, or leave best_of out"
            )
        _ = self.constraint  # What it refuses is refused now.

    def _plain_lengths(self) -> dict[str, object]:
        return {
            "best_of": self.best_of
            if self.best_of is None
            else checks.integer("best_of", self.best_of, low=1, hint="at least n"),
            "n": checks.integer("n", self.n, low=1),
            "max_tokens": checks.integer("max_tokens", self.max_tokens, low=1),
            "min_tokens": checks.integer("min_tokens", self.min_tokens, low=0),
            "stop": checks.strings("stop", self.stop),
            "stop_token_ids": checks.token_ids("stop_token_ids", self.stop_token_ids),
        }

    def _plain_filters(self) -> dict[str, object]:
        return {
            "temperature": checks.number("temperature", self.temperature, 0, hint="0 is greedy"),
            "top_p": checks.number("top_p", self.top_p, 0, 1, open_low=True, hint="1 keeps all"),
            "top_k": checks.integer("top_k", self.top_k, low=0, hint="0 keeps all"),
            "min_p": checks.number("min_p", self.min_p, 0, 1, hint="0 keeps all"),
        }

    def _plain_edits(self) -> dict[str, object]:
        plain: dict[str, object] = {
            "repetition_penalty": checks.number(
                "repetition_penalty",
                self.repetition_penalty,
                0,
                open_low=True,
                hint="1 changes nothing",
            ),
            "logit_bias": TokenBiases(self.logit_bias),
            "bad_words": checks.strings("bad_words", self.bad_words),
            "bad_words_ids": checks.token_sequences("bad_words_ids", self.bad_words_ids),
        }
        for name in ("presence_penalty", "frequency_penalty"):
            plain[name] = checks.number(name, getattr(self, name), -2, 2, hint="0 changes nothing")
        if self.allowed_token_ids is not None:
            allowed = checks.token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError(
                    "allowed_token_ids is empty, which leaves no token to sample; "
                    "None allows all of them"
                )
            plain["allowed_token_ids"] = allowed
        return plain

    def _plain_grammars(self) -> dict[str, object]:
        plain: dict[str, object] = {}
        if self.json_schema is not None:
            plain["json_schema"] = schema_text(self.json_schema)
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                plain[name] = grammar_text(name, value)
        return plain

    @property
    def constraint(self) -> Constraint | None:
        """What the text must obey, ready to be compiled; None if anything goes."""
        return constraint_of(
            json_schema=cast("str | None", self.json_schema),
            regex=self.regex,
            grammar=self.grammar,
            json_object=self.json_object,
        )

    @property
    def ranked(self) -> bool:
        """Whether the continuations are compared when all have ended."""
        return self.best_of is not None and self.best_of > 1

    def for_branches(self) -> SamplingParams:
        """What each continuation obeys: the same, with the log-probabilities that ranking needs."""
        return replace(self, logprobs=0) if self.ranked and self.logprobs is None else self

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW
