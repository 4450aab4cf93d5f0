"""When a continuation ends, and how much of its text may be shown before that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from radixkv.decoding.byte_level import detokenizer_for
from radixkv.decoding.detokenizer import Tokenizer
from radixkv.decoding.edits import LogitEdits
from radixkv.decoding.grammar import Grammar
from radixkv.decoding.params import SamplingParams
from radixkv.errors import RequestError

FinishReason = Literal["stop", "length"]


class TextDelta(NamedTuple):
    """What one more token adds to a continuation.

    Parameters
    ----------
    text : str
        Text that is certain and may be shown.
    finish_reason : "stop", "length" or None
        None while the continuation goes on.
    stop_reason : str, int or None
        The stop string, or the token of ``stop_token_ids``, that ended it; None for the model's
        own end token and for "length".
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class _Match(NamedTuple):
    end: int
    start: int
    stop: str


_PARTS = (
    "_detokenizer",
    "_eos",
    "_held",
    "_inner",
    "_most",
    "_pieces",
    "_plain",
    "_stop_ids",
    "_stops",
    "edits",
    "finish_reason",
    "grammar",
    "params",
    "stop_reason",
    "stopped_by_token",
    "token_ids",
)


class TextStream:
    """The text of one continuation as it grows, and the rules that end it.

    Which text comes out, and where it ends, does not depend on how the text is cut into tokens:
    the stop string that is complete first wins, and of those complete at the same character the
    longest. Text that may be the beginning of a stop string is held back until it is known not to
    be. Tokens that stop are kept in ``token_ids``, but are no text.

    Parameters
    ----------
    params : SamplingParams
    tokenizer : Tokenizer or None
        Without one the text stays empty.
    eos_token_ids : iterable of int
        The model's own end tokens.
    context : sequence of int
        The prompt's tokens (the last few will do), behind which the text is decoded.
    edits : LogitEdits or None
        Told of each token, and copied with the stream; for the sampler.
    room : int or None
        Tokens for which the model's context has room; ends it as ``max_tokens`` does.
    like : TextStream, optional
        Share all that this one has; see `copy`.
    grammar : Grammar or None
        What the text must obey. Tokens that stop are allowed where it may end, and nowhere else;
        where it must end, the continuation does, whatever ``min_tokens`` says.

    Raises
    ------
    RequestError
        If there are stop strings but no tokenizer.
    """

    __slots__ = _PARTS

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        context: Sequence[int] = (),
        edits: LogitEdits | None = None,
        grammar: Grammar | None = None,
        room: int | None = None,
        like: TextStream | None = None,
    ) -> None:
        if like is not None:
            for name in _PARTS:
                setattr(self, name, getattr(like, name))
            return
        if params.stop and tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give stop_token_ids instead")
        self.params = params
        self.edits = edits
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = tuple(sorted(self._eos.union(params.stop_token_ids)))
        self.grammar = None if grammar is None else grammar.start(self._stop_ids)
        self.stopped_by_token = False
        self._stops = tuple(params.stop)
        # What a text ends with where a stop string may have begun.
        self._inner = frozenset("".join([stop[:-1] for stop in self._stops]))
        self._most = params.max_tokens if room is None else min(params.max_tokens, room)
        # Whether a token is nothing but its text, unless it stops.
        self._plain = edits is None and grammar is None and not self._stops
        self._pieces: list[str] = []
        self._held = ""
        self._detokenizer = (
            None
            if tokenizer is None
            else detokenizer_for(tokenizer, context, skip_special_tokens=params.skip_special_tokens)
        )

    @property
    def text(self) -> str:
        """All text that was returned so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def banned_tokens(self) -> tuple[int, ...]:
        """Tokens that the next sample must avoid: those that stop, until min_tokens are there."""
        return self._stop_ids if len(self.token_ids) < self.params.min_tokens else ()

    def push(self, token_id: int) -> TextDelta:
        """Append a sampled token.

        Returns
        -------
        TextDelta
            With all remaining text if this token ended the continuation.

        Raises
        ------
        RuntimeError
            If the continuation has ended already.
        """
        return self._delta(self.add(token_id))

    def add(self, token_id: int) -> str:
        """As `push`, but only the text is returned; ``finish_reason`` says whether it ended."""
        if self.finish_reason is not None:
            raise RuntimeError("a token was pushed to a continuation that has ended")
        stops = token_id in self._stop_ids
        if stops:
            stops = not self.banned_tokens
        self.token_ids.append(token_id)
        if stops or not self._plain:
            return self._add_watched(token_id, stops)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        if len(self.token_ids) >= self._most:
            return self._advance(text + self._flush(), "length")
        if text:  # Nothing is held back, and nothing in the text can end it.
            self._pieces.append(text)
        return text

    def _add_watched(self, token_id: int, stops: bool) -> str:
        """Text behind which more may happen than that there is room for no more."""
        if self.edits is not None:
            self.edits.push(token_id)
        if stops:
            self.stopped_by_token = True
            reason = token_id if token_id in self.params.stop_token_ids else None
            return self._advance(self._flush(), "stop", reason)
        if self.grammar is not None:
            self.grammar.push(token_id)
        text = self._detokenizer.push(token_id) if self._detokenizer else ""
        if self.grammar is not None and self.grammar.ended:
            return self._advance(text + self._flush(), "stop")
        if len(self.token_ids) >= self._most:
            return self._advance(text + self._flush(), "length")
        return self._advance(text)

    def finish(self) -> TextDelta:
        """End for want of room (the model's context is full); return the text held back.

        A continuation that has ended already stays as it is.
        """
        ended = self.finish_reason is not None
        return self._delta("" if ended else self._advance(self._flush(), "length"))

    def copy(self) -> TextStream:
        """Return an independent copy, for a branch that goes on with other tokens."""
        twin = TextStream(self.params, like=self)
        twin.token_ids = self.token_ids.copy()
        twin._pieces = self._pieces.copy()
        twin._detokenizer = self._detokenizer and self._detokenizer.copy()
        twin.edits = self.edits and self.edits.copy()
        twin.grammar = self.grammar and self.grammar.copy()
        return twin

    def _delta(self, text: str) -> TextDelta:
        return TextDelta(text, self.finish_reason, self.stop_reason)

    def _flush(self) -> str:
        return self._detokenizer.finish() if self._detokenizer else ""

    def _advance(
        self, text: str, ending: FinishReason | None = None, reason: str | int | None = None
    ) -> str:
        """Add decoded text; a stop string in it goes before any other reason to end."""
        held = len(self._held)
        if held:
            text = self._held + text
        if self._stops and len(self.token_ids) >= self.params.min_tokens:
            match = self._find(text, held)
            if match is not None:
                ending, reason = "stop", match.stop
                text = text[: match.end if self.params.include_stop_str_in_output else match.start]
        sure = len(text)
        if ending is None and text and text[-1] in self._inner:
            sure = self._settled(text)
        if sure < len(text):
            self._held, text = text[sure:], text[:sure]
        elif held:
            self._held = ""
        if text:
            self._pieces.append(text)
        self.finish_reason, self.stop_reason = ending, reason
        return text

    def _find(self, text: str, held: int) -> _Match | None:
        """Return the first stop string to be complete that ends behind what was held so far."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(held - len(stop) + 1, 0))
            if start >= 0:
                matches.append(_Match(start + len(stop), start, stop))
        return min(matches) if matches else None

    def _settled(self, text: str) -> int:
        """Where the longest tail begins that a stop string begins with, and goes on from."""
        sure = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
            while 0 <= start < sure:
                if stop.startswith(text[start:]):
                    sure = start
                else:
                    start = text.find(stop[0], start + 1)
        return sure


class Added(NamedTuple):
    """What a token each has added to several continuations.

    Parameters
    ----------
    texts : list of str
        As `TextStream.add` returned them; empty where it failed.
    ended : bool
        Whether any of them has ended.
    failures : dict of int to Exception
        By their places, what those raised that failed.
    """

    texts: list[str]
    ended: bool
    failures: dict[int, Exception]


def add_each(streams: list[TextStream], token_ids: list[int]) -> Added:
    """Add a token to each stream; what one raises does not keep it from the others."""
    texts: list[str] = []
    failures: dict[int, Exception] = {}
    ended = False
    for stream, token_id in zip(streams, token_ids, strict=True):
        try:
            text = stream.add(token_id)
        except Exception as error:  # a tokenizer's, which is not ours to trust
            failures[len(texts)] = error
            text = ""
        texts.append(text)
        if stream.finish_reason is not None:
            ended = True
    return Added(texts, ended, failures)
