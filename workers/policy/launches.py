"""When decode steps were launched, and what each took by that. Pure.

Where the host runs ahead of the device, the time of a step is that from its launch to the next. A
step only leaves a mark; what marks say is worked out when the rule is at work anyway, which would
last longer than what there is to tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median_low

from overstory.workers.policy.choice import LONGEST_PROBE, Shape
from overstory.workers.policy.compared import BESIDE

WORKED = 0
"""A mark: what the rule itself did falls into the step at hand."""

INTERRUPTED = -1
"""A mark: something else than a decode step ran."""

LOOP_WAITED = 4
"""Where a step took more than so many times what steps around it did, the loop waited: for a lease,
for a command at a boundary, or as it was paused."""

READ = 3 * BESIDE
"""Marks that are read for the last `BESIDE` steps of a run, of some hundred: with what else is
marked and steps that do not count."""

APART_NS = 1_000_000_000
"""Steps further apart are not compared: a server without requests, or a loop that waited. What
disturbs a machine comes and goes meanwhile (`compared.py`)."""


def periods_ns(marks: Sequence[int]) -> list[int]:
    """What steps took, of those whose time was theirs alone.

    The step before still runs while one is launched, so it must have been of the same kind: the
    first of all and the first after an interruption or a wait of the loop do not count. Nor does
    one that the rule's own work fell into: that falls on tried options more often than on others.

    Args:
        marks: launches of steps of one kind, in nanoseconds, and `WORKED` and `INTERRUPTED` among
            them, in their order.
    """
    alone = [later - mark for mark, later in pairwise(marks) if mark > 0 and later > 0]
    most = LOOP_WAITED * median_low(alone) if alone else 0
    found: list[int] = []
    launched = follows = worked = 0
    for mark in marks:
        if mark == WORKED:
            worked = 1
        elif mark == INTERRUPTED:
            launched = 0
        else:
            if launched and mark - launched > most:
                launched = 0
            if launched and follows and not worked:
                found.append(mark - launched)
            follows, launched, worked = launched, mark, 0
    return found


@dataclass
class Run:
    """Steps of one kind in a row.

    Attributes:
        option, place: of all of them.
        shape: of the batch, since the last look.
        visited: whether steps of another option came right before.
        marks: since the last look, which is the first.
        told: how many of its first steps have been told of.
        stood: whether at the last look the loop had launched nothing of it for long.
    """

    option: int
    place: int
    shape: Shape
    visited: bool
    marks: list[int] = field(default_factory=list)
    told: int = 0
    stood: bool = False

    def looked_at(self, now: int) -> list[int]:
        """At a look, which begins a step ``now``: microseconds of the steps since the last one that
        others may be compared to: the first of a run right after another option (all of a visit)
        and the last ones."""
        self.stood = self.stands(now)
        marks = [*self.marks, now]
        self.marks[:] = (now, WORKED)
        wanted = LONGEST_PROBE - self.told if self.visited else 0
        if not wanted:  # the last ones alone
            marks = marks[-READ:]
        took = [max(1, ns // 1000) for ns in periods_ns(marks)]
        first = min(wanted, len(took))
        self.told += first
        return took[:first] + took[max(first, len(took) - BESIDE) :]

    def stands(self, now: int) -> bool:
        """Whether the loop had launched nothing of it for long ``now``."""
        return now - max(self.marks) > APART_NS
