"""Incremental decoding against decoding everything at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from radixkv.decoding import ByteLevelDetokenizer, Detokenizer, detokenizer_for

LETTERS = st.one_of(
    st.sampled_from("abc het  .,\n"),
    st.sampled_from("é你好世ПрА…😀👩🇩\u200d"),
    st.characters(codec="utf-8"),
)
TEXT = st.text(LETTERS, max_size=40)
BYTE_LEVEL = ["byte_level", "by_bytes"]
KINDS = [*BYTE_LEVEL, "metaspace", "byte_fallback"]


@pytest.fixture(params=BYTE_LEVEL, scope="module")
def any_bytes(request: pytest.FixtureRequest) -> Any:
    """The byte-level tokenizer as transformers has it, then the fast one inside."""
    return request.getfixturevalue(request.param)


def stream(tokenizer: Any, context: Sequence[int], out: Sequence[int], **options: bool) -> str:
    decoder = detokenizer_for(tokenizer, context, **options)
    assert isinstance(decoder, ByteLevelDetokenizer) == isinstance(tokenizer, tokenizers.Tokenizer)
    return "".join([*map(decoder.push, out), decoder.finish()])


def whole(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip) if len(ids) else ""


def encode(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(found, "ids", found))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(prompt=TEXT, text=TEXT)
def test_deltas_join_to_the_decoding_behind_the_prompt(
    kind: str, prompt: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    context, out = encode(tokenizer, prompt), encode(tokenizer, text)
    before, after = whole(tokenizer, context), whole(tokenizer, context + out)
    assert after.startswith(before)
    assert stream(tokenizer, context, out) == after[len(before) :]


@pytest.mark.parametrize("kind", ["byte_level", "by_bytes", "metaspace"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_whatever_bytes_they_hold(
    kind: str, skip: bool, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    # Beyond the tokenizer's vocabulary too: models pad theirs.
    ids = st.integers(0, len(tokenizer.get_vocab()) + 2)
    high = st.integers(3, 200)
    prompt = encode(tokenizer, data.draw(TEXT))
    out = data.draw(st.one_of(st.lists(ids, max_size=60), st.lists(high, max_size=120)))
    before = whole(tokenizer, prompt, skip)
    after = whole(tokenizer, prompt + out, skip)
    assert stream(tokenizer, prompt, out, skip_special_tokens=skip) == after[len(before) :]


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(
        st.sampled_from([0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x98, 0x80, 0xFF, 0x41, 0xEF, 0xBF, 0x20])
    )
)
def test_any_bytes(data: list[int], any_bytes: Any, byte_id: Callable[[int], int]) -> None:
    out = [byte_id(byte) for byte in data]
    assert stream(any_bytes, (), out) == bytes(data).decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(text=TEXT.filter(lambda t: "\ufffd" not in t))
def test_text_comes_as_soon_as_its_character_is_whole_and_never_before(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    detokenizer, shown = detokenizer_for(tokenizer), ""
    out = encode(tokenizer, text)
    for i, token in enumerate(out):
        delta = detokenizer.push(token)
        shown += delta
        so_far = whole(tokenizer, out[: i + 1])
        assert "\ufffd" not in delta
        if "\ufffd" not in so_far:
            assert shown == so_far
        if kind in BYTE_LEVEL:
            assert shown == so_far.rstrip("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_known_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    context, out = encode(tokenizer, "hello"), encode(tokenizer, "the 你好 world")
    expected = "the 你好 world" if kind in BYTE_LEVEL else " the 你好 world"
    if kind == "metaspace":
        expected = whole(tokenizer, context + out)[len("hello") :]
        assert expected.startswith(" the")
    assert stream(tokenizer, context, out) == expected


def test_an_emoji_of_four_tokens_arrives_at_once(any_bytes: Any, byte_id: Any) -> None:
    detokenizer = detokenizer_for(any_bytes)
    assert [detokenizer.push(byte_id(byte)) for byte in "a🎈b".encode()] == [
        *["a", "", "", "", "🎈", "b"]
    ]


class Pieces:
    """A byte-level tokenizer of two long tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        pieces = [b"ab\xe4", b"\xbd\xa0c"]
        return b"".join(pieces[i] for i in token_ids).decode(errors="replace")


def test_whole_text_before_an_unfinished_character_is_not_held() -> None:
    detokenizer = Detokenizer(Pieces())
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.finish()] == ["ab", "你c", ""]


