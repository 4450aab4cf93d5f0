"""What to tell a user who passes a parameter by a name that we do not know."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from radixkv.errors import UnsupportedParameterError

# Other engines' names, and what to write here instead.
ALIASES: Mapping[str, str] = {
    "beam_size": "beam_width (BeamSearchParams)",
    "beam_width": "beam_width (BeamSearchParams)",
    "do_sample": "temperature (0 is greedy; above 0 samples)",
    "early_stopping": "early_stopping (BeamSearchParams)",
    "eos_token_id": "stop_token_ids",
    "generator": "seed",
    "greedy": "temperature=0",
    "ignore_eos_token": "ignore_eos",
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
    "return_logprob": "logprobs",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "top_logprobs": "logprobs",
    "top_logprobs_num": "logprobs",
    "use_beam_search": "beam_width (BeamSearchParams)",
}

# Names that other engines honour and this version does not: refused, never ignored.
NOT_YET = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "bad_words_ids",
        "best_of",
        "frequency_penalty",
        "grammar",
        "guided_decoding",
        "json_schema",
        "logit_bias",
        "logits_processor",
        "logits_processors",
        "no_repeat_ngram_size",
        "presence_penalty",
        "prompt_logprobs",
        "regex",
        "repetition_penalty",
        "response_format",
        "sequence_bias",
        "structured_outputs",
        "suppress_tokens",
        "typical_p",
    }
)


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise if any given name is unknown.

    Parameters
    ----------
    owner : str
        Name of the class that was called, for the message.
    given, known : iterable of str
        Names that were passed, and names that exist.

    Raises
    ------
    UnsupportedParameterError
        Naming every unknown parameter and, for each, the nearest one that exists.
    """
    names = sorted(known)
    hints = [_hint(name, names) for name in given if name not in names]
    if hints:
        raise UnsupportedParameterError(f"{owner}: " + "; ".join(hints))


def _hint(name: str, known: list[str]) -> str:
    if name in NOT_YET:
        return f"{name!r} is not supported by this version; leave it out"
    if name in ALIASES:
        return f"{name!r} is not a parameter here; use {ALIASES[name]}"
    near = difflib.get_close_matches(name.lower(), [*known, *ALIASES], n=1, cutoff=0.6)
    if near:
        return f"unknown parameter {name!r}; did you mean {ALIASES.get(near[0], near[0])}?"
    return f"unknown parameter {name!r}; the parameters are {', '.join(known)}"
