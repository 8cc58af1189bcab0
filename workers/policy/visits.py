"""When an option that is not the best one is tried: often if it may well be, seldom if it is dear.
Rank 0's own; pure, its clock is the count of decode steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from overstory.workers.policy.choice import LONGEST_PROBE, PROBE_RUN

LOSS = 0.7
"""Thousandths of the tokens that trying one option may cost on average."""

STEPS = (64, 8192)
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


ACCIDENT = 8.0
"""Times as far off as a share may well be, no accident is assumed."""

SURE = 3.0
"""Times as far off as a share may well be, it is not."""

BOLD = 4.0
"""An option that may well be the best one is tried as if its steps lost so many times less; what
the host does for a visit is lost in any case."""


@dataclass(frozen=True)
class Price:
    """What trying an option is believed to cost.

    Attributes:
        share: its tokens per time, of those of the best option.
        steps: time of a visit, in steps of the best one.
        known: whether a visit has told what it takes.
        work: what the host does for a visit, in steps of the best one.
        off: logarithm by which the share may well be off.
    """

    share: float
    steps: float
    known: bool = True
    work: float = 0.0
    off: float = 0.0


def run_of(work: float, lost: float, compared: bool) -> int:
    """How many steps a visit lasts, of which each may well lose so many of the best option: until
    that is as much as what the host does for it, ``work``, which is lost in any case. As few as may
    be unless something was ``compared`` already."""
    if not compared or lost * PROBE_RUN >= work:
        return PROBE_RUN
    return LONGEST_PROBE if lost * LONGEST_PROBE <= work else int(work / lost)


def interval(price: Price, visits: int) -> float:
    """Steps from one visit to the next, after so many visits.

    One that no visit has told of is waited for twice as long each time after `YOUNG` of them: where
    batches change all the while, steps of it are never comparable, and visits would go on for ever
    in vain.
    """
    if not price.known:
        # Visits go on for days, and floats end at 2**1024.
        doublings = min(max(0, visits - YOUNG), DOUBLINGS)
        return min(STEPS[0] / 2 * 2.0**doublings, STEPS[1])
    lost = max(0.0, 1 - price.share) * price.steps
    young = visits < YOUNG and (not visits or (lost <= DEAR and _by_accident(price)))
    hopeful = price.share * math.exp(SURE * price.off) >= 1
    cost = lost / (BOLD if hopeful else 1.0) + (0.0 if young else price.work)
    full = min(max(cost * 1000 / LOSS, STEPS[0]), STEPS[1])
    return max(STEPS[0] / 2, full * visits / YOUNG) if young else full


def _by_accident(price: Price) -> bool:
    """Whether what is believed of an option may be that far off."""
    return price.share >= HOPELESS and math.log(price.share) + ACCIDENT * price.off >= 0


class Visits:
    """Steps since each option was last tried, by place (what costs are learnt by).

    Args:
        places, options: numbers of them.
    """

    def __init__(self, places: int, options: int) -> None:
        self._since = [[STEPS[1]] * options for _ in range(places)]
        self._rest = [0] * places
        self._visits = [[0] * options for _ in range(places)]
        self._waited: dict[int, float] = {}
        self._quiet = 0.0

    def pass_steps(self, place: int, steps: int) -> None:
        """So many decode steps went by at a place."""
        self._rest[place] += steps
        self._since[place] = [since + steps for since in self._since[place]]

    def some(self, place: int, option: int) -> bool:
        """Whether an option was visited some times there, so that its price is no accident."""
        return self._visits[place][option] >= YOUNG

    def look(self, place: int, best: int, prices: Mapping[int, Price]) -> float:
        """Steps until an option will have waited long enough for its price; none or less where one
        has.

        Args:
            best: the option that runs, which needs no visit.
            prices: of the options that may be tried.
        """
        since, visits = self._since[place], self._visits[place]
        since[best] = 0
        waits = {o: interval(price, visits[o]) for o, price in prices.items() if o != best}
        self._waited = {o: since[o] / steps for o, steps in waits.items()}
        quiet = min((steps - since[o] for o, steps in waits.items()), default=STEPS[1])
        self._quiet = max(quiet, REST - self._rest[place])
        return self._quiet

    def due(self, place: int) -> int | None:
        """The option that waited longest, if any has waited long enough by the last `look`; it
        counts as tried."""
        if self._quiet > 0 or not self._waited:
            return None
        waited = self._waited
        first = max(waited, key=lambda option: (waited[option], option))
        self._since[place][first] = self._rest[place] = 0
        self._visits[place][first] += 1
        return first
