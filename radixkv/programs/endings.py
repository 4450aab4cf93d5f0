"""Which tokens of a finished generation a context goes on from: those of the text it gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixkv.decoding import TextStream, Tokenizer, detokenizer_for


class Ending(NamedTuple):
    """What stays of a generation.

    Parameters
    ----------
    kept : int
        Leading tokens that stay.
    rest : str
        Text behind them, where a stop string begins inside a token; to be tokenized anew.
    """

    kept: int
    rest: str = ""


def ending_of(stream: TextStream, tokenizer: Tokenizer | None, context: Sequence[int]) -> Ending:
    """Where a continuation's text ends among its tokens.

    A token that stopped it is no text and does not stay; nor do a stop string's tokens, unless it
    was left in the text. O(tokens).

    Parameters
    ----------
    stream : TextStream
        One that has ended.
    tokenizer : Tokenizer or None
        None if the model has none; then there are no stop strings.
    context : sequence of int
        The last tokens before it.
    """
    tokens = stream.token_ids
    if stream.finish_reason != "stop":
        return Ending(len(tokens))
    if tokenizer is None or not isinstance(stream.stop_reason, str):
        return Ending(len(tokens) - stream.stopped_by_token)
    return _within(stream, tokenizer, context)


def _within(stream: TextStream, tokenizer: Tokenizer, context: Sequence[int]) -> Ending:
    """The most tokens whose text the whole text begins with."""
    text, known = stream.text, ""
    decoder = detokenizer_for(
        tokenizer, context, skip_special_tokens=stream.params.skip_special_tokens
    )
    before = [(known, decoder.copy())]
    for token in stream.token_ids:
        known += decoder.push(token)
        before.append((known, decoder.copy()))
    for kept in range(len(before) - 1, 0, -1):
        known, decoder = before[kept]
        known += decoder.finish()
        if text.startswith(known):
            return Ending(kept, text[len(known) :])
    return Ending(0, text)
