"""Sequences of tokens that must not be generated, found by what comes before their last token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from radixkv.errors import RequestError


class Encoder(Protocol):
    """The one method needed here; transformers' and tokenizers' classes both have it."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Any:
        """Turn text into token ids, or into an object that has them as ``ids``."""


def encode_words(words: Iterable[str], tokenizer: object) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences by which words come, at a text's beginning and behind a space.

    As in vLLM, spaces before a word are dropped and it is encoded without and with one. vLLM then
    drops the second if it has another length than the first, and so lets through what has a token
    of its own behind a space only; here it is dropped only if it ends with the first.

    Raises
    ------
    RequestError
        If the tokenizer cannot encode, or makes no token of a word.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        plain, spaced = (_encode(text, word, tokenizer) for text in (bare, " " + bare))
        found[plain] = None
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(found)


def _encode(text: str, word: str, tokenizer: object) -> tuple[int, ...]:
    if not hasattr(tokenizer, "encode"):
        raise RequestError("bad_words need a tokenizer that encodes; give bad_words_ids instead")
    encoder: Encoder = tokenizer
    encoded = encoder.encode(text, add_special_tokens=False)
    ids = getattr(encoded, "ids", encoded)
    # A tokenizer's own file may ask for padding, which is no part of the word.
    real = getattr(encoded, "attention_mask", [1] * len(ids))
    tokens = tuple(int(token) for token, kept in zip(ids, real, strict=True) if kept)
    if not tokens:
        raise RequestError(f"the tokenizer makes no token of {word!r}; leave it out of bad_words")
    return tokens


class BadWords:
    """Which tokens would complete a forbidden sequence. Immutable; shared by all branches.

    Asking costs one look-up for each length that the sequences have, however many there are.

    Parameters
    ----------
    sequences : iterable of tuple of int
        None of them empty.

    Attributes
    ----------
    reach : int
        Of how many tokens before it a completing token may depend.
    """

    __slots__ = ("_last", "_lengths", "reach")

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self._last: dict[tuple[int, ...], tuple[int, ...]] = {}
        for *head, last in sequences:
            self._last[tuple(head)] = (*self._last.get(tuple(head), ()), last)
        self._lengths = sorted({len(head) for head in self._last})
        self.reach = max(self._lengths, default=0)

    def behind(self, generated: Sequence[int]) -> list[int]:
        """The tokens that must not follow.

        Parameters
        ----------
        generated : sequence of int
            What was generated so far; its last ``reach`` tokens will do.
        """
        end = len(generated)
        return [
            token
            for length in self._lengths
            if length <= end
            for token in self._last.get(tuple(generated[end - length :]), ())
        ]
