"""What steps of several options take relative to each other, on a machine that is disturbed. Pure.

What disturbs a machine comes in stretches of hundredths of a second to seconds, in which every step
of every option takes longer: times of different stretches say nothing about options. So a few steps
of one option are compared to those of another right before and right after. Where these two differ
a stretch has begun or ended, and nothing is learnt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

BESIDE = 6
"""Most steps before and after that others are compared to."""

LEAST = 3
"""Fewest steps that are compared, on either side."""

APART = 0.1
"""Logarithms of the times before and after may differ by this much."""

KEPT = 6
"""Comparisons of an option whose median counts."""

LEVEL_RATE = 0.1
"""Share of a step's deviation that the level takes over."""


@dataclass
class _Run:
    """Steps of one option in a row, as logarithms of what they took."""

    option: int
    steps: list[float] = field(default_factory=list)

    def last(self) -> float:
        """Of its end."""
        return median(self.steps[-BESIDE:])


class Compared:
    """Logarithms of steps' times, of any unit, by option."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        self._found: dict[int, deque[float]] = {}
        self._level = 0.0
        self._runs: list[_Run] = []  # the last three; the one at hand is compared once

    def add(self, option: int, took: float) -> None:
        """A step of ``option``; steps come in the order in which they ran."""
        if not self._own:
            self._own[option], self._level = 0.0, took
        if not self._runs or self._runs[-1].option != option:
            if self._runs and len(self._runs[-1].steps) < BESIDE:
                self._compare()
            self._runs = [*self._runs[-2:], _Run(option)]
        steps = self._runs[-1].steps
        steps.append(took)
        if option in self._own:
            self._level += LEVEL_RATE * (took - self._own[option] - self._level)
        if len(steps) == BESIDE:
            self._compare()
        elif len(steps) > 2 * BESIDE:
            del steps[BESIDE]  # its first and its last ones are what counts

    def known(self) -> dict[int, float]:
        """By option that was compared (or is compared to): what its step takes now."""
        return {option: self._level + own for option, own in self._own.items()}

    def _compare(self) -> None:
        """The run at hand with the one before the last, if they are of one option."""
        if len(self._runs) < 3:
            return
        first, between, again = self._runs
        if first.option != again.option or min(len(run.steps) for run in self._runs) < LEAST:
            return
        before, after = first.last(), median(again.steps[:BESIDE])
        if abs(after - before) > APART:
            return
        more = median(between.steps[:BESIDE]) - (before + after) / 2
        if first.option in self._own:
            self._learn(between.option, self._own[first.option] + more)
        elif between.option in self._own:
            self._learn(first.option, self._own[between.option] - more)
        else:  # nothing tells how they compare to the others, which are for another comparison
            self._own, self._level = {first.option: 0.0}, (before + after) / 2
            self._found.clear()
            self._learn(between.option, more)

    def _learn(self, option: int, own: float) -> None:
        found = self._found.setdefault(option, deque(maxlen=KEPT))
        found.append(own)
        self._own[option] = median(found)
