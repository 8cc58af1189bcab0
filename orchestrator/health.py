"""Judges a rank by its progress, not by whether it answers. Pure; the caller brings the time.

A wedged engine still answers probes, and a long prefill answers none of its requests for a while.
So a
rank with work in hand is judged by its count of launched batches: standing still too long is a
stall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["starting", "idle", "busy", "stalled", "silent"]


@dataclass(frozen=True)
class Health:
    """A rank at one moment.

    Attributes:
        state: `starting` (not serving yet), `idle` (nothing in hand), `busy` (work, and progress),
            `stalled` (work, no progress for too long), `silent` (no report for too long).
        since_s: seconds since its last progress (or, silent, since its last report).
        reason: in words, for `stalled` and `silent`.
    """

    state: State
    since_s: float
    reason: str = ""

    @property
    def good(self) -> bool:
        """Whether requests may be sent to its replica."""
        return self.state in ("idle", "busy")


class ProgressJudge:
    """Follows the reports of one rank.

    Args:
        stall_s: longest standstill with work in hand.
        silence_s: longest time without a report.
        now_s: when it starts to be followed.
    """

    def __init__(self, stall_s: float, silence_s: float, now_s: float) -> None:
        self._stall_s = stall_s
        self._silence_s = silence_s
        self._reported_s = self._moved_s = now_s
        self._forwards = -1
        self._phase = "created"
        self._work = 0

    def report(self, now_s: float, report: Mapping[str, Any]) -> None:
        """Takes in a rank's report (`RankHost.report`)."""
        self._reported_s = now_s
        load = report.get("load") or {}
        work = int(load.get("running", 0)) + int(load.get("waiting", 0))
        forwards = int(report["forwards"])
        if forwards != self._forwards or work == 0 or self._work == 0:
            self._moved_s = now_s
        self._forwards, self._work, self._phase = forwards, work, str(report["phase"])

    def judge(self, now_s: float) -> Health:
        """The rank's health now."""
        silent_s, still_s = now_s - self._reported_s, now_s - self._moved_s
        if silent_s > self._silence_s:
            return Health("silent", silent_s, f"no report for {silent_s:.0f} s")
        if self._phase != "serving":
            return Health("starting", still_s)
        if self._work == 0:
            return Health("idle", still_s)
        if still_s > self._stall_s:
            reason = f"{self._work} requests in hand, but no batch launched for {still_s:.0f} s"
            return Health("stalled", still_s, reason)
        return Health("busy", still_s)
