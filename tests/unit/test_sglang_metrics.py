"""SGLang's own metrics on their way to Ray."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from overstory.workers.sglang_metrics import PassedOn, sglang_samples


class _Gauges:
    """Ray's gauges as far as they are used; what was set last, by name and tags."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def make(self, name: str, keys: tuple[str, ...]) -> Any:
        self.made.append(name)
        outer = self

        class _Gauge:
            def set(self, value: float, tags: dict[str, str]) -> None:
                assert set(tags) == set(keys)
                assert all(isinstance(text, str) for text in tags.values())
                outer.values[name, tuple(sorted(tags.items()))] = value

        return _Gauge()


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    running = Gauge("sglang:num_running_reqs", "running", ["tp_rank"], registry=registry)
    running.labels(tp_rank=0).set(3)
    Counter("sglang:prompt_tokens", "prompt", ["tp_rank"], registry=registry).labels(0).inc(5)
    first = Histogram("sglang:ttft", "first token", ["m"], registry=registry, buckets=(0.1, 1.0))
    first.labels("x").observe(0.5)
    Gauge("python_info", "not SGLang's", registry=registry).set(1)
    return registry


def test_every_kind_keeps_its_name_suffixes_and_labels() -> None:
    gauges = _Gauges()
    passed = PassedOn(_registry(), {"replica": "r", "process": "rank-0"}, gauges.make)
    whose = (("process", "rank-0"), ("replica", "r"))
    count = passed.copy()
    assert gauges.values["sglang_num_running_reqs", (*whose, ("tp_rank", "0"))] == 3
    assert gauges.values["sglang_prompt_tokens_total", (*whose, ("tp_rank", "0"))] == 5
    by_bound = {
        dict(tags)["le"]: value
        for (name, tags), value in gauges.values.items()
        if name == "sglang_ttft_bucket"
    }
    assert by_bound == {"0.1": 0, "1.0": 1, "+Inf": 1}
    assert gauges.values["sglang_ttft_sum", (("m", "x"), *whose)] == 0.5
    assert count == len(gauges.values) == 7
    assert not any("python" in name or "created" in name for name in gauges.made)


def test_a_second_copy_makes_no_new_gauges() -> None:
    registry, gauges = _registry(), _Gauges()
    passed = PassedOn(registry, {"replica": "r"}, gauges.make)
    passed.copy()
    made = len(gauges.made)
    late = Counter("sglang:late", "late", registry=registry)
    late.inc(2)
    passed.copy()
    assert gauges.made[made:] == ["sglang_late_total"]
    assert gauges.values["sglang_late_total", (("replica", "r"),)] == 2


def test_other_metrics_are_left_alone() -> None:
    registry = CollectorRegistry()
    Gauge("other", "x", registry=registry).set(1)
    assert list(sglang_samples(registry)) == []
