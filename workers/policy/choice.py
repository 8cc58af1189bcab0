"""The choice: the option with most expected tokens per millisecond. Pure integer arithmetic.

A function of the table, the beliefs, the shape of the batch and the option before, all of which the
ranks of a replica share, so each rank computes it by itself and all get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overstory.workers.policy.beliefs import (
    OFF,
    ON,
    ONE,
    PROBE_DRAFT,
    PROBE_PLAIN,
    TRIAL,
    Beliefs,
)
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.options import CHAIN, PLAIN

MARGIN = 15
"""Thousandths by which another option must be better before it replaces the present one."""

PLAIN_RUN = 5
"""Steps of a probe of plain decoding: it is timed, and one step's time may be an accident."""

PROBE_COST = 4
"""A probe may cost at most this many plain steps."""


@dataclass(frozen=True)
class Shape:
    """What all ranks know of a batch before its step.

    Attributes:
        drafting: [kind] requests that may be drafted for.
        plain: requests that want nothing drafted.
        context: committed tokens per request, mean of the batch.
        sampled: whether any request samples: then all rows go through the sampler.
    """

    drafting: tuple[int, ...]
    plain: int
    context: int
    sampled: bool = False

    @property
    def batch(self) -> int:
        """All requests."""
        return sum(self.drafting) + self.plain


@dataclass(frozen=True)
class Rate:
    """Expected tokens (in thousandths) of the whole batch, over the microseconds they take."""

    tokens: int
    cost_us: int

    def above(self, other: Rate, thousandths: int = ONE) -> bool:
        """Whether this rate is greater than ``thousandths`` / 1000 of the other."""
        return self.tokens * other.cost_us * ONE > other.tokens * self.cost_us * thousandths


def rate(table: CostTable, beliefs: Beliefs, shape: Shape, option: int) -> Rate:
    """What ``option`` is expected to give for this batch."""
    tokens = shape.plain * ONE + sum(
        count * (beliefs.tokens[kind][option] if option != PLAIN else ONE)
        for kind, count in enumerate(shape.drafting)
    )
    return Rate(tokens, step_us(table, beliefs, shape, option))


def step_us(table: CostTable, beliefs: Beliefs, shape: Shape, option: int) -> int:
    """Microseconds of a step of this batch."""
    nearest = min(range(len(table.batches)), key=lambda b: abs(table.batches[b] - shape.batch))
    cost = table.cost(option, shape.batch, shape.context, shape.sampled)
    return max(1, cost * beliefs.factors[option] // ONE + beliefs.overhead_us[nearest][option])


def choose(
    table: CostTable,
    beliefs: Beliefs,
    shape: Shape,
    allowed: Sequence[int],
    before: int,
    margin: int = MARGIN,
) -> int:
    """The option of the next step; `PLAIN` is always allowed.

    The option before stays while no other is better by more than the margin, but never where it is
    worse than plain.
    """
    rates = {option: rate(table, beliefs, shape, option) for option in {PLAIN, *allowed}}
    best = PLAIN
    for option in sorted(rates):
        if rates[option].above(rates[best]):
            best = option
    if before not in rates or rates[PLAIN].above(rates[before]):
        return best
    return best if rates[best].above(rates[before], ONE + margin) else before


def probe_option(table: CostTable, beliefs: Beliefs, shape: Shape, allowed: Sequence[int]) -> int:
    """The option that teaches most: the largest tree that costs no more than `PROBE_COST` plain
    steps, else the cheapest draft; `PLAIN` where nothing may be drafted.

    A tree shows what each smaller one and (as far as it holds the spine) the chain would have
    given, so one option teaches about all.
    """
    limit = PROBE_COST * step_us(table, beliefs, shape, PLAIN)
    drafts = [option for option in sorted(allowed) if option != PLAIN]
    fitting = [o for o in drafts if step_us(table, beliefs, shape, o) <= limit]
    trees = [option for option in fitting if option != CHAIN]
    if trees or fitting:
        return (trees or fitting)[-1]
    return cheapest_draft(table, beliefs, shape, allowed)


def cheapest_draft(table: CostTable, beliefs: Beliefs, shape: Shape, allowed: Sequence[int]) -> int:
    """The option that drafts at the least cost; `PLAIN` where nothing may be drafted."""
    drafts = [option for option in sorted(allowed) if option != PLAIN]
    return min(drafts, key=lambda o: step_us(table, beliefs, shape, o), default=PLAIN)


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
        return Decision(cheapest_draft(table, beliefs, shape, allowed), "trial")
    assert beliefs.drafter == ON, beliefs.drafter
    unknown = any(n and not known for n, known in zip(shape.drafting, beliefs.known, strict=True))
    if unknown or (beliefs.probe == PROBE_DRAFT and since == 0):
        option = probe_option(table, beliefs, shape, allowed)
        return Decision(option, "unknown" if unknown else "probe")
    if beliefs.probe == PROBE_PLAIN and since < PLAIN_RUN:
        return Decision(PLAIN, "probe")
    return Decision(choose(table, beliefs, shape, allowed, before), "best")
