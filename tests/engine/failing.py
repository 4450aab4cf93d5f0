"""A tokenizer's failures, put in with the data: methods of compiled classes cannot be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.decoding import TextStream


class _Failing:
    """Stands for a detokenizer; its copies fail with it."""

    def __init__(self, inner: Any, fails: Callable[[], bool]) -> None:
        self._inner = inner
        self._fails = fails

    def push(self, token_id: int) -> str:
        if self._fails():
            raise ValueError("no such token")
        text: str = self._inner.push(token_id)
        return text

    def finish(self) -> str:
        text: str = self._inner.finish()
        return text

    def copy(self) -> _Failing:
        return _Failing(self._inner.copy(), self._fails)


def let_fail(stream: TextStream, fails: Callable[[], bool]) -> None:
    """From now on a token of this stream has no text whenever ``fails`` says so."""
    stream._detokenizer = _Failing(stream._detokenizer, fails)  # type: ignore[assignment]
