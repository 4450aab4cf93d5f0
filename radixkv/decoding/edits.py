"""What a request changes in its logits before a token is chosen, and what that depends on.

`EditRules` is made once a request; `LogitEdits` goes with each of its branches and grows with it.
What they say is carried out by `apply_edits`, for a whole batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.decoding import checks
from radixkv.decoding.badwords import BadWords, encode_words
from radixkv.decoding.biases import BAN
from radixkv.decoding.counts import NO_IDS, Ids, TokenCounts
from radixkv.decoding.params import SamplingParams

Values = NDArray[np.float32]


class EditRules:
    """The part of a request's edits that does not change as it is generated. Immutable.

    Parameters
    ----------
    params : SamplingParams
    prompt : (tokens,) int array
    tokenizer : object, optional
        With an ``encode``, for ``bad_words``.

    Raises
    ------
    RequestError
        If there are bad words, and no tokenizer that makes tokens of them.
    """

    __slots__ = (
        "allowed",
        "bad_words",
        "biased",
        "biases",
        "counts_tokens",
        "forbidden",
        "params",
        "prompt",
    )

    def __init__(
        self, params: SamplingParams, prompt: NDArray[np.integer[Any]], tokenizer: object = None
    ) -> None:
        self.params = params
        words = encode_words(params.bad_words, tokenizer)
        sequences = (*words, *map(tuple, params.bad_words_ids))
        self.bad_words = BadWords(sequences) if sequences else None
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        bias = params.logit_bias
        self.forbidden = _ids(token for token in bias if bias[token] == BAN)
        self.biased = _ids(token for token in bias if bias[token] != BAN)
        self.biases: Values = np.array([bias[token] for token in self.biased.tolist()], np.float32)
        repeats = params.repetition_penalty != 1
        self.prompt = np.unique(prompt).astype(np.int64) if repeats else NO_IDS
        self.counts_tokens = repeats or bool(params.presence_penalty or params.frequency_penalty)


class LogitEdits:
    """The edits of one continuation: its request's rules, and what it has generated so far.

    Parameters
    ----------
    rules : EditRules
    behind : sequence of int
        Tokens that stand before all generated ones, with which bad words may begin; the last few
        will do.
    """

    __slots__ = ("_tail", "counts", "rules")

    def __init__(self, rules: EditRules, behind: Iterable[int] = ()) -> None:
        self.rules = rules
        self.counts = TokenCounts(rules.prompt) if rules.counts_tokens else None
        self._tail = deque(behind, maxlen=rules.bad_words.reach if rules.bad_words else 0)

    def push(self, token_id: int) -> None:
        """Note a generated token; O(1) amortised."""
        if self.counts is not None:
            self.counts.add(token_id)
        self._tail.append(token_id)

    def copy(self) -> LogitEdits:
        """Return an independent copy, for a branch that goes on with other tokens."""
        twin = object.__new__(LogitEdits)
        twin.rules = self.rules
        twin.counts = self.counts and self.counts.copy()
        twin._tail = self._tail.copy()
        return twin

    @property
    def forbidden(self) -> Ids:
        """Tokens that must not come next by a bias of -100 or as the end of a bad word: int64."""
        rules = self.rules
        bad = rules.bad_words.behind(tuple(self._tail)) if rules.bad_words else ()
        return np.concatenate((rules.forbidden, _ids(bad))) if bad else rules.forbidden


def logit_edits(
    params: SamplingParams,
    prompt: NDArray[np.integer[Any]],
    *,
    vocab_size: int,
    tokenizer: object = None,
    words_begin_in_prompt: bool = False,
) -> LogitEdits | None:
    """The edits of a fresh request's first branch, to be copied for the others; None for none.

    Parameters
    ----------
    params : SamplingParams
    prompt : (tokens,) int array
    vocab_size : int
        Token ids lie in ``[0, vocab_size)``.
    tokenizer : object, optional
        With an ``encode``, for ``bad_words``.
    words_begin_in_prompt : bool
        Whether the prompt's last tokens may be the beginning of a bad word, as in transformers;
        vLLM lets them count for none.

    Raises
    ------
    RequestError
        If a token id lies outside the vocabulary, or bad words cannot be turned into tokens.
    """
    named = {
        "logit_bias": params.logit_bias,
        "bad_words_ids": [token for sequence in params.bad_words_ids for token in sequence],
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    for name, ids in named.items():
        checks.in_vocabulary(name, ids, vocab_size)
    penalties = (
        params.repetition_penalty != 1,
        params.presence_penalty != 0,
        params.frequency_penalty != 0,
    )
    if not (any(penalties) or any(map(len, named.values())) or params.bad_words):
        return None
    rules = EditRules(params, prompt, tokenizer)
    reach = rules.bad_words.reach if rules.bad_words and words_begin_in_prompt else 0
    return LogitEdits(rules, prompt[max(len(prompt) - reach, 0) :].tolist())


def _ids(tokens: Iterable[int]) -> Ids:
    return np.array(list(tokens), np.int64)
