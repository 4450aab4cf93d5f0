"""What to tell a user who passes a parameter by a name that we do not know."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import TypeVar

from radixkv.errors import UnsupportedParameterError

T = TypeVar("T")

# Other engines' names, and what to write here instead.
ALIASES: Mapping[str, str] = {
    "beam_size": "beam_width (BeamSearchParams)",
    "beam_width": "beam_width (BeamSearchParams)",
    "do_sample": "temperature (0 is greedy; above 0 samples)",
    "early_stopping": "early_stopping (BeamSearchParams)",
    "eos_token_id": "stop_token_ids",
    "format": "json_schema (or json_object, regex, grammar)",
    "generator": "seed",
    "greedy": "temperature=0",
    "guided_choice": "regex (as in 'yes|no')",
    "guided_decoding": "json_schema, regex or grammar",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "ebnf": "grammar",
    "ignore_eos_token": "ignore_eos",
    "json_mode": "json_object",
    "length_penalty": "length_penalty (BeamSearchParams)",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens (which counts new tokens only)",
    "max_new_tokens": "max_tokens",
    "min_length": "min_tokens (which counts new tokens only)",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "num_beams": "beam_width (BeamSearchParams)",
    "num_return_sequences": "n",
    "num_samples": "n",
    "output_logits": "logprobs",
    "output_scores": "logprobs",
    "random_seed": "seed",
    "repeat_penalty": "repetition_penalty",
    "response_format": "json_schema (a schema) or json_object=True",
    "return_logprob": "logprobs",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "structured_outputs": "json_schema, regex or grammar",
    "suppress_tokens": "logit_bias (a bias of -100 forbids a token)",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "use_beam_search": "beam_width (BeamSearchParams)",
}

# What differs for one class.
OWN_ALIASES: Mapping[str, Mapping[str, str]] = {
    "BeamSearchParams": {
        "beam_size": "beam_width",
        "best_of": "beam_width (and num_return_sequences)",
        "n": "num_return_sequences",
        "num_beams": "beam_width",
        "num_samples": "num_return_sequences",
        "use_beam_search": "beam_width",
        **dict.fromkeys(
            ("do_sample", "min_p", "seed", "temperature", "top_k", "top_p"),
            "SamplingParams (beams are not sampled)",
        ),
        **dict.fromkeys(
            ("grammar", "json_object", "json_schema", "regex"),
            "SamplingParams (beams follow no grammar: they rank what the model itself would say)",
        ),
        **dict.fromkeys(
            ("frequency_penalty", "presence_penalty"),
            "repetition_penalty (the others are for samples)",
        ),
    },
}

# Names that other engines honour and this version does not: refused, never ignored.
NOT_YET = frozenset(
    {
        "logits_processor",
        "logits_processors",
        "no_repeat_ngram_size",
        "sequence_bias",
        "typical_p",
    }
)


def names_unknown_keywords(cls: type[T]) -> type[T]:
    """Decorate a dataclass so that an unknown keyword names the nearest one that exists.

    The signature stays what the dataclass made it, for `inspect` and for type checkers.

    Raises
    ------
    UnsupportedParameterError
        From the decorated class, naming every unknown keyword and what to write instead.
    """
    made = cls.__init__
    known = sorted(name for name in inspect.signature(made).parameters if name != "self")
    aliases = {**ALIASES, **OWN_ALIASES.get(cls.__name__, {})}

    @functools.wraps(made)
    def init(self: T, *args: object, **given: object) -> None:
        hints = [_hint(name, known, aliases) for name in given if name not in known]
        if hints:
            raise UnsupportedParameterError(f"{cls.__name__}: " + "; ".join(hints))
        made(self, *args, **given)

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    return cls


def _hint(name: str, known: list[str], aliases: Mapping[str, str]) -> str:
    if name in NOT_YET:
        return f"{name!r} is not supported by this version; leave it out"
    if name in aliases:
        return f"{name!r} is not a parameter here; use {aliases[name]}"
    near = difflib.get_close_matches(name.lower(), [*known, *aliases], n=1, cutoff=0.6)
    if near:
        return f"unknown parameter {name!r}; did you mean {aliases.get(near[0], near[0])}?"
    return f"unknown parameter {name!r}; the parameters are {', '.join(known)}"
