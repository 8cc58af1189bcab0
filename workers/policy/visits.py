"""When an option that is not the best one is tried: often if it may well be, seldom if it is dear.
Rank 0's own; pure, its clock is the count of decode steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOSS = 0.7
"""Thousandths of the tokens that trying one option may cost on average."""

STEPS = (64, 4096)
"""Fewest and most steps between two visits of an option. At most, because a price is a belief too:
one that is wrong would never be found out."""

DOUBLINGS = 16
"""So often the wait for an option that no visit has told of doubles, at most: more than `STEPS`
span."""

REST = 16
"""Fewest steps between two visits of any option: the best one runs between them, and they are
compared to it."""

YOUNG = 5
"""Visits until the interval is the full one: what a few steps said may be an accident, and a price
that follows from it keeps an option out for long."""

HOPELESS = 0.5
"""Share of the best rate below which no accident is assumed."""

DEAR = 4.0
"""Steps of the best option that a visit may lose to be repeated while it is young."""


@dataclass(frozen=True)
class Price:
    """What trying an option is believed to cost.

    Attributes:
        share: its tokens per time, of those of the best option.
        steps: time of a visit, in steps of the best one.
        known: whether a visit has told what it takes.
        work: what the host does for a visit, in steps of the best one.
    """

    share: float
    steps: float
    known: bool = True
    work: float = 0.0


def interval(price: Price, visits: int) -> float:
    """Steps from one visit to the next, after so many visits.

    One that no visit has told of is waited for twice as long each time: where batches change all
    the while, steps of it are never comparable, and visits would go on for ever in vain.
    """
    if not price.known:
        doublings = min(visits, DOUBLINGS)  # visits go on for days, and floats end at 2**1024
        return min(STEPS[0] / 2 * 2.0**doublings, STEPS[1])
    lost = max(0.0, 1 - price.share) * price.steps
    young = visits < YOUNG and (not visits or (price.share >= HOPELESS and lost <= DEAR))
    cost = lost if young else lost + price.work
    full = min(max(cost * 1000 / LOSS, STEPS[0]), STEPS[1])
    return max(STEPS[0] / 2, full * visits / YOUNG) if young else full


class Visits:
    """Steps since each option was last tried, by place (what costs are learnt by).

    Args:
        places, options: numbers of them.
    """

    def __init__(self, places: int, options: int) -> None:
        self._since = [[STEPS[1]] * options for _ in range(places)]
        self._rest = [0] * places
        self._visits = [[0] * options for _ in range(places)]
        self._next = 0.0

    def pass_steps(self, place: int, steps: int) -> None:
        """So many decode steps went by at a place."""
        self._rest[place] += steps
        self._since[place] = [since + steps for since in self._since[place]]

    def due(self, place: int, best: int, prices: Mapping[int, Price]) -> int | None:
        """The option that waited longest for its price, if any has waited long enough; it counts as
        tried.

        Args:
            best: the option that runs, which needs no visit.
            prices: of the options that may be tried.
        """
        since, visits = self._since[place], self._visits[place]
        since[best] = 0
        waits = {o: interval(price, visits[o]) for o, price in prices.items() if o != best}
        waited = {o: since[o] / steps for o, steps in waits.items()}
        self._next = min((steps - since[o] for o, steps in waits.items()), default=STEPS[1])
        if not waited or self._rest[place] < REST:
            return None
        first = max(waited, key=lambda option: (waited[option], option))
        if waited[first] < 1:
            return None
        since[first] = self._rest[place] = 0
        visits[first] += 1
        return first

    def quiet_for(self) -> float:
        """Steps until another option will have waited long enough, by the last prices; none or less
        where one has."""
        return self._next