def test_an_unfinished_character_is_shown_as_such_at_the_end(any_bytes: Any, byte_id: Any) -> None:
    detokenizer = detokenizer_for(any_bytes)
    assert [detokenizer.push(byte_id(byte)) for byte in b"a\xf0\x9f"] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_prompt_that_ends_within_a_character(split: int, any_bytes: Any, byte_id: Any) -> None:
    ids = [byte_id(byte) for byte in "é🎈!".encode()]
    assert stream(any_bytes, ids[: 2 + split], ids[2 + split :]) == "🎈!"
    # As seen from a completion that never comes, the prompt ends in U+FFFD.
    assert stream(any_bytes, ids[: 2 + split], [byte_id(0x21)]) == "!"


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.sampled_from([0x41, 0xE4, 0xBD, 0xED, 0xA0, 0xF0, 0x9F, 0xFF]), max_size=4),
    text=st.text(st.sampled_from("aé你🎈"), max_size=4),
)
def test_a_prompt_that_ends_in_any_bytes(
    prompt: list[int], text: str, by_bytes: Any, byte_id: Callable[[int], int]
) -> None:
    """Also in what a decoder waits for, though it never becomes a character: ED A0."""
    context = [byte_id(byte) for byte in prompt]
    out = [byte_id(byte) for byte in text.encode()]
    before, after = whole(by_bytes, context), whole(by_bytes, context + out)
    assert stream(by_bytes, context, out) == after[len(before) :]


def test_a_byte_fallback_prompt_that_begins_and_ends_within_a_character(byte_fallback: Any) -> None:
    ids = [3 + byte for byte in ("你" * 12 + "好!").encode()]
    for start in range(3):
        for end in range(30, len(ids)):
            joined = stream(byte_fallback, ids[start:end], ids[end:])
            assert joined == bytes(byte - 3 for byte in ids[end // 3 * 3 :]).decode()


def test_a_prompt_that_ends_in_a_genuine_replacement_character(any_bytes: Any) -> None:
    context = encode(any_bytes, "what is \ufffd")
    assert stream(any_bytes, context, encode(any_bytes, "? 你")) == "? 你"


def test_whole_characters_stay_when_a_later_byte_of_the_run_is_wrong(byte_fallback: Any) -> None:
    out = [3 + byte for byte in "你好".encode() + b"\xff"] + encode(byte_fallback, "then")
    assert whole(byte_fallback, out).startswith("\ufffd" * 7)
    assert stream(byte_fallback, (), out) == "你好\ufffd then"
    assert stream(byte_fallback, (), out[:4]) == "你\ufffd"
    junk = encode(byte_fallback, "then 你") + [3 + 0xFF] * 50
    assert stream(byte_fallback, (), junk) == "then 你" + "\ufffd" * 50


def test_spaces_before_punctuation_stay_though_transformers_would_take_them_back() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "▁.": 1, "▁b": 2}))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=True)
    assert tokenizer.decode([0, 1, 2]) == "a. b"
    assert stream(tokenizer, (), [0, 1, 2]) == "a . b"


def test_only_special_tokens_in_the_prompts_tail(metaspace: Any) -> None:
    context = encode(metaspace, "Hello") + [0] * 40
    assert stream(metaspace, context, encode(metaspace, "The end")) == " The end"


def test_a_copy_goes_its_own_way(any_bytes: Any, byte_id: Any) -> None:
    one = detokenizer_for(any_bytes)
    for byte in b"x\xe4\xbd":
        one.push(byte_id(byte))
    two = one.copy()
    assert one.push(byte_id(0xA0)) == "你"
    assert two.push(byte_id(0xA1)) == "佡"
    assert one.push(byte_id(0x41)) == "A"
    assert two.finish() == ""


class Counting:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens, self.longest = tokenizer, 0, 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.tokens += len(token_ids)
        self.longest = max(self.longest, len(token_ids))
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


@pytest.mark.parametrize("case", ["text", "special", "junk", "genuine", "unknown", "pieces"])
def test_the_cost_of_a_token_does_not_grow(case: str, byte_level: Any, byte_id: Any) -> None:
    out = {
        "text": encode(byte_level, "The quick brown 你好 fox 😀 "),
        "special": [1],
        "junk": [byte_id(0xE4), byte_id(0xBD)],
        "genuine": encode(byte_level, "\ufffd"),
        "unknown": [10**6],
        "pieces": [0],
    }[case]
    out = (out * 2000)[:2000]
    tokenizer = Pieces() if case == "pieces" else byte_level
    counting = Counting(tokenizer)
    assert stream(counting, (), out) == whole(tokenizer, out)
    assert counting.longest <= 50
    assert counting.tokens <= 60 * len(out)


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_keep_every_space(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    out = encode(tokenizer, "the end  of   a tale: 你 and all " * 40)
    assert len(out) > 500
    counting = Counting(tokenizer)
    assert stream(counting, (), out) == whole(tokenizer, out)
    assert counting.longest <= 50
