"""Observed: all who look on a service from outside: metrics, logs, traces and KV events."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from radixkv.errors import ConfigError, EngineStoppedError
from radixkv.llm import LLM
from radixkv.server.access_log import log_as_json, log_plainly
from radixkv.server.config import ServerConfig
from radixkv.server.metrics.exposition import Metrics
from radixkv.server.metrics.snapshot import Snapshot, take
from radixkv.server.metrics.watch import EngineWatch
from radixkv.server.record import Record, Reporter
from radixkv.server.stats_log import log_stats
from radixkv.server.worker import EngineWorker

if TYPE_CHECKING:
    from radixkv.server.kv_events import KVEventPublisher
    from radixkv.server.tracing import Tracing

log = logging.getLogger("radixkv.server")

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Observed:
    """Who looks on, as the configuration says; begins and ends with the service.

    Attributes
    ----------
    metrics : Metrics
    kv_events : KVEventPublisher or None
    reporters : list of callable
        Called with the record of each request over HTTP at its end; may be added to.

    Raises
    ------
    ConfigError
        If something cannot be looked at as asked: an endpoint is taken, a package is missing.
    """

    def __init__(
        self, llm: LLM, worker: EngineWorker, model_name: str, config: ServerConfig
    ) -> None:
        self._worker = worker
        self._log_seconds = config.log_stats_seconds
        self._logging: asyncio.Task[None] | None = None
        self.metrics = Metrics(model_name)
        self.reporters: list[Reporter] = [self._count]
        if config.access_log:
            self.reporters.append(log_as_json if config.access_log == "json" else log_plainly)
        self.kv_events = _kv_events(config.kv_events, llm.cache.block_size)
        try:
            self._tracing = _tracing(model_name, config.otlp_endpoint)
        except ConfigError:
            if self.kv_events is not None:
                self.kv_events.close()
            raise
        if self._tracing is not None:
            self.reporters.append(self._tracing.report)
        if self.kv_events is not None:
            llm.cache.listen(self.kv_events.sink)
        self._watch = EngineWatch()
        worker.watch(self._watch)
        llm.cache.measure_residency()

    def start(self) -> None:
        """Begin; from a running event loop."""
        if self.kv_events is not None:
            self.kv_events.start()
        if self._log_seconds:
            self._logging = asyncio.create_task(log_stats(self.snapshot, self._log_seconds))

    async def snapshot(self) -> Snapshot:
        """All that is counted, between two steps; at the end, once the engine has stopped."""
        with suppress(EngineStoppedError):
            return await self._worker.call(self._take)
        await self._worker.gone()
        return self._take(self._worker.llm)

    def _take(self, llm: LLM) -> Snapshot:
        return take(llm, self._watch, self.kv_events.counts if self.kv_events else _no_events)

    def _count(self, record: Record) -> None:
        labels = (record.method, record.route, str(record.status))
        self.metrics.http_requests.labels(*labels).inc()

    async def close(self) -> None:
        """End, once the engine has: what it did last is still sent."""
        if self._logging is not None:
            self._logging.cancel()
            with suppress(asyncio.CancelledError):
                await self._logging
        if self.kv_events is not None:
            await asyncio.to_thread(self.kv_events.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def _no_events() -> tuple[int, int]:
    return 0, 0


def _kv_events(endpoint: str | None, block_size: int) -> KVEventPublisher | None:
    if endpoint is None:
        return None
    try:
        from radixkv.server.kv_events import KVEventPublisher
    except ImportError as error:
        raise ConfigError(
            f"KV events need a package that is missing ({error.name}): "
            "pip install 'radixkv[events]'"
        ) from None
    return KVEventPublisher(endpoint, block_size)


def _tracing(model_name: str, endpoint: str | None) -> Tracing | None:
    if endpoint is None and not os.environ.get(ENDPOINT_VARIABLE):
        return None
    try:
        from radixkv.server.tracing import Tracing
    except ImportError as error:
        missing = f"traces need a package that is missing ({error.name})"
        if endpoint is not None:
            raise ConfigError(f"{missing}: pip install 'radixkv[traces]'") from None
        # The variable may be meant for others.
        log.warning("%s is set, but %s", ENDPOINT_VARIABLE, missing)
        return None
    return Tracing.to(model_name, endpoint)
