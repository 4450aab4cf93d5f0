"""Words to sequences of tokens, and sequences to the tokens that must not come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from radixkv.decoding import SamplingParams, logit_edits
from radixkv.decoding.badwords import BadWords, encode_words
from radixkv.errors import RequestError


class Table:
    """A tokenizer that knows some texts as a whole and cuts all others into letters."""

    def __init__(self, **known: int) -> None:
        self.known = {name.replace("_", " "): token for name, token in known.items()}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self.known[text]] if text in self.known else [ord(letter) for letter in text]


def test_words_come_with_and_without_a_space() -> None:
    assert encode_words(["cat"], Table(cat=1000, _cat=1001)) == ((1000,), (1001,))
    # vLLM would let the second through, since it has another length.
    assert encode_words(["cat"], Table(_cat=1001)) == ((99, 97, 116), (1001,))
    # Behind a space it is the same word again: the first finds both.
    assert encode_words(["cat"], Table()) == ((99, 97, 116),)
    assert encode_words([" cat", "cat"], Table(cat=7)) == ((7,), (32, 99, 97, 116))
    assert encode_words(["\n"], Table()) == ((10,),)


@pytest.mark.parametrize("fixture", ["byte_level", "metaspace", "byte_fallback"])
@pytest.mark.parametrize("inner", [False, True], ids=["transformers", "tokenizers"])
def test_real_tokenizers(fixture: str, inner: bool, request: pytest.FixtureRequest) -> None:
    tokenizer: PreTrainedTokenizerFast = request.getfixturevalue(fixture)
    used = tokenizer.backend_tokenizer if inner else tokenizer
    words = ["dog", " the", "lazy dog"]
    found = encode_words(words, used)
    for word in words:
        texts = {word.strip(), " " + word.strip()}
        for text in texts:
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            assert any(tokens[-len(sequence) :] == sequence for sequence in found), (text, tokens)
    decoded = {tokenizer.decode(list(sequence)).strip() for sequence in found}
    assert decoded == {word.strip() for word in words}


def test_padding_that_a_tokenizer_file_asks_for_is_no_part_of_a_word(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    tokenizer = byte_level.backend_tokenizer
    expected = encode_words(["dog"], tokenizer)
    tokenizer.enable_padding(length=20)
    try:
        assert encode_words(["dog"], tokenizer) == expected
    finally:
        tokenizer.no_padding()


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_words_need_a_tokenizer_that_encodes(tokenizer: object) -> None:
    with pytest.raises(RequestError, match="give bad_words_ids instead"):
        logit_edits(SamplingParams(bad_words="x"), np.array([1]), vocab_size=9, tokenizer=tokenizer)
    params = SamplingParams(bad_words_ids=[[1]])
    assert logit_edits(params, np.array([1]), vocab_size=9, tokenizer=tokenizer) is not None


def test_a_word_without_tokens_is_refused() -> None:
    class Nothing:
        def encode(self, text: str, **_: Any) -> list[int]:
            return []

    with pytest.raises(RequestError, match="makes no token of 'x'; leave it out of bad_words"):
        encode_words(["x"], Nothing())


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@given(sequences=st.lists(tokens, max_size=8), generated=st.lists(st.integers(0, 2), max_size=7))
def test_behind_equals_comparing_every_sequence(
    sequences: list[tuple[int, ...]], generated: list[int]
) -> None:
    words = BadWords(sequences)
    expected = {
        sequence[-1]
        for sequence in sequences
        if tuple(generated[len(generated) + 1 - len(sequence) :]) == sequence[:-1]
        and len(sequence) <= len(generated) + 1
    }
    assert set(words.behind(generated)) == expected
    tail: Sequence[int] = generated[-words.reach :] if words.reach else ()
    assert set(words.behind(tail)) == expected


def test_bad_words_never_come_out(byte_id: Callable[[int], int]) -> None:
    """Letter by letter: the last letter is forbidden once the others are there."""
    word = tuple(byte_id(letter) for letter in b"cat")
    words = BadWords([word])
    assert words.behind([]) == []
    assert words.behind(word[:1]) == []
    assert words.behind(word[:2]) == [word[2]]
    assert words.behind((word[0], *word[:2])) == [word[2]]
    assert words.behind(word) == []
