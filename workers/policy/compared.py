"""What steps of several options take relative to each other, on a machine that is disturbed. Pure.

What disturbs a machine comes in stretches of hundredths of a second to seconds, in which every step
of every option takes longer: times of different stretches say nothing about options. So a few steps
of one option are compared to those of another right before and right after. Where these two differ
a stretch has begun or ended, and nothing is learnt.

One comparison is a few steps: on a host in use it is off by a tenth and more. What all of them say
together, and what is expected without them is weighed by how sure each is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

BESIDE = 32
"""Most steps before and after that others are compared to: as many as those themselves."""

NEAR = 6
"""So many at least, if there are, and fewer than twice as many are taken by their median."""

LEAST = 3
"""Fewest steps that are compared, on either side."""

QUEUED = 5
"""Steps after a change of what runs that do not count where there are more than four times as many:
the device falls behind the host by and by, and until then steps of its pace take the host's."""

APART = 0.1
"""Logarithms of the times before and after may differ by this much."""

KEPT = 12
"""Comparisons of two options that count, the newest."""

FALLS, RISES = 0.1, 0.01
"""Share of a step's deviation that the level takes over, where it is shorter or longer: what
disturbs a machine only adds."""

MOST_NOISE = 0.5
"""More than this counts as this."""

MEDIAN_WORTH = 1.3
"""Comparisons whose median says as much as the mean of one of them less noise."""

NOISE_OF = 2.4
"""Steps of which the noise of a comparison is told: three beside twice six. It is less of more."""

STRETCHES = 0.03
"""Share of that noise (its square) that is left of ever so many: a stretch may begin anywhere."""

TAILS = 3.0
"""Degrees of freedom of what an expectation is off by (Student's t): where comparisons say
something else altogether it does not count."""

SWEEPS = 6
"""Rounds in which options are weighed against each other, at most; there are few, and few
comparisons."""

SETTLED = 1e-4
"""Where no option moves by more than this in a round, it was the last."""


class Known(NamedTuple):
    """What an option's step takes (logarithm), and by how much that may well be off relative to
    the one that others are relative to."""

    log: float
    off: float
    clocked: bool = False
    """Whether the device's clock told it, which is not wrong altogether as a table may be."""


class _Told(NamedTuple):
    """Logarithm by which one option took longer than another, and its weight."""

    more: float
    weight: float


@dataclass
class _Run:
    """Steps of one option in a row, as logarithms of what they took: the first and the last.

    Attributes:
        compared: whether it was, with those before it.
    """

    option: int
    steps: list[float] = field(default_factory=list)
    compared: bool = False


class _Found(NamedTuple):
    """Logarithm by which one option took longer than another in a comparison of so many steps, as
    `_together` counts them."""

    more: float
    steps: float


