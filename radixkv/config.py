"""Settings: frozen, keyword-only, validated when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from radixkv.cache.events import EventSink
    from radixkv.cache.policies import EvictionPolicy


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The prefix cache.

    Parameters
    ----------
    num_blocks : int
        Physical blocks in the pool.
    block_size : int
        Token slots in a block.
    eviction : str or EvictionPolicy
        "lru" (ephemeral first, then least recently used), "plain-lru", "fifo" or "priority".
    block_hash : callable, optional
        bytes -> int, by which the tree finds a node's child; xxh3 unless a test plugs in another.
    events : callable, optional
        Called with each `BlocksStored` and `BlocksRemoved`; off by default.
    """

    num_blocks: int
    block_size: int = 16
    eviction: str | EvictionPolicy = "lru"
    block_hash: Callable[[bytes], int] | None = None
    events: EventSink | None = None

    def __post_init__(self) -> None:
        _positive("num_blocks", self.num_blocks)
        _positive("block_size", self.block_size)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engine over the cache.

    Parameters
    ----------
    max_num_seqs : int
        Sequences (branches counted one by one) that run at the same time.
    max_num_batched_tokens : int
        Tokens computed in one step: all decodes first, then chunks of prompts.
    max_model_len : int, optional
        Longest prompt plus output; the model's own limit unless given.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        _positive("max_num_seqs", self.max_num_seqs)
        _positive("max_num_batched_tokens", self.max_num_batched_tokens)
        if self.max_model_len is not None:
            _positive("max_model_len", self.max_model_len)
