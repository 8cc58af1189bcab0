"""Step counters: sums by policy, and snapshots that stand still."""

from __future__ import annotations

import json
import threading

from overstory.workers.step_stats import StepStats


def test_sums_by_policy_and_depth() -> None:
    stats = StepStats()
    stats.record_verify("tree-8", 18, [2, 2, 1], [2, 1, 0], 5, {"draft": 10, "verify": 30}, 2)
    stats.record_verify("tree-8", 9, [1], [0], 1, {"verify": 5})
    stats.record_verify("plain", 1, [], [], 1, {"verify": 7})
    stats.record_device("tree-8", 100, 40)
    stats.record_device("tree-8", 30, None)
    stats.record_prefill(requests=2, tokens=50, spent_ns=9)
    snapshot = stats.snapshot()
    assert snapshot["verify"]["tree-8"] == {
        "forwards": 2,
        "requests": 3,
        "rows": 27,
        "tokens": 6,
        "offered_by_depth": [3, 2, 1],
        "accepted_by_depth": [2, 1, 0],
        "stage_ns": {"draft": 10, "verify": 35},
        "device_ns": 130,
        "idle_ns": 40,
        "idle_gaps": 1,
    }
    assert snapshot["verify"]["plain"]["offered_by_depth"] == []
    assert snapshot["prefill"] == {"forwards": 1, "requests": 2, "tokens": 50, "ns": 9}
    assert json.loads(json.dumps(snapshot)) == snapshot


def test_snapshot_does_not_change_afterwards() -> None:
    stats = StepStats()
    stats.record_verify("chain", 8, [1], [1], 2, {"draft": 1})
    snapshot = stats.snapshot()
    stats.record_verify("chain", 8, [1], [1], 2, {"draft": 1})
    assert snapshot["verify"]["chain"]["forwards"] == 1
    assert snapshot["verify"]["chain"]["accepted_by_depth"] == [1]
    assert snapshot["verify"]["chain"]["stage_ns"] == {"draft": 1}


def test_many_threads_lose_nothing() -> None:
    stats = StepStats()

    def write() -> None:
        for _ in range(500):
            stats.record_verify("chain", 8, [1, 1], [1, 0], 2, {"draft": 1})

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    chain = stats.snapshot()["verify"]["chain"]
    assert (chain["forwards"], chain["tokens"]) == (2000, 4000)
    assert chain["accepted_by_depth"] == [2000, 0]
