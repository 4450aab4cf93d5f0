"""Tokens to text where each token is a string of bytes: one look-up a token.

Byte-level tokenizers (GPT-2's, Llama 3's, Qwen's, SmolLM2's) decode by joining their tokens' bytes
and reading them as UTF-8. So a token's text depends on nothing but the bytes before it that are not
a character yet, three at the most, and no window of tokens has to be decoded again.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders

from radixkv.decoding.detokenizer import REPLACEMENT, Detokenizer, Tokenizer

LONGEST_UNFINISHED = 3
"""Bytes of a character's beginning."""


def _letters() -> dict[str, int]:
    """The letter that stands for each byte: itself if it can be seen, else one from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in seen)
    return {chr(b): b for b in seen} | {chr(256 + i): b for i, b in enumerate(hidden)}


LETTERS = _letters()


class _Spelling:
    """What is known of one tokenizer's tokens; each is looked up when it first comes."""

    def __init__(self, special: Iterable[str]) -> None:
        self.special = frozenset(special)
        self.bytes: dict[int, bytes] = {}
        self.skipped: dict[int, bytes] = {}  # The same, but special tokens have none.
        # Of tokens that are whole characters, which are nearly all.
        self.texts: dict[int, str] = {}
        self.texts_skipped: dict[int, str] = {}

    def add(self, token: int, name: str | None) -> None:
        """Note a token by its name; what has none has no text either."""
        spelt = [LETTERS.get(letter) for letter in name or ""]
        known = [byte for byte in spelt if byte is not None]
        data = bytes(known) if len(known) == len(spelt) else (name or "").encode()
        self.bytes[token] = data
        self.skipped[token] = b"" if name in self.special else data
        for source, texts in ((self.bytes, self.texts), (self.skipped, self.texts_skipped)):
            try:
                texts[token] = source[token].decode()
            except UnicodeDecodeError:
                continue


_PARTS = ("_add", "_bytes", "_name", "_shown", "_texts", "_tokenizer", "_waiting")
_SPELLINGS: WeakKeyDictionary[FastTokenizer, _Spelling] = WeakKeyDictionary()


class ByteLevelDetokenizer:
    """What `Detokenizer` does, for a tokenizer with a byte-level decoder.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
        Its tokens are read once: what is added to it later is not seen.
    context : sequence of int
        The prompt's tokens. Only the last few are looked at.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    like : ByteLevelDetokenizer, optional
        Be a copy of this one.
    """

    __slots__ = _PARTS

    def __init__(
        self,
        tokenizer: FastTokenizer,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        like: ByteLevelDetokenizer | None = None,
    ) -> None:
        if like is not None:
            for name in _PARTS:
                setattr(self, name, getattr(like, name))
            return
        self._tokenizer = tokenizer
        spelling = _SPELLINGS.get(tokenizer)
        if spelling is None:
            added = tokenizer.get_added_tokens_decoder().values()
            spelling = _Spelling(token.content for token in added if token.special)
            _SPELLINGS[tokenizer] = spelling
        self._bytes = spelling.skipped if skip_special_tokens else spelling.bytes
        self._texts = spelling.texts_skipped if skip_special_tokens else spelling.texts
        self._add = spelling.add
        self._name: Callable[[int], str | None] = tokenizer.id_to_token
        end = b""
        for token in reversed(context):
            if len(end) >= LONGEST_UNFINISHED:
                break
            end = self._spell(token) + end
        end = end[-LONGEST_UNFINISHED:]
        self._waiting = end[utf_8_decode(end, "replace", False)[1] :]
        # So many U+FFFD stand for these bytes at the end of the prompt's own text.
        self._shown = len(self._waiting.decode(errors="replace"))

    def push(self, token_id: int) -> str:
        """Append a token and return the text that has become certain."""
        if not self._waiting:
            text = self._texts.get(token_id)
            if text is not None:
                return text
        data = self._waiting + self._spell(token_id)
        text, used = utf_8_decode(data, "replace", False)
        self._waiting = data[used:]
        if self._shown and used:
            for _ in range(self._shown):
                text = text.removeprefix(REPLACEMENT)
            self._shown = 0
        return text

    def finish(self) -> str:
        """Return what still waits, with U+FFFD for a character that was never finished."""
        text = self._waiting.decode(errors="replace")[self._shown :]
        self._waiting, self._shown = b"", 0
        return text

    def copy(self) -> ByteLevelDetokenizer:
        """Return an independent copy, for a branch that goes on with other tokens."""
        return ByteLevelDetokenizer(self._tokenizer, like=self)

    def _spell(self, token: int) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            self._add(token, self._name(token))
            data = self._bytes[token]
        return data


def detokenizer_for(
    tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer | ByteLevelDetokenizer:
    """The detokenizer that fits: look-ups for byte-level tokenizers, else a window of tokens."""
    if isinstance(tokenizer, FastTokenizer) and isinstance(tokenizer.decoder, decoders.ByteLevel):
        return ByteLevelDetokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
    return Detokenizer(tokenizer, context, skip_special_tokens=skip_special_tokens)
