"""RemovalLog: which blocks went, why, and how long nobody had used them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from radixkv.cache import Removal
from radixkv.server.page.pulse import Pulse

# Of each reason: blocks that were superseded, which is every turn's daily bread, push out no other.
MOST_REMOVALS = 50


@dataclass(frozen=True, slots=True)
class LoggedRemoval:
    """A removal and when it was.

    Attributes
    ----------
    number : int
        Counts all removals from 1.
    at, unused_for : float
        In seconds, by the pulse's clock: when it was, and how long after its last use.
    """

    number: int
    at: float
    unused_for: float
    removal: Removal


class RemovalLog:
    """The last removals, and how many blocks went in all for each reason."""

    def __init__(self, pulse: Pulse) -> None:
        self._last: dict[str, deque[LoggedRemoval]] = {}
        self.num_removals = 0
        self.num_blocks: dict[str, int] = {}
        self._pulse = pulse

    def __call__(self, removal: Removal) -> None:
        now = self._pulse.clock()
        self.num_removals += 1
        blocks = self.num_blocks.get(removal.reason, 0)
        self.num_blocks[removal.reason] = blocks + removal.num_blocks
        unused_for = now - self._pulse.clocks.when(removal.last_used, now)
        if removal.reason not in self._last:
            self._last[removal.reason] = deque(maxlen=MOST_REMOVALS)
        logged = LoggedRemoval(self.num_removals, now, unused_for, removal)
        self._last[removal.reason].append(logged)

    def newest(self) -> list[LoggedRemoval]:
        """Those that are kept, the newest first."""
        kept = [logged for last in self._last.values() for logged in last]
        return sorted(kept, key=lambda logged: -logged.number)
