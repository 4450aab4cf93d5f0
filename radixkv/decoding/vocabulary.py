"""The text of each token, for grammars: what a tokenizer's names of tokens stand for.

A grammar speaks of bytes, a model of tokens. xgrammar reads from a tokenizer of transformers how
its vocabulary is spelt; that is checked here against what the tokenizer itself decodes, because a
vocabulary that is read in the wrong spelling gives text that the grammar never allowed. Special
tokens have no text.

Two kinds of text are kept out on top of what a grammar says, because xgrammar lets them in: control
characters in JSON's strings of limited length, and bytes that are no UTF-8 (surrogates, and what
negated classes match).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.errors import UnsupportedParameterError

SAMPLE = 2048
"""Tokens whose text is checked, spread over the vocabulary; a smaller one is checked whole."""

CONTROL = re.compile(rb"[\x00-\x1f]")
# First bytes of a character, and the second bytes behind them that make it none.
BROKEN = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
LEADS = frozenset(bytes([lead]) for lead in BROKEN)
NO_CHARACTER = re.compile(b"|".join(b"%c[%c-%c]" % (lead, *ends) for lead, ends in BROKEN.items()))

Mask = NDArray[np.int32]
"""One bit a token, the lowest bit of a word first; int32 (words,). Never changed once made."""


class Vocabulary:
    """The texts of a model's tokens, and which of them need care. Immutable.

    Parameters
    ----------
    texts : sequence of bytes, (vocab_size,)

    Attributes
    ----------
    texts : list of bytes
        None for tokens that hold what is no character.
    all, printable : (words,) int32
        All tokens, and those without a control character.
    broken_behind : dict of int to (words,) int32
        Of tokens whose last byte begins a character: those whose first byte makes it none.
    """

    __slots__ = ("all", "broken_behind", "printable", "texts")

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = [b"" if NO_CHARACTER.search(text) else text for text in texts]
        each = list(enumerate(self.texts))
        self.all = self.packed(range(len(each)))
        self.printable = self.packed(i for i, text in each if not CONTROL.search(text))
        seconds = {
            lead: self.packed(i for i, text in each if text and low <= text[0] <= high)
            for lead, (low, high) in BROKEN.items()
        }
        self.broken_behind = {i: seconds[text[-1]] for i, text in each if text[-1:] in LEADS}

    def __len__(self) -> int:
        return len(self.texts)

    def packed(self, tokens: Iterable[int]) -> Mask:
        """A mask with these tokens' bits, with room for one token behind the vocabulary."""
        bits = np.zeros((len(self) // 32 + 1) * 32, np.bool_)
        ids = np.fromiter(tokens, np.int64)
        bits[ids[ids < len(self)]] = True
        mask: Mask = np.packbits(bits, bitorder="little").view(np.int32)
        return mask


def token_texts(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """The bytes that each token adds to a text; none for special tokens and padding.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
    vocab_size : int
        The model's; it may be larger or smaller than the tokenizer's.

    Returns
    -------
    list of bytes, (vocab_size,)

    Raises
    ------
    UnsupportedParameterError
        If xgrammar cannot read the tokenizer, or reads it as it does not decode.
    """
    if tokenizer is None:
        raise _unsupported("the model has no tokenizer")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*getattr(tokenizer, "all_special_ids", ())}
    special |= {token for token, its in added.items() if its.special}
    literal = {token: str(its.content).encode() for token, its in added.items()}
    fault = ""
    for texts in _readings(tokenizer, vocab_size):
        for token, text in literal.items():
            if token < vocab_size:
                texts[token] = text
        for token in special:
            if token < vocab_size:
                texts[token] = b""
        wrong = _first_wrong(texts, tokenizer)
        if wrong is None:
            return texts
        fault = fault or (
            f"token {wrong} would be {texts[wrong]!r}, and the tokenizer decodes it otherwise"
        )
    raise _unsupported(f"no known spelling fits {type(tokenizer).__name__}: {fault}")


def _readings(tokenizer: Any, vocab_size: int) -> Iterator[list[bytes]]:
    """The vocabulary as xgrammar takes it to be spelt, then in the other ways that it knows."""
    from xgrammar import TokenizerInfo, VocabType

    try:
        # The end token is not its business here, but it warns where it has none.
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[0])
    except Exception as error:
        raise _unsupported(str(error).strip()) from error
    yield list(info.decoded_vocab)
    names = [""] * vocab_size
    for name, token in tokenizer.get_vocab().items():
        if token < vocab_size:
            names[token] = name
    for kind in VocabType:
        if kind is not info.vocab_type:
            yield list(TokenizerInfo(names, kind, stop_token_ids=[0]).decoded_vocab)


def _first_wrong(texts: Sequence[bytes], tokenizer: Any) -> int | None:
    """The first checked token that decodes to anything but its text, when it comes twice."""
    options: dict[str, bool] = {"skip_special_tokens": True}
    if hasattr(tokenizer, "clean_up_tokenization_spaces"):
        options["clean_up_tokenization_spaces"] = False
    for token in range(0, len(texts), max(len(texts) // SAMPLE, 1)):
        try:
            expected = (2 * texts[token]).decode()
        except UnicodeDecodeError:
            continue
        # Some tokenizers strip one space at a text's beginning.
        decoded = tokenizer.decode([token, token], **options)
        if decoded not in (expected, expected.removeprefix(" ")):
            return token
    return None


def _unsupported(reason: str) -> UnsupportedParameterError:
    return UnsupportedParameterError(
        f"json_schema, regex and grammar are not supported with this tokenizer: {reason}"
    )
