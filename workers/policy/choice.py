"""The choice: the option with most expected tokens per millisecond. Pure integer arithmetic.

A function of the table, the beliefs, the shape of the batch and the option before, all of which the
ranks of a replica share, so each rank computes it by itself and all get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from overstory.workers.policy.beliefs import (
    NO_PROBE,
    OFF,
    ON,
    ONE,
    TRIAL,
    Beliefs,
)
from overstory.workers.policy.cost_table import (
    DRAFTS_IN_PARTS,
    IN_PARTS,
    WHOLE,
    CostTable,
)
from overstory.workers.policy.options import PLAIN

MARGIN = 5
"""Thousandths by which another option must be better before it replaces the present one."""

PROBE_RUN = 5
"""Fewest steps of a probe in a row: they are timed, a step by those of its kind before it and where
the rule itself did nothing meanwhile, and one step's time may be an accident."""

LONGEST_PROBE = 40
"""Most of them."""

PROBE_COST = 4
"""A step of a probe may cost at most this many plain steps."""


@dataclass(frozen=True)
class Shape:
    """What all ranks know of a batch before its step.

    Attributes:
        drafting: [kind] requests that may be drafted for.
        plain: requests that want nothing drafted.
        context: committed tokens per request, mean of the batch.
        sampled: whether any request samples: then all rows go through the sampler.
        parts: whether it asks for what no captured step gives; false where none is captured.
    """

    drafting: tuple[int, ...]
    plain: int
    context: int
    sampled: bool = False
    parts: bool = False

    @cached_property
    def launch(self) -> int:
        """How the steps of its options run, of `cost_table.LAUNCHES`."""
        if self.parts:
            return IN_PARTS
        return DRAFTS_IN_PARTS if self.plain else WHOLE

    @cached_property
    def batch(self) -> int:
        """All requests."""
        return sum(self.drafting) + self.plain


class Rate(NamedTuple):
    """Expected tokens (in thousandths) of the whole batch, over the microseconds they take."""

    tokens: int
    cost_us: int

    def above(self, other: Rate, thousandths: int = ONE) -> bool:
        """Whether this rate is greater than ``thousandths`` / 1000 of the other."""
        return self.tokens * other.cost_us * ONE > other.tokens * self.cost_us * thousandths


def rate(table: CostTable, beliefs: Beliefs, shape: Shape, option: int) -> Rate:
    """What ``option`` is expected to give for this batch."""
    return rates(table, beliefs, shape)[option]


def rates(table: CostTable, beliefs: Beliefs, shape: Shape) -> list[Rate]:
    """`rate` of every option."""
    costs = steps_us(table, beliefs, shape)
    tokens = [shape.plain * ONE] * len(costs)
    for kind, count in enumerate(shape.drafting):
        if count:
            expected = beliefs.tokens[kind]
            tokens = [sum_ + count * each for sum_, each in zip(tokens, expected, strict=True)]
    tokens[PLAIN] = shape.batch * ONE
    return list(map(Rate, tokens, costs))


def step_us(table: CostTable, beliefs: Beliefs, shape: Shape, option: int) -> int:
    """Microseconds of a step of this batch."""
    return steps_us(table, beliefs, shape)[option]


def steps_us(table: CostTable, beliefs: Beliefs, shape: Shape) -> list[int]:
    """`step_us` of every option."""
    over = beliefs.overhead_us[place_of(table, shape)]
    costs = costs_of(table, shape)
    return [
        max(1, cost * factor // ONE + more)
        for cost, factor, more in zip(costs, beliefs.factors, over, strict=True)
    ]


def costs_of(table: CostTable, shape: Shape) -> tuple[int, ...]:
    """The table's microseconds of a step of this batch, by option."""
    return table.costs(shape.batch, shape.context, shape.sampled, shape.launch)


def place_of(table: CostTable, shape: Shape) -> int:
    """The row of `Beliefs.overhead_us` for a batch: what it takes there says nothing of other
    rows."""
    launch = shape.launch if table.launches > 1 else WHOLE
    return table.nearest(shape.batch) + (2 * launch + shape.sampled) * len(table.batches)


def places_of(table: CostTable) -> int:
    """Number of rows of `Beliefs.overhead_us`."""
    return 2 * table.launches * len(table.batches)


def choose(
    table: CostTable, beliefs: Beliefs, shape: Shape, allowed: Sequence[int], before: int
) -> int:
    """The option of the next step, see `best_of`."""
    return best_of(rates(table, beliefs, shape), allowed, before)


def best_of(every: Sequence[Rate], allowed: Sequence[int], before: int) -> int:
    """The option of the greatest rate; `PLAIN` is always allowed.

    The option before stays while no other is better by more than the margin, but never where it is
    worse than plain.
    """
    best = PLAIN
    for option in sorted({PLAIN, *allowed}):
        if every[option].above(every[best]):
            best = option
    if (before != PLAIN and before not in allowed) or every[PLAIN].above(every[before]):
        return best
    return best if every[best].above(every[before], ONE + MARGIN) else before


def affordable(costs: Sequence[int], allowed: Sequence[int]) -> tuple[int, ...]:
    """Options that a probe may try, by what their steps take: plain, and drafts of at most
    `PROBE_COST` plain steps; the cheapest draft where none is."""
    drafts = [option for option in sorted(allowed) if option != PLAIN]
    fitting = [option for option in drafts if costs[option] <= PROBE_COST * costs[PLAIN]]
    return (PLAIN, *(fitting or (drafts and [cheapest_draft(costs, allowed)])))


def probe_option(table: CostTable, beliefs: Beliefs, shape: Shape, allowed: Sequence[int]) -> int:
    """The affordable option that teaches most: the largest tree, else the cheapest draft; `PLAIN`
    where nothing may be drafted.

    A tree shows what each smaller one and (as far as it holds the spine) the chain would have
    given, so one option teaches about all.
    """
    return affordable(steps_us(table, beliefs, shape), allowed)[-1]


def cheapest_draft(costs: Sequence[int], allowed: Sequence[int]) -> int:
    """The option that drafts at the least cost; `PLAIN` where nothing may be drafted."""
    drafts = [option for option in sorted(allowed) if option != PLAIN]
    return min(drafts, key=costs.__getitem__, default=PLAIN)


@dataclass(frozen=True)
class Decision:
    """What a step does. ``why``: best, probe, unknown, trial, off or opted-out."""

    option: int
    why: str


def decide(
    table: CostTable,
    beliefs: Beliefs,
    shape: Shape,
    allowed: Sequence[int],
    before: int,
    since: int,
) -> Decision:
    """The option of the next step and the reason for it.

    Args:
        since: steps under `beliefs` before this one.
    """
    if not any(shape.drafting):
        return Decision(PLAIN, "opted-out")
    if beliefs.drafter == OFF:
        return Decision(PLAIN, "off")
    if beliefs.drafter == TRIAL:
        return Decision(cheapest_draft(steps_us(table, beliefs, shape), allowed), "trial")
    assert beliefs.drafter == ON, beliefs.drafter
    unknown = any(n and not known for n, known in zip(shape.drafting, beliefs.known, strict=True))
    if unknown:
        return Decision(probe_option(table, beliefs, shape, allowed), "unknown")
    if beliefs.probe != NO_PROBE and since < beliefs.probe_steps:
        tried = beliefs.probe - 1
        if tried in affordable(steps_us(table, beliefs, shape), allowed):
            return Decision(tried, "probe")
    return Decision(choose(table, beliefs, shape, allowed, before), "best")
