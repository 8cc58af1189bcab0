"""Cumulative counters of one rank's steps: what was drafted, accepted and how long each stage took.

Pure and thread-safe: the scheduler's thread writes, control methods read. Nothing is ever reset; a
reader that wants rates takes differences of snapshots.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def _add_by_depth(total: list[int], values: Sequence[int]) -> None:
    total.extend([0] * (len(values) - len(total)))
    for depth, value in enumerate(values):
        total[depth] += value


@dataclass
class ModeCounters:
    """Sums over all verify steps under one policy.

    Attributes:
        forwards: target forwards (one per batch and step).
        requests: requests verified, summed over the forwards.
        rows: target rows computed, roots and padding included.
        tokens: tokens handed out, the bonus token included.
        offered_by_depth: requests that had at least one node at depth 1, 2, ... and had not ended
            before it.
        accepted_by_depth: requests whose accepted path reached depth 1, 2, ... before their end.
        stage_ns: nanoseconds of the rank's own time by stage.
        device_ns: nanoseconds from the first to the last of a step's work on its device.
        idle_ns, idle_gaps: nanoseconds between the end of one step's work and the begin of the
            next one's, where nothing lay between the two, and how many such gaps there were.
    """

    forwards: int = 0
    requests: int = 0
    rows: int = 0
    tokens: int = 0
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    stage_ns: dict[str, int] = field(default_factory=dict)
    device_ns: int = 0
    idle_ns: int = 0
    idle_gaps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain copy that serialises as JSON."""
        return {
            "forwards": self.forwards,
            "requests": self.requests,
            "rows": self.rows,
            "tokens": self.tokens,
            "offered_by_depth": list(self.offered_by_depth),
            "accepted_by_depth": list(self.accepted_by_depth),
            "stage_ns": dict(self.stage_ns),
            "device_ns": self.device_ns,
            "idle_ns": self.idle_ns,
            "idle_gaps": self.idle_gaps,
        }


class StepStats:
    """Counters by policy name, plus those of prefill."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._modes: dict[str, ModeCounters] = {}
        self._prefill = {"forwards": 0, "requests": 0, "tokens": 0, "ns": 0}

    def record_verify(
        self,
        mode: str,
        rows: int,
        offered_by_depth: Sequence[int],
        accepted_by_depth: Sequence[int],
        tokens: int,
        stage_ns: Mapping[str, int],
        requests: int = 1,
    ) -> None:
        """Add one verify step of a batch.

        Args:
            mode: policy name, as ``str(TreePolicy)``.
            rows: target rows of the whole batch.
            offered_by_depth: requests with a node at depth 1, 2, ...
            accepted_by_depth: requests whose path reached depth 1, 2, ...
            tokens: tokens handed out to all requests.
            stage_ns: nanoseconds by stage name.
            requests: requests of the batch that were still running.
        """
        with self._lock:
            counters = self._modes.setdefault(mode, ModeCounters())
            counters.forwards += 1
            counters.requests += requests
            counters.rows += rows
            counters.tokens += tokens
            _add_by_depth(counters.offered_by_depth, offered_by_depth)
            _add_by_depth(counters.accepted_by_depth, accepted_by_depth)
            for stage, spent in stage_ns.items():
                counters.stage_ns[stage] = counters.stage_ns.get(stage, 0) + spent

    def record_device(self, mode: str, device_ns: int, idle_ns: int | None) -> None:
        """Add what a step took on its device.

        Args:
            mode: policy name, as ``str(TreePolicy)``.
            device_ns: from the first of its work to the last.
            idle_ns: from the last of the step before; None if something else lay between.
        """
        with self._lock:
            counters = self._modes.setdefault(mode, ModeCounters())
            counters.device_ns += device_ns
            if idle_ns is not None:
                counters.idle_ns += idle_ns
                counters.idle_gaps += 1

    def record_prefill(self, requests: int, tokens: int, spent_ns: int) -> None:
        """Add one prefill forward (a chunk counts as one) of ``tokens`` prompt tokens."""
        with self._lock:
            self._prefill["forwards"] += 1
            self._prefill["requests"] += requests
            self._prefill["tokens"] += tokens
            self._prefill["ns"] += spent_ns

    def snapshot(self) -> dict[str, Any]:
        """All counts so far, JSON-able: ``{"verify": {policy: {...}}, "prefill": {...}}``."""
        with self._lock:
            return {
                "verify": {mode: counters.as_dict() for mode, counters in self._modes.items()},
                "prefill": dict(self._prefill),
            }


STATS = StepStats()
