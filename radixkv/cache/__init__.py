"""The prefix cache: pure Python, numpy, xxhash and sortedcontainers; it never imports torch."""
# ruff: noqa: E402 -- where the modules are looked for comes before the first of them

from radixkv.compiled import CACHE as _CACHE
from radixkv.compiled import use_compiled as _use_compiled

IS_COMPILED = _use_compiled(_CACHE, __path__)

from radixkv.cache.copies import CopyOrder, copy_waves
from radixkv.cache.events import BlocksRemoved, BlocksStored, Removal
from radixkv.cache.hashing import Namespace, TokenIds, chain_hashes, namespace_hash, token_bytes
from radixkv.cache.manager import PrefixCache
from radixkv.cache.policies import FIFO, LRU, EvictionPolicy, PlainLRU, Priority
from radixkv.cache.retention import DEFAULT_RETENTION, EPHEMERAL, Retention
from radixkv.cache.sequence import Sequence
from radixkv.cache.stats import CacheStats, Counters

__all__ = [
    "DEFAULT_RETENTION",
    "EPHEMERAL",
    "FIFO",
    "IS_COMPILED",
    "LRU",
    "BlocksRemoved",
    "BlocksStored",
    "CacheStats",
    "CopyOrder",
    "Counters",
    "EvictionPolicy",
    "Namespace",
    "PlainLRU",
    "PrefixCache",
    "Priority",
    "Removal",
    "Retention",
    "Sequence",
    "TokenIds",
    "chain_hashes",
    "copy_waves",
    "namespace_hash",
    "token_bytes",
]
