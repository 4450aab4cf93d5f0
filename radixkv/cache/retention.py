"""Retention: what a program knows about the future that no eviction policy can."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """A hint on how long the blocks of a sequence will be wanted.

    Parameters
    ----------
    ephemeral : bool
        Nobody will ask for these tokens again (a branch that lost, a closed context, a one-off
        request): they go before anything else.
    priority : int
        Higher stays longer, under the policy "priority".
    expires_at : float
        Reading of `time.monotonic` from which ``priority`` no longer counts.
    """

    ephemeral: bool = False
    priority: int = 0
    expires_at: float = math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.expires_at):
            raise ConfigError("expires_at must be a reading of time.monotonic, not NaN")
        if self.ephemeral and (self.priority or self.expires_at != math.inf):
            raise ConfigError("an ephemeral sequence has no priority and no time to live")

    @classmethod
    def for_seconds(cls, seconds: float, priority: int = 1) -> Retention:
        """A priority that counts for ``seconds`` from now."""
        if not seconds > 0:
            raise ConfigError(f"a time to live must be above 0 seconds, not {seconds}")
        return cls(priority=priority, expires_at=time.monotonic() + seconds)


DEFAULT_RETENTION = Retention()
EPHEMERAL = Retention(ephemeral=True)


def priority_at(hint: Retention, now: float) -> int:
    """The hint's priority, which counts as 0 once its time has run out."""
    return hint.priority if now < hint.expires_at else 0


def stronger(left: Retention, right: Retention, now: float) -> Retention:
    """What two users of the same blocks need together: the longer stay of the two."""
    return max(
        left,
        right,
        key=lambda hint: (not hint.ephemeral, priority_at(hint, now), hint.expires_at),
    )
