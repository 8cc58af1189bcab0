"""The choice: never a losing one, calm, and the same integers everywhere."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.workers.policy.beliefs import KINDS, OFF, ON, ONE, TRIAL, Beliefs
from overstory.workers.policy.choice import (
    MARGIN,
    PROBE_COST,
    PROBE_RUN,
    Decision,
    Shape,
    choose,
    decide,
    rate,
    step_us,
)
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.options import CHAIN, PLAIN, Options

OPTIONS = Options.of(8, 31)
NUMBERS = tuple(range(len(OPTIONS)))
BATCHES, CONTEXTS = (1, 4, 16), (256, 2048)
NO_OVERHEAD = ((0,) * len(OPTIONS),) * (2 * len(BATCHES))


def tables() -> st.SearchStrategy[CostTable]:
    cells = st.lists(
        st.integers(1, 10**6),
        min_size=len(OPTIONS) * len(BATCHES) * len(CONTEXTS),
        max_size=len(OPTIONS) * len(BATCHES) * len(CONTEXTS),
    )
    places = list(itertools.product(NUMBERS, range(len(BATCHES)), range(len(CONTEXTS))))
    return cells.map(
        lambda values: CostTable.measured(
            OPTIONS.names, BATCHES, CONTEXTS, dict(zip(places, values, strict=True))
        )
    )


def all_beliefs(drafter: int = ON) -> st.SearchStrategy[Beliefs]:
    row = st.lists(st.integers(ONE, 8 * ONE), min_size=len(OPTIONS), max_size=len(OPTIONS))
    overs = st.lists(st.integers(-(10**4), 10**5), min_size=len(OPTIONS), max_size=len(OPTIONS))
    return st.builds(
        lambda rows, known, over, factors, probe: Beliefs(
            3,
            tuple(tuple(r) for r in rows),
            tuple(known),
            tuple(tuple(o) for o in over),
            tuple(factors),
            drafter,
            probe,
        ),
        st.lists(row, min_size=KINDS, max_size=KINDS),
        st.lists(st.integers(0, 1), min_size=KINDS, max_size=KINDS),
        st.lists(overs, min_size=2 * len(BATCHES), max_size=2 * len(BATCHES)),
        st.lists(st.integers(100, 10**4), min_size=len(OPTIONS), max_size=len(OPTIONS)),
        st.integers(0, len(OPTIONS)),
    )


SHAPES = st.builds(
    lambda greedy, sampled, plain, context: Shape((greedy, sampled), plain, context),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 4),
    st.integers(0, 9000),
).filter(lambda shape: shape.batch > 0)
ALLOWED = st.sets(st.sampled_from(NUMBERS)).map(lambda s: tuple(sorted({PLAIN, *s})))


@settings(max_examples=50)
@given(tables(), all_beliefs(), SHAPES, ALLOWED, st.sampled_from(NUMBERS))
def test_never_below_plain_and_within_the_margin_of_the_best(
    table: CostTable, beliefs: Beliefs, shape: Shape, allowed: tuple[int, ...], before: int
) -> None:
    chosen = choose(table, beliefs, shape, allowed, before)
    assert chosen in allowed
    got = rate(table, beliefs, shape, chosen)
    assert not rate(table, beliefs, shape, PLAIN).above(got), "the table says it loses"
    for option in allowed:
        assert not rate(table, beliefs, shape, option).above(got, ONE + MARGIN)
    if chosen != before:  # whatever replaces another is the best there is
        for option in allowed:
            assert not rate(table, beliefs, shape, option).above(got)


@settings(max_examples=50)
@given(tables(), all_beliefs(), SHAPES, ALLOWED, st.sampled_from(NUMBERS))
def test_a_choice_stays(
    table: CostTable, beliefs: Beliefs, shape: Shape, allowed: tuple[int, ...], before: int
) -> None:
    chosen = choose(table, beliefs, shape, allowed, before)
    assert choose(table, beliefs, shape, allowed, chosen) == chosen


@settings(max_examples=50)
@given(tables(), all_beliefs(), SHAPES, ALLOWED, st.sampled_from(NUMBERS), st.integers(0, 7))
def test_ranks_that_hold_the_same_integers_decide_alike(
    table: CostTable,
    beliefs: Beliefs,
    shape: Shape,
    allowed: tuple[int, ...],
    before: int,
    since: int,
) -> None:
    theirs = CostTable.from_json(json.loads(table.to_json()))
    sent = Beliefs.from_ints(beliefs.to_ints(), len(OPTIONS))
    assert (theirs, sent, theirs.version) == (table, beliefs, table.version)
    one = decide(table, beliefs, shape, allowed, before, since)
    assert one == decide(theirs, sent, shape, allowed, before, since)
    assert type(step_us(table, beliefs, shape, one.option)) is int


@settings(max_examples=50)
@given(tables(), all_beliefs(), SHAPES, ALLOWED, st.sampled_from(NUMBERS))
def test_a_try_costs_a_bounded_number_of_plain_steps(
    table: CostTable, beliefs: Beliefs, shape: Shape, allowed: tuple[int, ...], before: int
) -> None:
    decision = decide(table, beliefs, shape, allowed, before, 0)
    assert decision.option in allowed
    if decision.why not in ("probe", "unknown"):
        return
    cost, plain = (step_us(table, beliefs, shape, o) for o in (decision.option, PLAIN))
    cheapest = min((step_us(table, beliefs, shape, o) for o in allowed if o != PLAIN), default=0)
    assert cost <= max(PROBE_COST * plain, cheapest)


def _table(costs: list[int]) -> CostTable:
    places = itertools.product(NUMBERS, range(3), range(2))
    return CostTable.measured(OPTIONS.names, BATCHES, CONTEXTS, {p: costs[p[0]] for p in places})


def _beliefs(greedy: list[int], sampled: list[int], drafter: int = ON) -> Beliefs:
    return Beliefs(1, (tuple(greedy), tuple(sampled)), (1, 1), NO_OVERHEAD, (ONE,) * 6, drafter)


#        plain chain  4     8     15    31
COSTS = [10000, 22000, 21000, 22500, 25000, 32000]
GREEDY = [1000, 5200, 4200, 5600, 5700, 6000]
SAMPLED = [1000, 2070, 2000, 2050, 2200, 2300]


def test_the_whole_batch_counts() -> None:
    """Greedy requests want tree-8, sampled ones plain; together what gives most to all."""
    table, beliefs = _table(COSTS), _beliefs(GREEDY, SAMPLED)
    assert OPTIONS.names[choose(table, beliefs, Shape((1, 0), 0, 300), NUMBERS, 0)] == "tree-8"
    assert choose(table, beliefs, Shape((0, 4), 0, 300), NUMBERS, 3) == PLAIN
    assert OPTIONS.names[choose(table, beliefs, Shape((1, 1), 0, 300), NUMBERS, 0)] == "tree-8"
    assert choose(table, beliefs, Shape((1, 0), 7, 300), NUMBERS, 0) == PLAIN  # seven opted out
    mixed = Shape((2, 1), 3, 300)
    assert rate(table, beliefs, mixed, PLAIN).tokens == 6000
    assert rate(table, beliefs, mixed, 3).tokens == 2 * 5600 + 2050 + 3 * 1000
    # Three that opted out count: 19.8 tokens, where plain steps give 13.5 in that time.
    assert OPTIONS.names[choose(table, beliefs, Shape((3, 0), 3, 300), NUMBERS, 0)] == "tree-8"


def test_a_bound_holds_for_probes_too() -> None:
    """Beliefs may order what the bound or the price forbids by now: the best one runs instead."""
    table, shape = _table(COSTS), Shape((2, 0), 0, 300)
    ordered = replace(_beliefs(GREEDY, SAMPLED), probe=1 + NUMBERS[-1], probe_steps=PROBE_RUN)
    assert decide(table, ordered, shape, NUMBERS, 0, 0) == Decision(NUMBERS[-1], "probe")
    assert decide(table, ordered, shape, NUMBERS, 0, PROBE_RUN).why == "best"
    assert decide(table, ordered, shape, OPTIONS.allowed(7), 0, 0) == Decision(CHAIN, "best")
    dear = _table([*COSTS[:-1], PROBE_COST * COSTS[0] + 1])
    assert decide(dear, ordered, shape, NUMBERS, 0, 0).why == "best"


def test_a_narrow_lead_changes_nothing_and_a_loss_everything() -> None:
    table = _table(COSTS)
    shape = Shape((0, 1), 0, 300)

    def after(tree_8: int, before: int) -> int:
        return choose(
            table, _beliefs(GREEDY, [1000, 2000, 2000, tree_8, 2000, 2000]), shape, NUMBERS, before
        )

    even, lead = 2250, 2250 * (1000 + MARGIN) // 1000
    assert after(lead, PLAIN) == PLAIN
    assert after(lead + 10, PLAIN) == 3
    assert after(even, 3) == 3
    assert after(even - 10, 3) == PLAIN


def test_bounds_and_standing_of_the_drafter() -> None:
    table, shape = _table(COSTS), Shape((2, 0), 0, 300)
    assert OPTIONS.allowed(None) == NUMBERS
    assert [OPTIONS.names[o] for o in OPTIONS.allowed(7)] == ["plain", "chain", "tree-4"]
    allowed = OPTIONS.allowed(7)
    assert decide(table, _beliefs(GREEDY, SAMPLED), shape, allowed, 0, 1).option == CHAIN
    off = decide(table, _beliefs(GREEDY, SAMPLED, OFF), shape, NUMBERS, 3, 0)
    assert (off.option, off.why) == (PLAIN, "off")
    trial = decide(table, _beliefs(GREEDY, SAMPLED, TRIAL), shape, NUMBERS, 3, 1)
    assert (OPTIONS.names[trial.option], trial.why) == ("tree-4", "trial")
    nobody = decide(table, _beliefs(GREEDY, SAMPLED), Shape((0, 0), 3, 300), NUMBERS, 3, 0)
    assert (nobody.option, nobody.why) == (PLAIN, "opted-out")


@pytest.mark.parametrize("most_nodes", [7, 8, 20, 31, 63])
def test_options_are_nested_trees(most_nodes: int) -> None:
    options = Options.of(8, most_nodes)
    assert options.names[:2] == ("plain", "chain")
    assert options.nodes[-1] == most_nodes
    covered = [row for first, last in options.bands for row in range(first, last + 1)]
    assert covered == list(range(1, most_nodes + 1))
    assert len(options.bands) == len(options) - 2
