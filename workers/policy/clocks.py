"""What the device's own clock and the times of steps say of options together, at one place. Pure.

A step that is one graph reads the device's clock at both ends: its *work*. From one launch to the
next a step takes as long as the host needs, or as its work and what lies between two steps take the
device, whichever is longer. So what steps of one option would have taken under another follows from
them one by one, whatever disturbs the host meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median, mode
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from overstory.workers.policy.compared import Known

WORK_KEPT = 9
"""Readings of an option's work that count, the newest; they hardly differ."""

WORK_LEAST = 2
"""Fewest of them by which it is known."""

STEPS_KEPT = 100
"""Times of an option's steps that are kept: of three looks, a second or two. A host may take half
as long again for seconds, and other options are the best ones meanwhile."""

STEPS_LEAST = 12
"""Fewest of them by which it is known how often the host and how often the device sets the pace."""

BETWEEN = 0.2
"""What lies between two steps is so small a quantile of what they take beyond their work: there the
device sets the pace if it ever does (0.05 to 0.1 ms on an H200: SGLang's own copies and
launches)."""

BETWEEN_MOST_US = 100.0
"""It is no more: where the host always sets the pace, what steps take beyond their work is the
host's."""

OFF = 0.03
"""How far off (logarithm) what is said of two options may be: over 20 pairs on an H200 it was off
by 0.05, what was believed by comparisons by 0.09."""

SMALLER_OFF = 0.5
"""Besides, for each logarithm by which an option is expected to take less than what runs: what the
host would need is not known where the device needs more."""

BOUND = 1.2
"""A step that takes longer than so many times what the device needs is of the host's pace."""

Array: TypeAlias = NDArray[np.float64]


def longer_by(ran: Array, base_us: float, options_us: Sequence[float]) -> list[float]:
    """Logarithms of how much longer steps of other options would have taken in the place of those
    that ran, in the mean.

    Args:
        ran: [n] microseconds that they took; the device needs ``base_us`` for one, for one of each
            option ``options_us``.
    """
    needed = np.array(options_us)[:, None]
    less = np.where(ran > BOUND * base_us, ran, ran - base_us + needed)
    took = np.where(needed < base_us, less, np.maximum(ran, needed))
    return [math.log(max(1.0, mean) / float(ran.mean())) for mean in took.mean(axis=1).tolist()]


class _Steps:
    """The newest times of an option's steps, and what the table said of each."""

    def __init__(self) -> None:
        self._took, self._costs = np.empty(STEPS_KEPT), np.empty(STEPS_KEPT)
        self._seen = 0

    def add(self, cost: float, took_us: float) -> None:
        at = self._seen % STEPS_KEPT
        self._took[at], self._costs[at] = took_us, cost
        self._seen += 1

    def us(self, cost: float, work_us: float) -> Array | None:
        """Microseconds where the table says ``cost`` and the device needs ``work_us``, None if they
        are too few. What the device needs grows with the context, what the host needs does not."""
        if self._seen < STEPS_LEAST:
            return None
        kept = min(self._seen, STEPS_KEPT)
        took, grown = self._took[:kept], cost / self._costs[:kept]
        of_the_device = took <= BOUND * (work_us / grown + BETWEEN_MOST_US)
        return np.maximum(np.where(of_the_device, took * grown, took), work_us)


class Clocks:
    """Of one place: readings and times by option. ``costs`` are the table's, by option, now."""

    def __init__(self) -> None:
        self._work: dict[int, deque[float]] = {}
        self._steps: dict[int, _Steps] = {}
        self._newest: deque[int] = deque(maxlen=STEPS_KEPT)

    def add_steps(self, option: int, cost: float, took_us: Sequence[float]) -> None:
        """Steps took so long from launch to launch where the table says ``cost``."""
        steps = self._steps.get(option)
        if steps is None:
            steps = self._steps[option] = _Steps()
        for each in took_us:
            steps.add(cost, each)
        self._newest.extend([option] * len(took_us))

    def add_work(self, option: int, cost: float, took_us: float) -> None:
        """The work of a step took the device so long."""
        kept = self._work.setdefault(option, deque(maxlen=WORK_KEPT))
        kept.append(took_us / cost)

    def work_us(self, costs: Sequence[int]) -> dict[int, float]:
        """By option, what its work takes the device, where that is known."""
        return {
            option: costs[option] * median(kept)
            for option, kept in self._work.items()
            if len(kept) >= WORK_LEAST
        }

    def relative_to(self, base: int, costs: Sequence[int]) -> dict[int, Known]:
        """By option, how much longer (logarithm) its steps take than those of ``base``, in the
        mean; those of which nothing is known are left out.

        All by the steps of what runs: those of an option that is visited now and then are the
        visits', with the rule's own work and where batches change.
        """
        work = self.work_us(costs)
        if base not in work or not self._newest:  # also where no step was timed yet
            return {}
        runs = mode(self._newest)
        ran = self._steps[runs].us(costs[runs], work[runs]) if runs in work else None
        if ran is None:
            return {}
        between = min(max(0.0, _least(ran - work[runs])), BETWEEN_MOST_US)
        instead = longer_by(ran, work[runs] + between, [us + between for us in work.values()])
        more = dict(zip(work, instead, strict=True))
        return {
            option: Known(log - more[base], OFF - SMALLER_OFF * min(0.0, log), True)
            for option, log in more.items()
        }


def _least(beyond: Array) -> float:
    rank = int(BETWEEN * len(beyond))
    return float(np.partition(beyond, rank)[rank])
