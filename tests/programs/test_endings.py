"""Which tokens stay of a generation that a stop string or a token has ended."""

from __future__ import annotations

import pytest

from radixkv.decoding import SamplingParams, TextStream
from radixkv.programs.endings import Ending, ending_of

PIECES = ["a", "b", "\n", "a\nb", "b\n", "\nc", "", "<|end|>"]


class Pieces:
    """A token is a piece of text; the last one is special."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        end = len(PIECES) - 1
        return "".join(PIECES[i] for i in token_ids if not (skip_special_tokens and i == end))


@pytest.mark.parametrize(
    ("tokens", "include", "expected"),
    [
        ([0, 1, 2], False, Ending(2)),
        ([0, 1, 2], True, Ending(3)),
        ([0, 3], False, Ending(1, "a")),
        ([0, 3], True, Ending(1, "a\n")),
        ([0, 4], False, Ending(1, "b")),
        ([0, 4], True, Ending(2)),
        ([2], False, Ending(0)),
        ([3], False, Ending(0, "a")),
        ([0, 5], False, Ending(1)),
        ([0, 6, 5], False, Ending(2)),
        ([0, 1, 7], False, Ending(2)),
        ([0, 1, 0, 1], False, Ending(4)),
    ],
)
def test_what_stays(tokens: list[int], include: bool, expected: Ending) -> None:
    params = SamplingParams(
        stop="\n", max_tokens=4, include_stop_str_in_output=include, temperature=0
    )
    stream = TextStream(params, Pieces(), eos_token_ids=[7])
    for token in tokens:
        stream.push(token)
    assert stream.finish_reason is not None
    ending = ending_of(stream, Pieces(), [])
    assert ending == expected
    decoded = Pieces().decode(tokens[: ending.kept], skip_special_tokens=True)
    assert decoded + ending.rest == stream.text


def test_without_a_tokenizer_only_tokens_end_it() -> None:
    stream = TextStream(SamplingParams(max_tokens=4), None, eos_token_ids=[7])
    for token in (1, 7):
        stream.push(token)
    assert ending_of(stream, None, []) == Ending(1)
