"""When a continuation ends and what may be shown, against reading everything at once."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.decoding import SamplingParams, TextDelta, TextStream
from radixkv.errors import RequestError


class Letters:
    """Token i is the i-th text of a list; the rest of a real tokenizer is tested elsewhere."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(self.texts[i] for i in token_ids)


def run(texts: Sequence[str], **given: Any) -> tuple[list[str], TextStream]:
    """Push one token a text; return what was shown, token by token, and the stream."""
    given.setdefault("max_tokens", 1000)
    stream = TextStream(SamplingParams(**given), Letters(*texts))
    shown = []
    for token in range(len(texts)):
        shown.append(stream.push(token).text)
        if stream.finish_reason:
            break
    return shown, stream


@pytest.mark.parametrize(
    ("texts", "given", "shown", "reason"),
    [
        (["a", "b", "STOP", "c"], {"stop": "STOP"}, ["a", "b", ""], "STOP"),
        # Across token borders, with text before and behind it in the same tokens.
        (["a S", "T", "OPb"], {"stop": "STOP"}, ["a ", "", ""], "STOP"),
        # What looked like a beginning and was none is given out.
        (["a S", "T", "Ib"], {"stop": "STOP"}, ["a ", "", "STIb"], None),
        (["aa", "ab"], {"stop": "aab"}, ["", "a"], "aab"),
        (["x", "aab", "aa", "b"], {"stop": "aabaaab"}, ["x", "", "", "aab"], None),
        # The first to be complete wins, whatever the order of the list and the token borders.
        (["xabcd"], {"stop": ["cd", "ab"]}, ["x"], "ab"),
        (["xabcd"], {"stop": ["abcd", "bc"]}, ["xa"], "bc"),
        (["xab", "c", "d"], {"stop": ["abcd", "bc"]}, ["x", "a"], "bc"),
        # Of those complete at the same character, the longest.
        (["xabc"], {"stop": ["c", "abc", "bc"]}, ["x"], "abc"),
        (["xabcd"], {"stop": ["bc"], "include_stop_str_in_output": True}, ["xabc"], "bc"),
        (["xa", "b"], {"stop": ["ab"], "include_stop_str_in_output": True}, ["x", "ab"], "ab"),
    ],
    ids=str,
)
def test_stop_strings(texts: list[str], given: Any, shown: list[str], reason: str | None) -> None:
    deltas, stream = run(texts, **given)
    assert deltas == shown
    assert stream.stop_reason == reason
    assert stream.finish_reason == ("stop" if reason else None)
    assert stream.text == "".join(shown)
    assert stream.token_ids == list(range(len(shown)))


def test_a_stop_token_is_kept_as_a_token_but_is_no_text() -> None:
    stream = TextStream(
        SamplingParams(stop_token_ids=[2], stop="ZZ"), Letters("a", "Z", "b"), eos_token_ids=[9]
    )
    assert stream.push(0) == ("a", None, None)
    assert stream.push(1) == ("", None, None)
    assert stream.push(2) == TextDelta("Z", "stop", 2)
    assert stream.token_ids == [0, 1, 2]
    assert stream.text == "aZ"


@pytest.mark.parametrize("ignore", [False, True])
def test_the_end_token(ignore: bool) -> None:
    params = SamplingParams(ignore_eos=ignore, max_tokens=3)
    stream = TextStream(params, Letters("a", "b", "<eos>"), eos_token_ids=[2, 5])
    stream.push(0)
    delta = stream.push(2)
    assert delta == (("<eos>", None, None) if ignore else ("", "stop", None))
    assert stream.token_ids == [0, 2]


def test_an_end_token_that_is_also_asked_for_is_named() -> None:
    params = SamplingParams(stop_token_ids=[2])
    assert TextStream(params, eos_token_ids=[2]).push(2) == ("", "stop", 2)


def test_max_tokens_gives_length_and_what_was_held_back() -> None:
    shown, stream = run(["a", "S", "T"], stop="STOP", max_tokens=3)
    assert shown == ["a", "", "ST"]
    assert (stream.finish_reason, stream.stop_reason) == ("length", None)


