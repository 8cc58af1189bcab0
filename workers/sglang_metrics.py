"""SGLang's own metrics of this process, passed on through Ray (`engine.enable_metrics: true`).

SGLang keeps them in its process's Prometheus registry, which its HTTP server would export. Every
sample becomes a gauge of Ray with SGLang's name (`sglang:x` as `sglang_x`, in Ray's export
`ray_sglang_x`), its labels, and whose it is. Counters and histograms keep their suffixes (`_total`,
`_bucket`, `_sum`, `_count`), so that queries for SGLang work but for the prefix.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "sglang:"
EVERY_S = 5.0

MakeGauge = Callable[[str, tuple[str, ...]], Any]
"""A gauge of a name with label names; has Ray's `set(value, tags)`."""


def sglang_samples(registry: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each sample of SGLang's in a `CollectorRegistry`."""
    for family in registry.collect():
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield sample.name, {k: str(v) for k, v in sample.labels.items()}, sample.value


class PassedOn:
    """Copies samples into gauges.

    Args:
        registry: what SGLang registers with.
        labels: whose metrics they are.
        make_gauge: Ray's, but for tests.
    """

    def __init__(self, registry: Any, labels: Mapping[str, str], make_gauge: MakeGauge) -> None:
        self._registry = registry
        self._labels = dict(labels)
        self._make_gauge = make_gauge
        self._gauges: dict[tuple[str, tuple[str, ...]], Any] = {}

    def copy(self) -> int:
        """Copies every sample once; their number."""
        count = 0
        for name, labels, value in sglang_samples(self._registry):
            tags = {**labels, **self._labels}
            key = name.replace(":", "_"), tuple(sorted(tags))
            if key not in self._gauges:
                self._gauges[key] = self._make_gauge(*key)
            self._gauges[key].set(value, tags=tags)
            count += 1
        return count


def _ray_gauge(name: str, labels: tuple[str, ...]) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(name, f"SGLang's {name.replace('_', ':', 1)}", tag_keys=labels)


def pass_on(labels: Mapping[str, str], every_s: float = EVERY_S) -> threading.Thread:
    """Copies this process's metrics again and again, in a thread that ends with the process. An
    error is logged once and costs that copy alone."""
    from prometheus_client import REGISTRY

    passed = PassedOn(REGISTRY, labels, _ray_gauge)

    def keep_copying() -> None:
        pause, complained = threading.Event(), False
        while True:
            try:
                passed.copy()
            except Exception:
                if not complained:
                    logger.exception("SGLang's metrics were not passed on")
                complained = True
            pause.wait(every_s)

    thread = threading.Thread(target=keep_copying, name="sglang-metrics", daemon=True)
    thread.start()
    return thread
