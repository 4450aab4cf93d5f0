"""Holds: sequences that outlive requests, so that a context keeps its blocks between generations.

A hold is memory in use, but the first to be asked for when memory runs out: before a running
request is preempted and before a waiting one waits, the hold that was used longest ago is given up.
Its blocks stay cached until they are evicted, and whoever needs it next acquires its tokens anew.
So any number of holds may stand open, and none can ever block the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from radixkv.cache import PrefixCache, Retention, Sequence, TokenIds


class Hold:
    """A sequence between requests.

    Attributes
    ----------
    sequence : Sequence or None
        All of its tokens are computed. None while a request runs on it, before the first one, and
        once it was given up.
    """

    __slots__ = ("sequence",)

    def __init__(self, sequence: Sequence | None = None) -> None:
        self.sequence = sequence


class Holds:
    """All sequences that stand between requests, used longest ago first."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._idle: dict[Hold, None] = {}
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __iter__(self) -> Iterator[Hold]:
        """Those that stand, used longest ago first."""
        return iter(self._idle)

    # -- for requests ----------------------------------------------------------------------------

    def take(
        self, hold: Hold, tokens: TokenIds, *, resumed: bool = False, spare_blocks: int = 0
    ) -> Sequence | None:
        """The hold's sequence, grown to ``tokens``, for a request to run on; None if it has none.

        See `Sequence.resume` for the parameters.

        Raises
        ------
        OutOfBlocksError
            If the new tokens do not fit. The hold keeps its sequence then, and counts as used.
        """
        sequence = self._trusted(hold)
        if sequence is None:
            return None
        del self._idle[hold]
        try:
            sequence.resume(tokens, resumed=resumed, spare_blocks=spare_blocks)
        except BaseException:
            self._idle[hold] = None
            raise
        hold.sequence = None
        return sequence

    def put(self, hold: Hold, sequence: Sequence) -> None:
        """A request has ended: keep what is computed of its sequence, if it can be trusted."""
        if sequence.withdrawn or not sequence.cacheable or not sequence.num_computed:
            self.cache.release(sequence)
            return
        sequence.truncate(sequence.num_computed)
        self.cache.commit(sequence)
        hold.sequence = sequence
        self._idle[hold] = None

    def reclaim(self) -> bool:
        """Give up the sequence that was used longest ago; False if there is none."""
        if not self._idle:
            return False
        hold = next(iter(self._idle))
        if (sequence := self._trusted(hold)) is not None:
            self.cache.commit(sequence, include_open=True)
            self.release(hold)
            self.given_up += 1
        return True

    # -- for contexts ----------------------------------------------------------------------------

    def fork(self, hold: Hold) -> Hold:
        """A second hold over the same blocks; nothing is computed or copied."""
        sequence = self._trusted(hold)
        if sequence is None:
            return Hold()
        branch = Hold(self.cache.fork(sequence))
        self._idle[branch] = None
        return branch

    def truncate(self, hold: Hold, num_tokens: int) -> None:
        """Keep at the most the first ``num_tokens`` tokens."""
        sequence = self._trusted(hold)
        if sequence is not None and sequence.num_tokens > num_tokens:
            sequence.truncate(num_tokens)

    def release(self, hold: Hold, retention: Retention | None = None) -> None:
        """End a hold that no request runs on; see `PrefixCache.release`."""
        sequence, hold.sequence = hold.sequence, None
        self._idle.pop(hold, None)
        if sequence is not None:
            self.cache.release(sequence, retention)

    def release_all(self) -> None:
        """Give every sequence up; all that is computed stays cached."""
        while self.reclaim():
            pass

    def _trusted(self, hold: Hold) -> Sequence | None:
        """The hold's sequence, unless its KV was withdrawn or the cache was reset."""
        sequence = hold.sequence
        if sequence is not None and (sequence.withdrawn or not sequence.cacheable):
            self.release(hold)
            return None
        return sequence