class Compared:
    """Logarithms of steps' times, of any unit, by option."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], deque[_Found]] = {}  # of the first over the second
        self._base: int | None = None  # the first option that ran
        self._level = 0.0  # of it
        self._own = dict[int, float]()  # by option, what it is over that level
        self._runs: list[_Run] = []  # the last three; the one at hand is compared once
        self.scatter, self.scattered = 0.0, 0  # sum of squares of comparisons' noise, and how many

    def add(self, option: int, took: Sequence[float]) -> None:
        """Steps of ``option``, at least one; steps come in the order in which they ran."""
        if not self._runs or self._runs[-1].option != option:
            self._compare()
            self._runs = [*self._runs[-2:], _Run(option)]
        if self._base is None:
            self._base, self._level, self._own = option, took[0], {option: 0.0}
        own = self._own.get(option)
        if own is not None:
            for each in took:
                more = each - own - self._level
                self._level += (FALLS if more < 0 else RISES) * more
        run = self._runs[-1]
        run.steps += took
        if len(self._runs) == 3 and len(run.steps) >= sum(_counted(*self._runs[:2])):
            self._compare()
        if len(run.steps) > 2 * BESIDE + QUEUED:  # its first and its last ones are what counts
            del run.steps[BESIDE + QUEUED : -BESIDE]

    @property
    def base(self) -> tuple[int, float]:
        """The option that others are relative to, and what its step takes when nothing disturbs
        it."""
        assert self._base is not None, "a step was timed"
        return self._base, self._level

    def counts(self) -> dict[int, int]:
        """By option that was compared, comparisons that it was in."""
        counts: dict[int, int] = {}
        for options, found in self._found.items():
            for option in options:
                counts[option] = counts.get(option, 0) + len(found)
        return counts

    def known(self, expected: Sequence[Known], noise: float) -> list[Known]:
        """By option, what comparisons, each off by ``noise``, and expectations say together."""
        pairs = {options: _told(found, noise) for options, found in self._found.items()}
        found = _weighed(expected, pairs, *self.base)
        self._own = {option: known.log - self._level for option, known in enumerate(found)}
        return found

    def _compare(self) -> None:
        """The run at hand with the one before the last, if they are of one option."""
        if len(self._runs) < 3 or self._runs[-1].compared:
            return
        first, between, again = self._runs
        if first.option != again.option or min(len(run.steps) for run in self._runs) < LEAST:
            return
        again.compared = True
        queued, most = _counted(first, between)
        behind = again.steps[queued:] if len(again.steps) >= queued + LEAST else again.steps
        visit = between.steps[queued : queued + most]
        sides = first.steps[-most:], behind[:most]
        before, after = map(_took, sides)
        if abs(after - before) > APART:
            return
        more = _took(visit) - (before + after) / 2
        tried, runs = between.option, first.option
        found = self._found.setdefault((max(tried, runs), min(tried, runs)), deque(maxlen=KEPT))
        steps = _together(len(visit), sum(map(len, sides)))
        found.append(_Found(more if tried > runs else -more, steps))
        self._count_noise()

    def _count_noise(self) -> None:
        self.scatter, self.scattered = 0.0, 0
        for found in self._found.values():
            middle = _middle([(more, steps) for more, steps in found])
            self.scatter += sum(
                steps / NOISE_OF * min(abs(more - middle), MOST_NOISE) ** 2 for more, steps in found
            )
            self.scattered += len(found) - 1


def _counted(first: _Run, between: _Run) -> tuple[int, int]:
    """How many first steps of a run do not count, and how many then do, of the one before too."""
    both = min(len(first.steps), len(between.steps))
    queued = QUEUED if both > 4 * QUEUED else 0
    return queued, min(max(NEAR, both - queued), BESIDE)


def _took(steps: Sequence[float]) -> float:
    """Logarithm of what steps took in the mean, of which few are an accident."""
    if len(steps) < 2 * NEAR:
        return median(steps)
    return math.log(fmean(map(math.exp, steps)))


def _together(some: int, others: int) -> float:
    """Steps that are compared to ever so many others and say as much as ``some`` to ``others``."""
    return some * others / (some + others)


def _middle(values: Iterable[tuple[float, float]]) -> float:
    """Median of values with weights."""
    ordered = sorted(values)
    half, so_far = sum(weight for _, weight in ordered) / 2, 0.0
    for i, (value, weight) in enumerate(ordered):
        so_far += weight
        if so_far > half:
            return value
        if so_far == half:
            return (value + ordered[i + 1][0]) / 2 if i + 1 < len(ordered) else value
    raise AssertionError("there is a value")


def _told(found: Iterable[_Found], noise: float) -> _Told:
    """What comparisons of two options say together, where one of `NOISE_OF` steps is off by
    ``noise``."""
    each = [(more, 1 / (noise**2 * (NOISE_OF / steps + STRETCHES))) for more, steps in found]
    return _Told(_middle(each), sum(weight for _, weight in each) / MEDIAN_WORTH)


def _weighed(
    expected: Sequence[Known],
    pairs: Mapping[tuple[int, int], _Told],
    base: int,
    level: float,
) -> list[Known]:
    """Options' logarithms of the least sum of squares, each divided by how far off it may be; that
    of ``base`` is ``level``."""
    near: list[list[tuple[int, _Told]]] = [[] for _ in expected]
    for (option, other), told in pairs.items():
        near[option].append((other, told))
        near[other].append((option, _Told(-told.more, told.weight)))
    logs = [one.log for one in expected]
    logs[base] = level
    weights = [0.0] * len(logs)
    others = [option for option in range(len(logs)) if option != base]
    counted = [*near]  # of each its comparisons, as far as they count
    for _ in range(SWEEPS):
        moved = 0.0
        for option in others:
            at, off, clocked = expected[option]
            own = (1.0 if clocked else _counts((logs[option] - at) / off)) / off**2
            weight, total = own, own * at
            weights[option], counted[option] = own, []
            for other, told in near[option]:
                said, counts = logs[other] + told.more, told.weight
                if clocked:  # of the two the one that is wrong altogether does not count
                    counts *= _counts((logs[option] - said) * math.sqrt(counts))
                counted[option].append((other, _Told(told.more, counts)))
                weight += counts
                total += counts * said
            moved = max(moved, abs(total / weight - logs[option]))
            logs[option] = total / weight
        if moved <= SETTLED:
            break
    return [Known(log, off) for log, off in zip(logs, _offs(weights, counted, base), strict=True)]


def _counts(far: float) -> float:
    """How much something counts that is ``far`` off, in times what it may well be off by."""
    return (TAILS + 1) / (TAILS + far * far)


def _offs(
    weights: Sequence[float], near: Sequence[Sequence[tuple[int, _Told]]], base: int
) -> list[float]:
    """How far off each option may be: a comparison with ``base`` counts in full, one with another
    as much as that one is known itself."""
    direct = [
        weight + sum(told.weight for other, told in some if other == base)
        for weight, some in zip(weights, near, strict=True)
    ]
    return [
        0.0
        if option == base
        else (
            direct[option]
            + sum(
                1 / (1 / told.weight + 1 / direct[other])
                for other, told in near[option]
                if other != base
            )
        )
        ** -0.5
        for option in range(len(weights))
    ]
