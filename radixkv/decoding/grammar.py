"""Grammars: compiled for a vocabulary, and how far a text has come in one.

xgrammar does the work: a pushdown automaton over bytes, with masks over the vocabulary computed
ahead (Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large
Language Models", 2024). It is imported with the first grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from radixkv.decoding.vocabulary import Mask, Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher


class Grammar:
    """A grammar that was compiled for a vocabulary. Immutable; shared by all that obey it.

    Parameters
    ----------
    compiled : xgrammar.CompiledGrammar
        For a vocabulary of one token more than the model's, which alone ends a text: so whatever
        xgrammar allows of the model's own tokens it allows as text.
    vocabulary : Vocabulary
    tokens : (words,) int32
        Those of its tokens that may come at all.
    """

    __slots__ = ("compiled", "tokens", "vocabulary")

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary, tokens: Mask) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.tokens = tokens

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return int(self.compiled.memory_size_bytes)

    def start(self, end_tokens: Iterable[int] = ()) -> GrammarState:
        """The state of an empty text.

        Parameters
        ----------
        end_tokens : iterable of int
            Tokens that end a text and are no part of it.
        """
        from xgrammar import GrammarMatcher

        return GrammarState(self, GrammarMatcher(self.compiled), end_tokens)


class GrammarState:
    """How far one text has come in its grammar, and what may follow.

    Parameters
    ----------
    grammar : Grammar
    matcher : xgrammar.GrammarMatcher
        At its beginning.
    end_tokens : iterable of int

    Attributes
    ----------
    allowed : (words,) int32
        Tokens that may come next, packed: those whose text the grammar can go on with and, where
        the text may end, the end tokens, which are allowed nowhere else.
    complete : bool
        Whether the text may end here.
    ended : bool
        Whether it may end here, and no text can follow.
    """

    __slots__ = ("_ends", "_matcher", "_texts", "_vocabulary", "allowed", "complete", "ended")

    def __init__(
        self, grammar: Grammar, matcher: GrammarMatcher, end_tokens: Iterable[int]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = grammar.vocabulary
        self._ends = grammar.vocabulary.packed(end_tokens)
        self._texts: Mask = grammar.tokens & ~self._ends
        self._look(self._texts)

    def push(self, token_id: int) -> None:
        """Go on by a token of text, one of those allowed.

        Raises
        ------
        RuntimeError
            If the grammar does not allow it.
        """
        if not self._matcher.accept_token(token_id):
            raise RuntimeError(f"the grammar does not allow token {token_id} here")
        broken = self._vocabulary.broken_behind.get(token_id)
        self._look(self._texts if broken is None else self._texts & ~broken)

    def copy(self) -> GrammarState:
        """Return an independent copy, for a branch that goes on with other tokens."""
        twin = object.__new__(GrammarState)
        for name in GrammarState.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._matcher = self._matcher.fork()
        return twin

    def _look(self, possible: Mask) -> None:
        row = np.zeros((1, len(possible)), np.int32)
        self._matcher.fill_next_token_bitmask(row)
        texts: Mask = row[0] & possible
        self.complete = bool(self._matcher.is_completed())
        self.ended = self.complete and not texts.any()
        self.allowed: Mask = texts | self._ends if self.complete else texts


def forbid_all_but(logits: Tensor, allowed: Sequence[tuple[int, Mask]]) -> None:
    """Set what rows' masks do not allow to -inf, for all of them at once.

    xgrammar's own operator for CPUs (0.2.9) writes behind the last row of some small vocabularies,
    so the bits are unpacked here.

    Parameters
    ----------
    logits : (rows, vocab) float32
        Changed in place, in the rows that are named; other rows are not read.
    allowed : sequence of (row, mask)
        Bits that a mask has no word for are not allowed.
    """
    packed = np.stack([mask for _, mask in allowed]).view(np.uint8)
    bits = np.unpackbits(packed, axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    if len(allowed) == len(logits):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = torch.tensor([row for row, _ in allowed], device=logits.device)
    logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)
