"""Tells the user what a deployment is doing: one line when a phase begins, moves on or ends."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

PHASES = ("nodes", "placement", "weights", "warm-up", "first token")

# What a rank says it does (workers/rank.py) -> how far its replica is.
_RANK_PHASE = {
    "starting": "placement",
    "created": "placement",
    "importing": "weights",
    "imported": "weights",
    "weights": "weights",
    "memory": "weights",
    "ready": "warm-up",
    "serving": "warm-up",
}


class Progress:
    """Prints to `out`; a line only when something has changed."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._begun = clock()
        self._last: tuple[str, str] | None = None

    @property
    def seconds(self) -> float:
        """Since this object was made."""
        return self._clock() - self._begun

    def tell(self, phase: str, what: str) -> None:
        """Report `what` of `phase`, one of `PHASES`."""
        assert phase in PHASES, phase
        if (phase, what) != self._last:
            self._last = (phase, what)
            print(f"[{self.seconds:6.1f} s] {phase:<11}  {what}", file=self._out, flush=True)


def describe_ranks(phases: Mapping[str, Mapping[str, Any]], expected: int) -> tuple[str, str]:
    """Phase of a deployment and a line about its ranks.

    Args:
        phases: `RankHost.phase()` of each rank that answers, by actor name.
        expected: number of ranks of all replicas.
    """
    if not phases:
        return "placement", f"waiting for {expected} rank processes"
    counts: dict[str, int] = {}
    for row in phases.values():
        counts[row["phase"]] = counts.get(row["phase"], 0) + 1
    listed = ", ".join(f"{count} {phase}" for phase, count in counts.items())
    behind = min(PHASES.index(_RANK_PHASE.get(row["phase"], "weights")) for row in phases.values())
    if len(phases) < expected:
        listed += f", {expected - len(phases)} not there yet"
        behind = PHASES.index("placement")
    return PHASES[behind], f"{expected} ranks: {listed}"


def failure_text(message: str) -> str:
    """What went wrong, out of Serve's message: the rank's cause of death where there is one."""
    lines = message.splitlines()
    for number, line in enumerate(lines):
        at = line.find("rank ")
        if at >= 0 and " died (exit code" in line:
            return "\n".join([line[at:], *lines[number + 1 :]])
    return message.strip() or "Serve gives no reason; see its logs"
