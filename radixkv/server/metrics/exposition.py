"""Metrics: what one service shows to Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from radixkv.cache.stats import Histogram
from radixkv.server.metrics.catalogue import METRICS, PREFIX, Distribution, Labelled, Metric
from radixkv.server.metrics.snapshot import Snapshot

FAMILIES: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class Metrics:
    """What one service shows to Prometheus.

    Parameters
    ----------
    model_name : str
        Value of the label ``model_name``, which all metrics of the engine have, as vLLM's do.

    Attributes
    ----------
    registry : CollectorRegistry
        This service's own (nothing is global), of what is counted outside the engine.
    http_requests : Counter
        Labels ``method``, ``handler`` (the route, never the path) and ``status``.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.registry = CollectorRegistry(auto_describe=False)
        self.http_requests = Counter(
            f"{PREFIX}http_requests",
            "Requests over HTTP that were answered.",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    async def render(self, snapshot: Snapshot) -> bytes:
        """The text that Prometheus reads, of a snapshot and of what is counted here.

        A few hundred lines take milliseconds, so others have their turn after each metric.
        """
        texts = []
        for metric in METRICS:
            texts.append(generate_latest(_One(_family(metric, snapshot, self.model_name))))
            await asyncio.sleep(0)
        texts.append(generate_latest(self.registry))
        return b"".join(texts)


class _One(Collector):
    """Collects one family, as `generate_latest` wants it."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def _family(metric: Metric, snapshot: Snapshot, model: str) -> Family:
    name = f"{PREFIX}{metric.name}"
    if isinstance(metric, Distribution):
        distribution = HistogramMetricFamily(name, metric.meaning, labels=("model_name",))
        histogram = metric.read(snapshot)
        distribution.add_metric((model,), _buckets(histogram), histogram.total)
        return distribution
    if isinstance(metric, Labelled):
        labels = ("model_name", metric.label)
        family = FAMILIES[metric.kind](name, metric.meaning, labels=labels)
        for label, value in metric.read(snapshot).items():
            family.add_metric((model, label), value)
        return family
    family = FAMILIES[metric.kind](name, metric.meaning, labels=("model_name",))
    family.add_metric((model,), metric.read(snapshot))
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Values up to each bound, as Prometheus wants them: cumulated."""
    buckets, below = [], 0
    names = (*(str(float(bound)) for bound in histogram.bounds), "+Inf")
    for name, count in zip(names, histogram.counts, strict=True):
        below += count
        buckets.append((name, float(below)))
    return buckets
