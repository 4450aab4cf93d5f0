"""Helpers of the tests of grammars: tiny vocabularies, and regular languages by derivatives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.decoding import GrammarCompiler, GrammarState

EOS = "<eos>"


def tokenizer_of(*tokens: str, end: str = EOS) -> PreTrainedTokenizerFast:
    """A tokenizer whose vocabulary is these tokens in order, in byte-level letters, and an end."""
    vocabulary = {token: place for place, token in enumerate((*tokens, end))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end)


def compiler_of(*tokens: str, vocab_size: int = 0) -> GrammarCompiler:
    return GrammarCompiler(tokenizer_of(*tokens), vocab_size or len(tokens) + 1)


def allowed_ids(state: GrammarState) -> set[int]:
    """The tokens that a state allows."""
    bits = np.unpackbits(state.allowed.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


class Regex(NamedTuple):
    """A regular language that is not empty, and how `re` writes it.

    ``kind`` is "empty" (the empty text alone), "letter", "then", "or" or "star".
    """

    kind: str
    parts: tuple[Regex, ...] = ()
    letter: str = ""

    @property
    def pattern(self) -> str:
        if self.kind == "letter":
            return self.letter
        if self.kind == "star":
            return f"(?:{self.parts[0].pattern})*"
        joint = "|" if self.kind == "or" else ""
        return f"(?:{joint.join(part.pattern for part in self.parts)})"

    @property
    def may_end(self) -> bool:
        """Whether the empty text belongs to it."""
        if self.kind == "or":
            return any(part.may_end for part in self.parts)
        return self.kind in ("empty", "star") or (
            self.kind == "then" and all(part.may_end for part in self.parts)
        )

    def behind(self, letter: str) -> frozenset[Regex]:
        """Languages of which one must follow a letter; none if that cannot come.

        Antimirov's partial derivatives: a language has no more of them than letters.
        """
        if self.kind == "letter":
            return frozenset({EMPTY} if letter == self.letter else ())
        if self.kind == "or":
            return frozenset().union(*(part.behind(letter) for part in self.parts))
        if self.kind == "star":
            return frozenset(then(rest, self) for rest in self.parts[0].behind(letter))
        if self.kind == "empty":
            return frozenset()
        first, others = self.parts[0], then(*self.parts[1:])
        found = frozenset(then(rest, others) for rest in first.behind(letter))
        return found | others.behind(letter) if first.may_end else found


def behind(language: Regex, text: str) -> frozenset[Regex]:
    """Languages of which one must follow a text; none if that is no beginning."""
    found = frozenset({language})
    for letter in text:
        found = frozenset().union(*(each.behind(letter) for each in found))
    return found


EMPTY = Regex("empty")


def letter(character: str) -> Regex:
    return Regex("letter", (), character)


def star(part: Regex) -> Regex:
    return Regex("star", (part,))


def then(*parts: Regex) -> Regex:
    kept: list[Regex] = []
    for part in parts:
        kept += part.parts if part.kind == "then" else () if part == EMPTY else (part,)
    return kept[0] if len(kept) == 1 else Regex("then", tuple(kept)) if kept else EMPTY


def either(*parts: Regex) -> Regex:
    return Regex("or", parts)