def test_a_stop_on_the_last_token_is_a_stop_not_a_length() -> None:
    shown, stream = run(["a", "STOP"], stop="STOP", max_tokens=2)
    assert shown == ["a", ""]
    assert (stream.finish_reason, stream.stop_reason) == ("stop", "STOP")
    stream = TextStream(SamplingParams(max_tokens=2), eos_token_ids=[7])
    assert [stream.push(3), stream.push(7)] == [("", None, None), ("", "stop", None)]


def test_min_tokens_bans_the_tokens_that_stop() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[4, 1], max_tokens=5)
    stream = TextStream(params, eos_token_ids=[9, 4])
    assert stream.banned_tokens == (1, 4, 9)
    assert stream.push(4) == ("", None, None)
    assert stream.banned_tokens == (1, 4, 9)
    assert stream.push(0) == ("", None, None)
    assert stream.banned_tokens == ()
    assert stream.push(4) == ("", "stop", 4)
    assert TextStream(SamplingParams(), eos_token_ids=[9]).banned_tokens == ()
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True)
    assert TextStream(ignoring, eos_token_ids=[9]).banned_tokens == ()


def test_min_tokens_delays_stop_strings() -> None:
    assert run(["a", "X", "b", "X", "c"], stop="X", min_tokens=3)[0] == ["a", "X", "b", ""]
    # Complete on the min_tokens-th token: that is enough.
    assert run(["a", "X", "b"], stop="X", min_tokens=2)[0] == ["a", ""]
    # Begun before, complete after: it counts, and the text is cut where it begins.
    assert run(["a", "X", "Y"], stop="XY", min_tokens=3)[0] == ["a", "", ""]
    # Complete before, so it is text for ever; its tail may still begin another.
    assert run(["aXX", "b", "c"], stop="XX", min_tokens=2)[0] == ["aX", "Xb", "c"]
    assert run(["aXX", "X", "c"], stop="XX", min_tokens=2)[0] == ["aX", ""]
    assert run(["aX", "b"], stop=["X", "XYZ"], min_tokens=2)[0] == ["a", "Xb"]
    assert run(["aX", "b"], stop=["X", "bYZ"], min_tokens=2)[0] == ["aX", ""]


