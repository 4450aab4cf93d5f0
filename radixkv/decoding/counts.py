"""How often each token was generated: small arrays that grow with a continuation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

NO_IDS: Ids = np.empty(0, np.int64)


class TokenCounts:
    """The distinct tokens of one continuation, in the order in which they first came.

    Adding a token costs O(1) amortised; a copy costs O(distinct tokens) and shares the prompt's.

    Parameters
    ----------
    prompt : (distinct,) int64
        The prompt's tokens, ascending and without repeats; never changed.
    """

    __slots__ = ("_counts", "_fresh", "_ids", "_places", "prompt")

    def __init__(self, prompt: Ids = NO_IDS) -> None:
        self.prompt = prompt
        self._places: dict[int, int] = {}
        self._ids = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self._fresh = np.empty(16, np.bool_)

    @property
    def ids(self) -> Ids:
        """Generated tokens without repeats: (distinct,) int64, valid until the next `add`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of ``ids`` was generated: (distinct,) int64, likewise."""
        return self._counts[: len(self._places)]

    @property
    def fresh(self) -> Ids:
        """Those of ``ids`` that are not in the prompt: int64."""
        return self.ids[self._fresh[: len(self._places)]]

    def add(self, token_id: int) -> None:
        """Count one more generated token."""
        place = self._places.get(token_id)
        if place is not None:
            self._counts[place] += 1
            return
        place = len(self._places)
        if place == len(self._ids):
            self._grow()
        self._places[token_id] = place
        self._ids[place] = token_id
        self._counts[place] = 1
        at = np.searchsorted(self.prompt, token_id)
        self._fresh[place] = at == len(self.prompt) or self.prompt[at] != token_id

    def copy(self) -> TokenCounts:
        """Return an independent copy, for a branch that goes on with other tokens."""
        twin = object.__new__(TokenCounts)
        twin.prompt = self.prompt
        twin._places = self._places.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        twin._fresh = self._fresh.copy()
        return twin

    def _grow(self) -> None:
        size = 2 * len(self._ids)
        self._ids = np.resize(self._ids, size)
        self._counts = np.resize(self._counts, size)
        self._fresh = np.resize(self._fresh, size)
