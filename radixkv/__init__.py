"""radixkv: any Hugging Face decoder over one paged KV cache that a radix tree organises.

>>> from radixkv import LLM, SamplingParams
>>> llm = LLM.demo()
>>> llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))

Importing the package is cheap; the model's libraries are imported with the first name that needs
them, and `radixkv.cache` alone never imports them.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.cache import EPHEMERAL, PrefixCache, Retention
    from radixkv.config import CacheConfig, EngineConfig
    from radixkv.decoding import BeamSearchParams, SamplingParams
    from radixkv.engine import Completion, RequestOutput
    from radixkv.llm import LLM
    from radixkv.programs import Context, majority

__version__ = "0.1.0"

# OpenMP's threads wait for each other by turning round, for milliseconds; where others want their
# processors too, a step then takes several times as long (docs/benchmarks.md). This is some 100 us,
# as long as it takes from one operator to the next. torch's OpenMP reads it when it is loaded, so
# whoever imports torch before this has to set it, as whoever wants another value may.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_HOMES = {
    "EPHEMERAL": "radixkv.cache",
    "LLM": "radixkv.llm",
    "BeamSearchParams": "radixkv.decoding",
    "CacheConfig": "radixkv.config",
    "Completion": "radixkv.engine",
    "Context": "radixkv.programs",
    "EngineConfig": "radixkv.config",
    "PrefixCache": "radixkv.cache",
    "RequestOutput": "radixkv.engine",
    "Retention": "radixkv.cache",
    "SamplingParams": "radixkv.decoding",
    "majority": "radixkv.programs",
}

__all__ = [
    "EPHEMERAL",
    "LLM",
    "BeamSearchParams",
    "CacheConfig",
    "Completion",
    "Context",
    "EngineConfig",
    "PrefixCache",
    "RequestOutput",
    "Retention",
    "SamplingParams",
    "majority",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
