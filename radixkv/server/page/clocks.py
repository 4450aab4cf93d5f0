"""ClockTimes: when a reading of the tree's logical clock was."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

# More readings than this are thinned: the older they are, the less the second matters.
MOST_READINGS = 4096


class ClockTimes:
    """Readings of a logical clock beside those of a real one; the old ones far apart."""

    def __init__(self) -> None:
        self._clocks: list[int] = []
        self._seconds: list[float] = []

    def note(self, clock: int, seconds: float) -> None:
        """The logical clock reads ``clock`` at ``seconds``; both never go back."""
        if self._clocks and self._clocks[-1] == clock:
            return
        self._clocks.append(clock)
        self._seconds.append(seconds)
        if len(self._clocks) > MOST_READINGS:
            # The later of two: a time is never named earlier than it was.
            for readings in (self._clocks, self._seconds):
                del readings[0 : MOST_READINGS // 2 : 2]

    def when(self, clock: int, now: float) -> float:
        """The time of the first reading that shows ``clock`` or more; now, if none does yet."""
        place = bisect_left(self._clocks, clock)
        return self._seconds[place] if place < len(self._seconds) else now

    def when_each(self, clocks: Sequence[int], now: float) -> list[float]:
        """`when` of many, rounded to tenths of a second."""
        places = np.searchsorted(self._clocks, clocks)
        seconds: list[float] = np.array([*self._seconds, now]).round(1)[places].tolist()
        return seconds
