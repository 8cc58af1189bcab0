"""What steps take where the host runs ahead of the device. Rank 0's own; pure.

The table holds what a step takes alone. In an engine the scheduler's own work comes on top of it or
hides it, more of one or the other by batch and option: with one request a step takes about both
together, with 64 about the longer of them. So the time from launch to launch is taken as it comes.

The table alone decides nothing but what is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from overstory.workers.policy.compared import Compared

DOUBT = 30
"""Thousandths of a step that one of an option that was not seen is expected to take longer."""


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
        self._known: list[dict[int, int]] = [{} for _ in costs]
        self._source = list(range(len(self._costs)))  # by place, the one whose times its row is of
        self._rows: list[tuple[int, ...]] = [()] * len(self._costs)
        self._changed: set[int] = set()
        self._turn = 0

    def add(self, place: int, option: int, expected_us: int, took_us: int) -> None:
        """A step took so long from launch to launch where the table says ``expected_us``."""
        self._times[place].add(option, math.log(took_us / expected_us))
        self._costs[place][option] = expected_us
        self._changed.add(place)

    def seen(self, place: int, option: int) -> bool:
        """Whether it is known what a step takes there; also where nothing is timed in this way."""
        known = self._known[place]
        return option in known or not any(self._known)

    def overheads(self) -> tuple[tuple[int, ...], ...] | None:
        """[place][option] microseconds over the table; None before anything was seen.

        An option that was not seen at its place gets the surplus of the seen one nearest in cost,
        and a little more: it is not taken for the best before it was tried. Where that one took
        less than the table says, a shorter one is taken to be shorter by the same factor: less by
        as many microseconds, it would be left with none. A place without any is as the nearest one.
        """
        self._turn = (self._turn + 1) % len(self._costs)
        stale = {self._turn}
        for place in self._changed:
            stale |= self._renewed(place)
        self._changed.clear()
        if not any(self._known):
            return None
        for place in stale:
            self._rows[place] = self._row(place, self._known[self._source[place]])
        return tuple(self._rows)

    def _renewed(self, place: int) -> set[int]:
        """Takes over what was timed at a place; returns the places whose rows are stale by it.

        One that follows another place's times is made anew when other options were timed there;
        besides, each now and then.
        """
        before = self._known[place]
        known = self._known[place] = self._surpluses(place)
        if not known or before.keys() == known.keys():
            return {place}
        places = range(len(self._known))
        if not before:
            self._source = [_source(self._known, p, self._batches) for p in places]
            return set(places)
        return {p for p in places if self._source[p] == place}

    def _surpluses(self, place: int) -> dict[int, int]:
        costs = self._costs[place]
        return {
            option: round(costs[option] * (math.exp(factor) - 1))
            for option, factor in self._times[place].known().items()
        }

    def _row(self, place: int, known: dict[int, int]) -> tuple[int, ...]:
        costs, row = self._costs[place], []
        for option, cost in enumerate(costs):
            seen = known.get(option)
            if seen is None:
                near = min(known, key=lambda o: (abs(costs[o] - cost), o))
                more, near_us = known[near], costs[near] + known[near]
                seen = max(more, min(0, cost * near_us // costs[near] - cost))
                seen += near_us * DOUBT // 1000
            row.append(seen)
        return tuple(row)


def _source(known: Sequence[dict[int, int]], place: int, batches: int) -> int:
    """The place of which anything is known that is most like ``place``: itself, then steps that
    run in the same way, then the nearest batch, then one drawn alike; ``place`` if nothing is."""

    def distance(other: int) -> tuple[bool, int, bool, int]:
        apart = abs(other % batches - place % batches)
        other_launch = other // (2 * batches) != place // (2 * batches)
        return other_launch, apart, other // batches != place // batches, other

    return min((p for p, seen in enumerate(known) if seen), key=distance, default=place)
