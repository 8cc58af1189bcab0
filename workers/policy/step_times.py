"""How far the cost table is off, from the steps as they run. Rank 0's own; pure.

A step that takes longer than the table says may do so because the machine is busy, which falls on
all options, or because the table is wrong of its option. The option that runs most of the time (the
anchor) tells the first: its steps move a level that all options share. Others run among its steps,
seconds apart at most; what they deviate from that level is their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from overstory.workers.policy.beliefs import ONE
from overstory.workers.policy.options import PLAIN

LEVEL_RATE = 0.1
OWN_RATE = 0.15
"""Share of a step's deviation that the level, or an option's own factor, takes over."""

FIRST_STEPS = 10
"""Steps of which the first level is the mean."""

NEW_ANCHOR = 8
"""Steps in a row after which another option is the anchor."""

MOST = 0.4
"""Largest deviation (of logarithms) that one step counts for: it may have been interrupted."""


class StepTimes:
    """Factors of the cost table.

    Args:
        nodes: drafted nodes by option.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self._own: dict[int, float] = {}
        self._level = 0.0
        self._steps = 0
        self._anchor: int | None = None
        self._last: int | None = None
        self._run = 0

    def add(self, option: int, expected_us: int, took_us: int) -> None:
        """A step of ``option`` took so long where the table says ``expected_us``."""
        if self._anchor is None:
            self._anchor = option
        own = self._own.setdefault(option, self._guess(option))
        off = math.log(max(1, took_us) / max(1, expected_us)) - self._level - own
        self._run = self._run + 1 if option == self._last else 1
        self._last = option
        if option == self._anchor:
            self._steps += 1
            young = self._steps <= FIRST_STEPS
            self._level += off / self._steps if young else LEVEL_RATE * _within(off)
            return
        self._own[option] = own + OWN_RATE * _within(off)
        if self._run >= NEW_ANCHOR:
            self._anchor = option

    def factors(self) -> tuple[int, ...]:
        """By option, thousandths of the table's cost that a step takes now."""
        return tuple(
            round(ONE * math.exp(self._level + self._own.get(option, self._guess(option))))
            for option in range(len(self._nodes))
        )

    def _guess(self, option: int) -> float:
        """Own factor of an option that has not run: that of the drafting one nearest in nodes.

        Drafts share what the table may have wrong of them.
        """
        if option == PLAIN:
            return 0.0
        drafting = [known for known in self._own if known != PLAIN]
        if not drafting:
            return 0.0
        distance = {o: abs(self._nodes[o] - self._nodes[option]) for o in drafting}
        return self._own[min(drafting, key=lambda o: (distance[o], o))]


def _within(off: float) -> float:
    return min(max(off, -MOST), MOST)