def test_a_long_stop_string_takes_no_more_memory_than_its_length() -> None:
    """A request may bring one of a megabyte."""
    params = SamplingParams(max_tokens=9, stop="ab" * 4000)
    tracemalloc.start()
    stream = TextStream(params, Letters("ab" * 3000, "ab" * 999, "c"))
    texts = [stream.push(token).text for token in range(3)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert texts == ["", "", "ab" * 3999 + "c"]
    assert most < 1e6


def test_finish_flushes_and_is_final() -> None:
    _, stream = run(["a", "S"], stop="STOP")
    assert stream.finish() == ("S", "length", None)
    assert stream.finish() == ("", "length", None)
    assert stream.text == "aS"
    with pytest.raises(RuntimeError, match="has ended"):
        stream.push(0)
    _, stream = run(["STOP"], stop="STOP")
    assert stream.finish() == ("", "stop", "STOP")


def test_without_a_tokenizer() -> None:
    stream = TextStream(SamplingParams(max_tokens=3), eos_token_ids=[9])
    assert [stream.push(5), stream.push(5)] == [("", None, None)] * 2
    assert stream.push(5) == ("", "length", None)
    assert (stream.text, stream.token_ids) == ("", [5, 5, 5])
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        TextStream(SamplingParams(stop="x"))


def test_a_copy_goes_its_own_way() -> None:
    params = SamplingParams(stop="STOP", max_tokens=4)
    one = TextStream(params, Letters("a", "ST", "OP", "x"))
    one.push(0)
    one.push(1)
    two = one.copy()
    assert one.push(2) == ("", "stop", "STOP")
    assert (two.finish_reason, two.token_ids, two.text) == (None, [0, 1], "a")
    assert two.push(3) == ("STx", None, None)
    assert (one.text, one.token_ids) == ("a", [0, 1, 2])
    assert two.push(2) == ("OP", "length", None)
    assert two.text == "aSTxOP"


def test_a_character_cut_off_by_max_tokens(byte_level: Any) -> None:
    ids = byte_level.encode("a 🎈", add_special_tokens=False)
    stream = TextStream(SamplingParams(max_tokens=len(ids) - 1), byte_level)
    for token in ids[:-1]:
        delta = stream.push(token)
    assert delta == ("\ufffd", "length", None)
    # It is shown, so it can be a stop string too.
    stream = TextStream(SamplingParams(max_tokens=len(ids) - 1, stop="\ufffd"), byte_level)
    for token in ids[:-1]:
        delta = stream.push(token)
    assert delta == ("", "stop", "\ufffd")


def test_a_character_cut_off_by_a_stop_token_or_forked(byte_level: Any) -> None:
    *ids, last = byte_level.encode("a 🎈", add_special_tokens=False)
    stream = TextStream(SamplingParams(), byte_level, eos_token_ids=[1])
    for token in ids:
        stream.push(token)
    fork = stream.copy()
    assert stream.push(1) == ("\ufffd", "stop", None)
    assert fork.push(last) == ("🎈", None, None)
    assert (stream.text, fork.text) == ("a \ufffd", "a 🎈")


def test_special_tokens_are_text_only_if_asked_for(byte_level: Any) -> None:
    for skip, text in ((True, ""), (False, "</s>")):
        params = SamplingParams(skip_special_tokens=skip, ignore_eos=True)
        assert TextStream(params, byte_level, eos_token_ids=[1]).push(1).text == text


def first_stop(text: str, stops: Sequence[str], after: int) -> tuple[int, str] | None:
    """Read character by character: where the first stop string ending behind ``after`` begins."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def may_be_shown(text: str, stops: Sequence[str]) -> str:
    """All but the longest end that is the beginning of a stop string."""
    for start in range(len(text)):
        if any(stop.startswith(text[start:]) and stop != text[start:] for stop in stops):
            return text[:start]
    return text


SMALL = st.sampled_from("ab你😀 ")
STOPS = st.lists(st.text(SMALL, min_size=1, max_size=4), max_size=4, unique=True)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_equal_to_reading_everything_at_once(
    kind: str, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    text = data.draw(st.one_of(st.text(SMALL, max_size=30), st.text(max_size=20)))
    prompt = tokenizer.encode("Hello", add_special_tokens=False)
    out = tokenizer.encode(text, add_special_tokens=False)
    out += data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4))
    cuts = [text[i : i + 3] for i in range(len(text) - 2)] or ["ab"]
    stops = data.draw(st.one_of(STOPS, st.lists(st.sampled_from(cuts), max_size=2)))
    include, floor = data.draw(st.booleans()), data.draw(st.integers(0, 8))
    params = SamplingParams(
        max_tokens=max(len(out), floor, 1),
        min_tokens=floor,
        stop=stops,
        include_stop_str_in_output=include,
    )
    stream = TextStream(params, tokenizer, context=prompt)
    behind = len(tokenizer.decode(prompt))

    def decoded(count: int, last: bool) -> str:
        full = tokenizer.decode([*prompt, *out[:count]], skip_special_tokens=True)[behind:]
        return str(full if last else full.rstrip("\ufffd"))

    shown, unchecked = "", 0
    for count, token in enumerate(out, start=1):
        delta = stream.push(token)
        shown += delta.text
        last = count == params.max_tokens
        full = decoded(count, last)
        if count < floor:
            unchecked = len(full)
        stop = first_stop(full, params.stop, unchecked) if count >= floor else None
        if stop:
            start, reason = stop
            assert shown == full[: start + len(reason) * include]
            assert delta[1:] == ("stop", reason)
            break
        assert shown == (full if last else may_be_shown(full, params.stop))
        assert delta[1:] == (("length", None) if last else (None, None))
    assert stream.text == shown
    assert stream.token_ids == out[: len(stream.token_ids)]
