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
        costs: [place][option], the table's microseconds at its least context. Places are the
            batches of the table where all requests are greedy, then those where any samples.
    """

    def __init__(self, costs: Sequence[Sequence[int]]) -> None:
        self._costs = [list(row) for row in costs]
        self._times = [Compared() for _ in costs]
        self._known: list[dict[int, int]] = [{} for _ in costs]
        self._rows: dict[int, tuple[dict[int, int], tuple[int, ...]]] = {}
        self._nearest = list(range(len(self._costs)))  # of places without any, one that has some
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
        and a little more: it is not taken for the best before it was tried. A place without any is
        as the nearest one.
        """
        for place in self._changed:
            first = not self._known[place]
            self._known[place] = self._surpluses(place)
            if first:
                self._nearest = [_nearest(self._known, p) for p in range(len(self._known))]
        self._changed.clear()
        self._turn = (self._turn + 1) % len(self._costs)
        if not any(self._known):
            return None
        return tuple(map(self._kept_row, range(len(self._costs))))

    def _surpluses(self, place: int) -> dict[int, int]:
        costs = self._costs[place]
        return {
            option: round(costs[option] * (math.exp(factor) - 1))
            for option, factor in self._times[place].known().items()
        }

    def _kept_row(self, place: int) -> tuple[int, ...]:
        """The row of a place. One that follows from another place's is made anew now and then."""
        known = self._known[place] or self._known[self._nearest[place]]
        kept = self._rows.get(place)
        stale = kept is None or kept[0] is not known
        if kept is not None and not self._known[place] and kept[0].keys() == known.keys():
            stale = place == self._turn
        if stale or kept is None:
            kept = self._rows[place] = (known, self._row(place, known))
        return kept[1]

    def _row(self, place: int, known: dict[int, int]) -> tuple[int, ...]:
        costs, row = self._costs[place], []
        for option, cost in enumerate(costs):
            near = min(known, key=lambda o: (o != option, abs(costs[o] - cost), o))
            unseen = 0 if option == near else (costs[near] + known[near]) * DOUBT // 1000
            row.append(known[near] + unseen)
        return tuple(row)


def _nearest(known: Sequence[dict[int, int]], place: int) -> int:
    """The place of the nearest batch of which anything is known, of the same kind if two are as
    near; ``place`` itself if nothing is."""
    batches = len(known) // 2

    def distance(other: int) -> tuple[int, bool, int]:
        apart = abs(other % batches - place % batches)
        return apart, other // batches != place // batches, other

    return min((p for p, seen in enumerate(known) if seen), key=distance, default=place)
