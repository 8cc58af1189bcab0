"""When an option that is not the best one is tried: often if it may well be, seldom if it is dear.
Rank 0's own; pure, its clock is the count of decode steps."""

from __future__ import annotations

from collections.abc import Mapping

LOSS = 1
"""Thousandths of the tokens that trying one option may cost on average."""

STEPS = (64, 4096)
"""Fewest and most steps between two visits of an option. At most, because a price is a belief too:
one that is wrong would never be found out."""

YOUNG = 4
"""Visits until the interval is the full one: what a few steps said may be an accident, and a price
that follows from it keeps an option out for long."""

HOPELESS = 2.0
"""Steps that a visit loses from which on no accident is assumed."""


def interval(lost_steps: float, visits: int) -> float:
    """Steps from one visit to the next, where one loses the tokens of so many steps.

    Args:
        visits: those before.
    """
    full = min(max(lost_steps * 1000 / LOSS, STEPS[0]), STEPS[1])
    young = lost_steps < HOPELESS or not visits
    return max(STEPS[0] / 2, full * min(1.0, visits / YOUNG)) if young else full


class Visits:
    """Steps since each option was last tried, by place (what costs are learnt by).

    Args:
        places, options: numbers of them.
    """

    def __init__(self, places: int, options: int) -> None:
        self._since = [[STEPS[1]] * options for _ in range(places)]
        self._visits = [[0] * options for _ in range(places)]

    def pass_steps(self, place: int, steps: int) -> None:
        """So many decode steps went by at a place."""
        self._since[place] = [since + steps for since in self._since[place]]

    def due(self, place: int, best: int, lost_steps: Mapping[int, float]) -> int | None:
        """The option that waited longest for its price, if any has waited long enough; it counts as
        tried.

        Args:
            best: the option that runs, which needs no visit.
            lost_steps: by option that may be tried, what a visit is expected to lose, as steps of
                the best one.
        """
        since, visits = self._since[place], self._visits[place]
        since[best] = 0
        waited = {
            o: since[o] / interval(lost, visits[o]) for o, lost in lost_steps.items() if o != best
        }
        if not waited:
            return None
        first = max(waited, key=lambda option: (waited[option], option))
        if waited[first] < 1:
            return None
        since[first] = 0
        visits[first] += 1
        return first
