"""Continuous batching over the cache and a model."""

from radixkv.engine.engine import Engine
from radixkv.engine.request import Completion, Request, RequestOutput, TokenDelta, output_of
from radixkv.engine.runner import ModelRunner
from radixkv.engine.scheduler import Scheduler
from radixkv.engine.stats import EngineCounters, EngineStats

__all__ = [
    "Completion",
    "Engine",
    "EngineCounters",
    "EngineStats",
    "ModelRunner",
    "Request",
    "RequestOutput",
    "Scheduler",
    "TokenDelta",
    "output_of",
]
