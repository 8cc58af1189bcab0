"""Long contexts where drafts are worth less or cost more: the policy falls back, and drafts again
where they pay again."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from policy_world import COSTS, NUMBERS, OPTIONS, SYNC, World

from overstory.workers.policy.choice import Shape, decide
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.options import PLAIN
from overstory.workers.policy.steering import Steering

SHORT, LONG = 1024, 200_000
GREEDY = 0
STEPS = 800


def table_of(rows_cost: float) -> CostTable:
    """At the long context each row beyond the first costs so many times a plain step's."""
    cells = {
        (option, 0, at): round(cost * (1 + at * rows_cost * OPTIONS.nodes[option]))
        for option, cost in enumerate(COSTS)
        for at in range(2)
    }
    return CostTable.measured(OPTIONS.names, (1,), (SHORT, LONG), cells)


def steps(
    steering: Steering,
    table: CostTable,
    quality: Callable[[int], float],
    context: int,
    seed: int,
    before: int = PLAIN,
) -> tuple[list[int], float]:
    """Options of `STEPS` steps of one request at a context, and tokens per microsecond of the later
    half of them."""
    world = World(quality(context), random.Random(seed))
    shape = Shape((1, 0), 0, context)
    chosen: list[int] = []
    for step in range(STEPS):
        if step % SYNC == 0:
            beliefs = steering.next_beliefs(SYNC, shape, NUMBERS, before)
        if step == STEPS // 2:
            world.tokens = world.microseconds = 0
        decision = decide(table, beliefs, shape, NUMBERS, before, step % SYNC)
        before = decision.option if decision.why == "best" else before
        chosen.append(decision.option)
        took = table.cost(decision.option, 1, context)
        steering.observe_step(decision.option, took, took)
        world.microseconds += took
        walk = world.walk(decision.option)
        if walk is not None:
            steering.observe(GREEDY, walk)
    return chosen, world.tokens / world.microseconds


def fixed(table: CostTable, option: int, quality: float, context: int, seed: int) -> float:
    world = World(quality, random.Random(seed))
    for _ in range(STEPS):
        world.walk(option)
    return world.tokens / (STEPS * table.cost(option, 1, context))


@pytest.mark.parametrize(
    ("far", "rows_cost"),
    [(0.02, 0.0), (1.0, 1.0), (0.3, 0.3)],
    ids=["accepts nothing", "rows cost", "some of both"],
)
def test_where_a_long_context_makes_drafts_a_loss_nothing_is_drafted(
    far: float, rows_cost: float
) -> None:
    def quality(context: int) -> float:
        return 1.0 if context == SHORT else far

    table, again, plain = table_of(rows_cost), [], []
    best = {o: fixed(table, o, far, LONG, 2) for o in NUMBERS}
    assert max(best, key=best.__getitem__) == PLAIN, "the case is one for plain decoding"
    for seed in range(0, 60, 10):
        steering = Steering(OPTIONS, table, floor=0.0)
        near, _ = steps(steering, table, quality, SHORT, seed + 1)
        assert near[-200:].count(PLAIN) < 20, "at first drafts pay"
        chosen, rate = steps(steering, table, quality, LONG, seed + 3, near[-1])
        drafted = sum(option != PLAIN for option in chosen[200:])
        assert drafted < 0.1 * len(chosen[200:]), "but for probes"
        assert rate > 0.9 * best[PLAIN], "which cost little"
        back, rate = steps(steering, table, quality, SHORT, seed + 4, chosen[-1])
        plain.append(back[-200:].count(PLAIN))
        again.append(rate)
    # Most within 400 steps; one in a dozen takes longer than these 800, by what it counted before.
    assert sorted(plain)[3] < 20, "a short one that comes after is drafted for"
    assert sorted(again)[3] > 0.9 * max(fixed(table, o, 1.0, SHORT, 5) for o in NUMBERS)


def test_drafts_that_still_pay_at_a_long_context_go_on() -> None:
    table = table_of(0.01)
    steering = Steering(OPTIONS, table, floor=0.0)
    steps(steering, table, lambda _: 0.9, SHORT, 1)
    _, rate = steps(steering, table, lambda _: 0.9, LONG, 2)
    assert rate > 0.93 * max(fixed(table, o, 0.9, LONG, 3) for o in NUMBERS)
