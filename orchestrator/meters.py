"""Instruments for the metrics of a table: as Prometheus text of this process, and through Ray.

Recording never fails a request: names and labels are checked by tests, and a value that Ray's
agent does not take is lost in Ray's own log.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry

from overstory.orchestrator.metric_table import Metric

prometheus_client.disable_created_metrics()  # a series more for each counter, of no use here

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `Meters.text`."""


class Meters:
    """Records values; for one event loop or thread."""

    def __init__(self, metrics: Sequence[Metric], deployment: str, through_ray: bool) -> None:
        """`through_ray` needs a process that Ray runs."""
        self._registry = CollectorRegistry()
        self._deployment = deployment
        self._text = {metric.name: _text_instrument(metric, self._registry) for metric in metrics}
        self._begun: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        self._ray: dict[str, Any] = {}
        if through_ray:
            self._ray = {metric.name: _ray_instrument(metric) for metric in metrics}

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Count up by `value`. With 0 the series begins: to Prometheus a series' first value is no
        increase, and a panel without a series is empty."""
        self._child(name, labels).inc(value)
        if name not in self._ray:
            return
        series = name, tuple(sorted(labels.items()))
        if value:
            self._ray[name].inc(value, tags=self._tags(labels))
        elif series not in self._begun:
            self._ray[name]._record(0.0, tags=self._tags(labels))  # `inc` refuses 0
        self._begun.add(series)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._child(name, labels).set(value)
        if name in self._ray:
            self._ray[name].set(value, tags=self._tags(labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        self._child(name, labels).observe(value)
        if name in self._ray:
            self._ray[name].observe(value, tags=self._tags(labels))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return prometheus_client.generate_latest(self._registry)

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        return self._text[name].labels(deployment=self._deployment, **labels)

    def _tags(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {"deployment": self._deployment, **labels}


def _text_instrument(metric: Metric, registry: CollectorRegistry) -> Any:
    name, labels = f"overstory_{metric.name}", ("deployment", *metric.labels)
    text = f"{metric.help} ({metric.unit})"
    if metric.kind == "histogram":
        return prometheus_client.Histogram(
            name, text, labels, registry=registry, buckets=metric.buckets
        )
    kind = prometheus_client.Counter if metric.kind == "counter" else prometheus_client.Gauge
    return kind(name, text, labels, registry=registry)


def _ray_instrument(metric: Metric) -> Any:
    from ray.util import metrics

    name, labels = f"overstory_{metric.name}", ("deployment", *metric.labels)
    text = f"{metric.help} ({metric.unit})"
    if metric.kind == "histogram":
        return metrics.Histogram(name, text, boundaries=list(metric.buckets), tag_keys=labels)
    kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
    return kind(name, text, tag_keys=labels)
