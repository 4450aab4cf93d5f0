"""Tokens to text, one token at a time.

A token is not a piece of text: a character may span several tokens, and a tokenizer may treat the
first token of what it decodes in its own way (SentencePiece strips a leading space). So each new
token is decoded together with a short window of tokens before it, and what that adds to the
window's text is the token's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are not, or not yet, a character."""

WINDOW = 8
"""Tokens of finished text that stay as context; a window has about twice as many at the most."""

LONGEST = 3
"""Bytes, hence tokens, that an unfinished UTF-8 character can have at the most."""


class Tokenizer(Protocol):
    """The one method needed here; transformers' and tokenizers' classes both have it."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Turn token ids into text."""


class Detokenizer:
    """Decode a growing sequence of tokens.

    All texts that `push` and `finish` return, joined, are what ``tokenizer.decode`` makes of the
    pushed tokens behind the prompt's. Text that the next token may still change waits, so U+FFFD
    is returned only for bytes that can no longer become a character.

    One exception: some SentencePiece-like decoders (``ByteFallback``) turn a whole run of byte
    tokens into U+FFFD if any byte of it is wrong. Characters that were complete before the wrong
    byte came have been returned by then; they stay, and only the rest of the run is U+FFFD.

    A push costs O(1) decodings of O(1) tokens, amortised, however long the sequence is.

    Parameters
    ----------
    tokenizer : Tokenizer
    context : sequence of int
        The prompt's tokens. Only the last few are looked at.
    skip_special_tokens : bool
        Leave special tokens out of the text.
    """

    __slots__ = ("_clean", "_decode", "_known", "_mark", "_window")

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        options = {"skip_special_tokens": skip_special_tokens}
        # transformers' clean-up takes back spaces that were decoded before, so text shown is wrong.
        if hasattr(tokenizer, "clean_up_tokenization_spaces"):
            options["clean_up_tokenization_spaces"] = False
        self._decode = cast(Callable[[list[int]], str], partial(tokenizer.decode, **options))
        self._window: list[int] = []
        self._clean = 0  # the first _clean tokens of the window are whole characters
        self._mark = 0  # an earlier value of _clean, where the window may be cut
        self._known = ""  # the window's text, as far as it was returned or belongs to the prompt
        if len(context):
            self._start(context)

    def push(self, token_id: int) -> str:
        """Append a token and return the text that has become certain."""
        self._window.append(token_id)
        full = self._decode(self._window)
        if not full.endswith(REPLACEMENT):
            return self._accept(full)
        settled = full.rstrip(REPLACEMENT)
        new = self._beyond(settled) or ""
        if new:
            self._known = settled
        waiting = len(self._window) - self._clean
        if waiting % WINDOW == 0:
            new += self._give_up(full)
        return new

    def finish(self) -> str:
        """Return what still waits, with U+FFFD for characters that were never finished."""
        if self._clean == len(self._window):
            return ""
        return self._accept(self._decode(self._window))

    def copy(self) -> Detokenizer:
        """Return an independent copy, for a branch that goes on with other tokens."""
        twin = object.__new__(Detokenizer)
        for name in Detokenizer.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._window = self._window.copy()
        return twin

    def _start(self, context: Sequence[int]) -> None:
        """Take the prompt's end as the window; it may begin or end within a character."""
        size = WINDOW
        tail = list(context[-size:])
        while size < len(context) and not self._decode(tail).strip(REPLACEMENT):
            size *= 4
            tail = list(context[-size:])
        for back in range(LONGEST + 1):
            for front in range(LONGEST + 1):
                inner = tail[front : len(tail) - back]
                text = self._decode(inner) if inner else ""
                if text and text[0] != REPLACEMENT != text[-1]:
                    self._window = tail[front:]
                    self._clean = len(inner)
                    self._known = self._decode(self._window)
                    return
        self._window, self._clean = tail, len(tail)
        self._known = self._decode(tail)

    def _beyond(self, text: str) -> str | None:
        """Return what a decoding of the window adds to what is known; None if it contradicts."""
        return text[len(self._known) :] if text.startswith(self._known) else None

    def _accept(self, full: str) -> str:
        """Return all new text of the window, and cut the window if it has become long."""
        window = self._window
        new = self._beyond(full)
        if new is None:
            # The prompt's last character has been finished, or a wrong byte has garbled characters
            # that were whole: either way, what waits is read on its own.
            del window[: self._clean]
            self._mark = 0
            full = new = self._decode(window)
        if new and len(window) - self._mark >= WINDOW:
            if self._mark:
                del window[: self._mark]
                full = self._decode(window)
            self._mark = len(window)
        elif not new and len(window) > 3 * WINDOW:
            window.pop()  # one more of a long run of tokens without text
        self._known = full
        self._clean = len(window)
        return new

    def _give_up(self, full: str) -> str:
        """Return the front part of a long run of bytes that never became characters.

        The window is cut where both sides decode on their own to what they are together, so never
        within what may be the beginning of a character.
        """
        window = self._window
        for cut in range(len(window) - 1, self._clean, -1):
            left = self._decode(window[:cut])
            if left + self._decode(window[cut:]) != full:
                continue
            ahead = self._known[len(left) :] if self._known.startswith(left) else ""
            new = "" if ahead else self._beyond(left)
            if new is None:
                new = self._decode(window[self._clean : cut])
            del window[:cut]
            self._clean = self._mark = 0
            self._known = ahead
            return new
        return ""
