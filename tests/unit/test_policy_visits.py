"""When options that do not run are tried: for their price, one after the other."""

from __future__ import annotations

import pytest

from overstory.workers.policy.choice import LONGEST_PROBE, PROBE_RUN
from overstory.workers.policy.visits import (
    BOLD,
    LOSS,
    REST,
    STEPS,
    YOUNG,
    Price,
    Visits,
    interval,
    run_of,
)

CHEAP, DEAR = Price(0.99, 5.0), Price(0.6, 20.0)


def test_a_price_is_waited_for() -> None:
    """A visit that loses half a best step comes after so many of them that it is LOSS of these."""
    assert interval(Price(0.9, 5.0), YOUNG) == pytest.approx(0.5 * 1000 / LOSS)
    assert interval(CHEAP, YOUNG) == pytest.approx(0.05 * 1000 / LOSS)
    assert interval(Price(0.999, 5.0), YOUNG) == STEPS[0], "not closer"
    assert interval(DEAR, YOUNG) == STEPS[1], "not further apart"


def test_what_no_comparison_has_told_of_is_visited_soon() -> None:
    unknown = Price(0.2, 30.0, known=False)
    assert interval(unknown, 0) == STEPS[0] / 2
    assert interval(Price(0.2, 30.0), 0) == STEPS[0] / 2 < interval(Price(0.2, 30.0), 1)


def test_what_visits_cannot_tell_of_is_visited_less_and_less() -> None:
    """It was visited every 32 steps for ever, where batches shrink too soon."""
    unknown = Price(0.9, 5.0, known=False)
    waits = [interval(unknown, YOUNG + visits) for visits in range(10)]
    assert waits[:8] == [STEPS[0] / 2 * 2**visits for visits in range(8)]
    assert waits[8:] == [STEPS[1]] * 2
    young = [interval(unknown, visits) for visits in range(YOUNG)]
    assert young == [STEPS[0] / 2] * YOUNG, "steps around one may have differed by accident"
    assert interval(unknown, 100_000) == STEPS[1], "an engine that decodes for days"


def test_a_visit_lasts_until_it_has_cost_what_the_host_does_for_it() -> None:
    assert run_of(2.0, 0.1, True) == 20
    assert run_of(2.0, 0.07, True) == 28, "no more than that"
    assert run_of(2.0, 0.5, True) == run_of(2.0, 3.0, True) == PROBE_RUN
    assert run_of(0.05, 0.02, True) == PROBE_RUN, "long steps"
    assert run_of(2.0, 0.001, True) == run_of(2.0, 0.0, True) == LONGEST_PROBE
    assert run_of(2.0, 0.1, False) == PROBE_RUN, "what is lost is not known"


def test_first_visits_are_short() -> None:
    visits, prices = Visits(2, 2), {1: CHEAP}
    for _ in range(YOUNG):
        assert not visits.some(0, 1)
        visits.pass_steps(0, STEPS[1])
        visits.look(0, 0, prices)
        assert visits.due(0) == 1
    assert visits.some(0, 1)
    assert not visits.some(1, 1), "another place"


def test_first_visits_come_sooner_where_not_much_is_lost() -> None:
    price = Price(0.9, 5.0)
    waits = [interval(price, visits) for visits in range(YOUNG + 2)]
    assert waits == sorted(waits)
    assert waits[0] == STEPS[0] / 2
    assert waits[YOUNG] == waits[YOUNG + 1]
    assert interval(DEAR, 1) == interval(DEAR, YOUNG), "another accident like that is too dear"


def test_the_best_option_runs_between_two_visits() -> None:
    """Option 0 runs; 1 and 2 are due at once, and one place's visits say nothing of another's."""
    visits, prices = Visits(2, 3), {1: CHEAP, 2: CHEAP}

    def due(place: int, steps: int) -> int | None:
        visits.pass_steps(place, steps)
        visits.look(place, 0, prices)
        return visits.due(place)

    assert due(0, REST) == 2
    assert due(0, REST - 1) is None, "nothing could be compared to the best one"
    assert due(0, 1) == 1
    assert due(1, REST) == 2


def test_how_long_nothing_is_due() -> None:
    visits, prices = Visits(1, 2), {1: CHEAP}
    assert visits.look(0, 0, prices) == REST, "the best one has to run first"
    visits.pass_steps(0, REST)
    assert visits.look(0, 0, prices) <= 0
    assert visits.due(0) == 1
    assert visits.look(0, 0, prices) == interval(CHEAP, 1)


def test_what_may_well_be_the_best_is_visited_more_often() -> None:
    """Within `BOLD` times its price: what is not known well costs no more than that."""
    sure, hopeful = Price(0.9, 5.0, off=0.02), Price(0.9, 5.0, off=0.08)
    assert interval(sure, YOUNG) == interval(Price(0.9, 5.0), YOUNG)
    assert interval(hopeful, YOUNG) == pytest.approx(interval(sure, YOUNG) / BOLD)


def test_whoever_waited_longest_for_its_price_comes_first() -> None:
    visits, prices = Visits(1, 3), {1: CHEAP, 2: Price(0.9, 5.0)}
    for _ in range(2):  # both were tried just now
        visits.pass_steps(0, REST)
        visits.look(0, 0, prices)
        assert visits.due(0) is not None
    order = []
    for _ in range(400):
        visits.pass_steps(0, REST)
        visits.look(0, 0, prices)
        order.append(visits.due(0))
    assert order.count(1) > 3 * order.count(2) > 3, "the cheaper one more often"
    assert 0 not in order
