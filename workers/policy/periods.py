"""What a step takes beyond its table, where the host runs ahead of the device. Rank 0's own; pure.

The table holds what a step takes alone. In an engine the scheduler's own work comes on top of it or
hides it, more of one or the other by batch and option: with one request a step takes about both
together, with 64 about the longer of them. So the time from launch to launch is taken as it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

KEPT = 31
"""Periods of which the lower quartile counts: whatever else the machine does only adds."""

WANTED = 3
"""Periods before an option counts as seen."""

STALE_STEPS = 4096
"""Decode steps after which a period says nothing any more: one that was taken in a bad minute does
not keep an option out for good."""


class Periods:
    """Times of steps less the table's, by batch and option.

    Args:
        costs: [batch of the table][option], the table's microseconds at its least context.
    """

    def __init__(self, costs: Sequence[Sequence[int]]) -> None:
        self._costs = costs
        self._step = 0
        self._seen: list[list[deque[tuple[int, int]]]] = [
            [deque(maxlen=KEPT) for _ in row] for row in costs
        ]

    def pass_steps(self, steps: int) -> None:
        """So many decode steps went by."""
        self._step += steps
        for row in self._seen:
            for seen in row:
                while seen and self._step - seen[0][0] > STALE_STEPS:
                    seen.popleft()

    def add(self, batch: int, option: int, over_us: int) -> None:
        """A step at batch number ``batch`` took ``over_us`` more than the table says; less if
        negative."""
        self._seen[batch][option].append((self._step, over_us))

    def overheads(self) -> tuple[tuple[int, ...], ...] | None:
        """[batch][option] microseconds over the table; None before anything was seen.

        An option that was not seen at its batch gets the least that the seen one nearest in cost
        leaves possible: the same surplus if it is cheaper, a surplus that its own cost hides if it
        is dearer. So it is tried if it can be best, and is seen then. A batch without any is as the
        nearest one.
        """
        known = [self._known(b) for b in range(len(self._costs))]
        if not any(known):
            return None
        return tuple(self._row(b, _nearest(known, b)) for b in range(len(self._costs)))

    def _known(self, batch: int) -> dict[int, int]:
        return {
            option: sorted(over for _, over in seen)[len(seen) // 4]
            for option, seen in enumerate(self._seen[batch])
            if len(seen) >= WANTED
        }

    def _row(self, batch: int, known: dict[int, int]) -> tuple[int, ...]:
        costs, row = self._costs[batch], []
        for option, cost in enumerate(costs):
            near = min(known, key=lambda o: (o != option, abs(costs[o] - cost), o))
            surplus = known[near]
            if option != near and surplus > 0:
                surplus = max(0, surplus - max(0, cost - costs[near]))
            row.append(surplus)
        return tuple(row)


def _nearest(known: Sequence[dict[int, int]], batch: int) -> dict[int, int]:
    return known[
        min((b for b, seen in enumerate(known) if seen), key=lambda b: (abs(b - batch), b))
    ]
