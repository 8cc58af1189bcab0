"""What steps take where the host runs ahead of the device. Rank 0's own; pure.

The table holds what a step takes alone. In an engine the scheduler's own work comes on top of it or
hides it, more of one or the other by batch and option: with one request a step takes about both
together, with 64 about the longer of them. So the time from launch to launch is taken as it comes.

Before an option was compared to what runs it is expected to take as much more or less than that one
as the table says, of which most is taken to be hidden as far as the host adds so much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from overstory.workers.policy.clocks import Clocks
from overstory.workers.policy.compared import Compared, Known

DOUBT = 0.03
"""Logarithm by which a step of an option that was not compared is taken to last longer than
expected: it is not the best one before it was tried."""

OFF = (0.012, 0.1)
"""How far off (logarithm) the table may well be of two options: at least, and for each logarithm
that lies between them there, as far as the host does not hide it."""

HIDDEN = (0.9, 0.15)
"""Share of what the host may hide that is taken to be hidden (on an H200 0.8 to 1 with the built-in
pair), and by which that may well be off."""

ELSEWHERE = 0.5
"""Share of what the table may be off by that two places may well differ by in it."""

NOISE = 0.06
"""Logarithm by which a comparison is taken to be off before there are enough to tell."""

NOISE_WORTH = 4
"""Comparisons that this is worth beside those that were made."""

LEAST_NOISE = 0.004


@dataclass
class _Place:
    """What is known of a place.

    Attributes:
        base: the option that others are relative to.
        tabled: by option, by the table alone.
        expected: by option, without any comparison: by the device's clock, else `tabled`.
        counts: by option, comparisons that it was in.
        compare: what comparisons made here and expectations say together.
    """

    base: int
    tabled: list[Known]
    expected: list[Known]
    counts: dict[int, int]
    compare: Callable[[list[Known]], list[Known]]

    @cached_property
    def alone(self) -> list[Known]:
        """By option, by the comparisons made here."""
        return self.compare(self.expected)

    @property
    def told(self) -> set[int]:
        """Options of which more is known than the table."""
        clocked = {option for option, known in enumerate(self.expected) if known.clocked}
        return {self.base, *self.counts, *clocked}


class Periods:
    """Times of steps less the table's, by place and option.

    Args:
        costs: [place][option], the table's microseconds at its least context. Places are those of
            `Beliefs.overhead_us`.
        batches: of the table; so many places are of one kind.
    """

    def __init__(self, costs: Sequence[Sequence[int]], batches: int) -> None:
        self._costs = [list(row) for row in costs]
        self._batches = batches
        self._times = [Compared() for _ in costs]
        self._clocks = [Clocks() for _ in costs]
        self._places: list[_Place | None] = [None] * len(self._costs)
        self._known: list[list[Known]] = [[] for _ in costs]
        self._rows: list[tuple[int, ...]] = [()] * len(self._costs)
        self._changed: set[int] = set()
        self._turn = 0

    def add(self, place: int, option: int, costs: Sequence[int], took_us: Sequence[int]) -> None:
        """Steps of ``option`` in a row took so long from launch to launch, at least one; ``costs``
        by option are the table's for their batch."""
        cost = costs[option]
        self._times[place].add(option, [math.log(us / cost) for us in took_us])
        self._clocks[place].add_steps(option, cost, took_us)
        self._costs[place] = [*costs]
        self._changed.add(place)

    def add_device(self, place: int, option: int, costs: Sequence[int], took_us: int) -> None:
        """The work of a step of ``option`` took the device so long; ``costs`` as for `add`."""
        self._clocks[place].add_work(option, costs[option], took_us)
        if self._places[place] is not None:
            self._changed.add(place)

    def seen(self, place: int, option: int) -> bool:
        """Whether steps of an option were compared there, or it is what others are to be compared
        to; also where nothing is timed in this way."""
        here = self._places[place]
        if here is None:
            return not any(self._places)
        return option in here.counts or option == here.base

    def timed(self, place: int) -> bool:
        """Whether steps are timed there from launch to launch."""
        return self._places[place] is not None

    def off(self, place: int, option: int) -> float:
        """Logarithm by which what an option is taken to last may well be off; 0 where nothing is
        known."""
        known = self._known[place]
        return known[option].off if known else 0.0

    def compared(self, place: int) -> dict[int, int]:
        """By option that was compared at a place, comparisons that it was in."""
        return self._times[place].counts()

    def noise(self) -> float:
        """Logarithm by which one comparison is off on this machine."""
        total, count = NOISE_WORTH * NOISE**2, NOISE_WORTH
        for times in self._times:
            total, count = total + times.scatter, count + times.scattered
        return max(LEAST_NOISE, math.sqrt(total / count))

    def overheads(self) -> tuple[tuple[int, ...], ...] | None:
        """[place][option] microseconds over the table; None before anything was seen."""
        self._turn = (self._turn + 1) % len(self._costs)
        stale = {self._turn, *self._changed}
        if any(self._places[place] is None for place in self._changed):
            stale.update(range(len(self._costs)))  # there is another place to be like
        for place in self._changed:
            self._renew(place)
        self._changed.clear()
        if not any(self._places):
            return None
        for place in stale:
            self._rows[place] = self._row(place)
        return tuple(self._rows)

    def _renew(self, place: int) -> None:
        """Takes over what was timed at a place."""
        times = self._times[place]
        base, level = times.base
        tabled = self._tabled(place, base, level)
        expected = self._clocked(place, base, tabled)
        compare = partial(self._weighed, place)
        self._places[place] = _Place(base, tabled, expected, times.counts(), compare)

    def _weighed(self, place: int, expected: list[Known]) -> list[Known]:
        return self._times[place].known(expected, self.noise())

    def _tabled(self, place: int, base: int, level: float) -> list[Known]:
        """Of each option before any comparison, where ``base`` takes ``level``.

        As much more as the table says, less what the host may well hide of it. Where ``base`` takes
        less than the table says, so do the others, by the same factor: less by as many
        microseconds, a short one would be left with none.
        """
        costs = self._costs[place]
        took = costs[base] * math.exp(level)
        added = took - costs[base]
        found = []
        for option, cost in enumerate(costs):
            apart = cost - costs[base]
            hidden = min(max(added, 0.0), abs(apart))
            if added < 0:
                expected = cost * math.exp(level)
            else:
                expected = took + apart - math.copysign(HIDDEN[0] * hidden, apart)
            shown = 1.0 - hidden / abs(apart) if apart else 0.0
            off = OFF[0] + OFF[1] * shown * abs(math.log(cost / costs[base]))
            off += HIDDEN[1] * hidden / expected
            found.append(Known(math.log(expected / cost), 0.0 if option == base else off))
        return found

    def _clocked(self, place: int, base: int, tabled: Sequence[Known]) -> list[Known]:
        """As the device's clock says (`clocks.py`), else ``tabled``."""
        costs = self._costs[place]
        known = list(tabled)
        for option, told in self._clocks[place].relative_to(base, costs).items():
            log = tabled[base].log + math.log(costs[base] / costs[option]) + told.log
            known[option] = told._replace(log=log, off=0.0 if option == base else told.off)
        return known

    def device_us(self, place: int) -> dict[int, float]:
        """By option, what its work takes the device there, where that is known."""
        return self._clocks[place].work_us(self._costs[place])

    def clocked(self, place: int, option: int) -> bool:
        """Whether the device's clock tells what an option takes there."""
        here = self._places[place]
        return here is not None and here.expected[option].clocked

    def _row(self, place: int) -> tuple[int, ...]:
        here, costs = self._places[place], self._costs[place]
        source = self._source(place)
        other = self._places[source]
        if here is None:
            assert other is not None, "something is known somewhere"
            base = other.base
            added = self._costs[source][base] * (math.exp(other.alone[base].log) - 1)
            least = math.log(1 + added / costs[base]) if added > 0 else other.alone[base].log
            tabled = self._tabled(place, base, least)
            here = _Place(base, tabled, self._clocked(place, base, tabled), {}, list)
        alike = other if self._launch(source) == self._launch(place) else None
        known = self._known[place] = self._together(place, here, alike)
        told = here.told if alike is None else here.told | alike.told
        return tuple(
            round(cost * (math.exp(log + (0 if option in told else DOUBT)) - 1))
            for option, (cost, (log, *_)) in enumerate(zip(costs, known, strict=True))
        )

    def _together(self, place: int, here: _Place, other: _Place | None) -> list[Known]:
        """What is known of a place, and of ``other``, which is like it: by what its table was off
        by."""
        told = other.told if other is not None else set()
        if other is None or told == {other.base}:
            return here.alone
        shifts = [
            known.log - tabled.log for known, tabled in zip(other.alone, other.tabled, strict=True)
        ]
        expected = []
        for option, (log, off, clocked) in enumerate(here.expected):
            if clocked or option == here.base or option not in told:
                expected.append(Known(log, off, clocked))
                continue
            apart = math.hypot(other.alone[option].off, other.alone[here.base].off)
            near = math.hypot(apart, ELSEWHERE * off)
            expected.append(Known(log + shifts[option] - shifts[here.base], min(near, off)))
        if not here.counts:
            return expected
        return self._weighed(place, expected)

    def _launch(self, place: int) -> int:
        return place // (2 * self._batches)

    def _source(self, place: int) -> int:
        """The other place of which anything is known that is most like ``place``: steps that run
        in the same way, then compared at all, then the nearest batch, then one drawn alike;
        ``place`` if nothing is."""

        def distance(other: int) -> tuple[bool, bool, int, bool, int]:
            known, count = self._places[other], self._batches
            apart = abs(other % count - place % count)
            other_launch = self._launch(other) != self._launch(place)
            bare = known is None or not known.counts
            return other_launch, bare, apart, other // count != place // count, other

        known = (p for p, seen in enumerate(self._places) if seen is not None and p != place)
        return min(known, key=distance, default=place)
