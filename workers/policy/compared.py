"""What steps of several options take relative to each other, on a machine that is disturbed. Pure.

What disturbs a machine comes in stretches of tenths of a second, in which every step of every
option takes longer: times of different stretches say nothing about options. So a few steps of one
option are compared to those of the option that runs most, right before and right after. Where these
two differ a stretch has begun or ended, and nothing is learnt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median

BESIDE = 6
"""Most steps before and after that others are compared to."""

LEAST = 3
"""Fewest steps that are compared, on either side."""

APART = 0.1
"""Logarithms of the times before and after may differ by this much."""

KEPT = 6
"""Comparisons of an option whose mean counts."""

NEW_ANCHOR = 12
"""Steps in a row after which another option is the one that others are compared to."""

LEVEL_RATE = 0.1
"""Share of a step's deviation that the level takes over."""


@dataclass
class _Run:
    """Steps of one option in a row, as logarithms of what they took."""

    option: int
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Visit:
    """Steps of another option, and what those before them took."""

    option: int
    took: float
    before: float


class Compared:
    """Logarithms of steps' times, of any unit, by option."""

    def __init__(self) -> None:
        self._anchor: int | None = None
        self._own: dict[int, float] = {}
        self._found: dict[int, deque[float]] = {}
        self._level = 0.0
        self._run = _Run(-1)
        self._beside: list[float] = []
        self._visit: _Visit | None = None

    def add(self, option: int, took: float) -> None:
        """A step of ``option``; steps come in the order in which they ran."""
        if self._anchor is None:
            self._anchor, self._own[option], self._level = option, 0.0, took
        if option != self._run.option:
            self._end_run()
            self._run = _Run(option)
        run = self._run.steps
        run.append(took)
        if option == self._anchor:
            self._level += LEVEL_RATE * (took - self._own[option] - self._level)
            if self._visit is not None and len(run) == BESIDE:
                self._compare(self._visit, median(run))
        elif len(run) >= NEW_ANCHOR:
            self._end_visit()
            if option in self._own:
                self._anchor, self._visit, self._beside = option, None, []

    def known(self) -> dict[int, float]:
        """By option that was compared (or is compared to): what its step takes now."""
        return {option: self._level + own for option, own in self._own.items()}

    def _end_run(self) -> None:
        if self._run.option == self._anchor:
            if self._visit is not None and len(self._run.steps) >= LEAST:
                self._compare(self._visit, median(self._run.steps))
            self._beside = [*self._beside, *self._run.steps][-BESIDE:]
        else:
            self._end_visit()

    def _end_visit(self) -> None:
        steps, self._visit = self._run.steps, None
        if len(steps) >= LEAST and len(self._beside) >= LEAST:
            self._visit = _Visit(self._run.option, median(steps[:BESIDE]), median(self._beside))
            if self._run.option not in self._own:  # better than nothing, until it is compared
                self._own[self._run.option] = self._relative(self._visit, self._visit.before)
        self._beside = []

    def _compare(self, visit: _Visit, after: float) -> None:
        self._visit = None
        if abs(after - visit.before) > APART:
            return
        found = self._found.setdefault(visit.option, deque(maxlen=KEPT))
        found.append(self._relative(visit, after))
        self._own[visit.option] = fmean(found)

    def _relative(self, visit: _Visit, after: float) -> float:
        assert self._anchor is not None
        return self._own[self._anchor] + visit.took - (visit.before + after) / 2
