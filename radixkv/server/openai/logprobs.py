"""Log-probabilities in the shapes of OpenAI's two endpoints, and of vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from radixkv.decoding.logprobs import TokenLogprobs
from radixkv.decoding.vocabulary import token_texts
from radixkv.errors import UnsupportedParameterError

LEAST = -9999.0
"""In place of minus infinity, which JSON does not have."""

Entry = dict[str, Any]


class TokenText(NamedTuple):
    """A token as it is shown: bytes that are no character are written as ``\\xe2``."""

    text: str
    bytes: list[int]


class TokenTable:
    """What each token of a model is shown as; made once, and read from any thread.

    Parameters
    ----------
    tokenizer : tokenizer of transformers, or None
    vocab_size : int
        The model's.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = {token: str(its.content).encode() for token, its in added.items()}
        self._texts: Sequence[bytes] = [b""] * vocab_size
        if tokenizer is None:
            return
        try:
            self._texts = token_texts(tokenizer, vocab_size)
        except UnsupportedParameterError:
            # No spelling is known: what each decodes to by itself must do.
            self._texts = [tokenizer.decode([token]).encode() for token in range(vocab_size)]

    def __getitem__(self, token: int) -> TokenText:
        raw = self._added.get(token) or self._texts[token]
        return TokenText(raw.decode(errors="backslashreplace"), list(raw))


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def chat_entry(table: TokenTable, token: int, its: TokenLogprobs) -> Entry:
    """A token as chat completions have it."""
    entry = _named(table[token], its.logprob)
    entry["top_logprobs"] = [_named(table[other], logprob) for other, logprob in its.top]
    return entry


def _named(token: TokenText, logprob: float) -> Entry:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": token.bytes}


class CompletionLogprobs:
    """Tokens as plain completions have them: in columns, with where each begins in the text.

    Parameters
    ----------
    table : TokenTable
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._offset = 0

    def columns(self, tokens: Iterable[tuple[int, TokenLogprobs | None]]) -> Entry:
        """The next tokens of a text; None for one that has nothing before it."""
        columns: Entry = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, its in tokens:
            text = self._table[token].text
            columns["tokens"].append(text)
            columns["text_offset"].append(self._offset)
            columns["token_logprobs"].append(None if its is None else _finite(its.logprob))
            columns["top_logprobs"].append(None if its is None else self._likely(text, its))
            self._offset += len(text)
        return columns

    def _likely(self, text: str, its: TokenLogprobs) -> dict[str, float]:
        likely = {self._table[other].text: _finite(logprob) for other, logprob in its.top}
        return likely | {text: _finite(its.logprob)}


def prompt_entries(
    table: TokenTable, prompt: Sequence[int], entries: Sequence[TokenLogprobs | None]
) -> list[dict[str, Entry] | None]:
    """The prompt's tokens as vLLM has them: by id, each with its likeliest alternatives."""
    found: list[dict[str, Entry] | None] = []
    for token, its in zip(prompt, entries, strict=True):
        if its is None:
            found.append(None)
            continue
        ranked = {
            str(other): _ranked(table, other, logprob, rank)
            for rank, (other, logprob) in enumerate(its.top, 1)
        }
        ranked[str(token)] = _ranked(table, token, its.logprob, its.rank)
        found.append(ranked)
    return found


def _ranked(table: TokenTable, token: int, logprob: float, rank: int) -> Entry:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": table[token].text}
