"""What launches of steps tell of the time that each took."""

from __future__ import annotations

from itertools import accumulate

import pytest

from overstory.workers.policy.choice import LONGEST_PROBE, Shape
from overstory.workers.policy.compared import BESIDE
from overstory.workers.policy.launches import (
    APART_NS,
    INTERRUPTED,
    LOOP_WAITED,
    WORKED,
    Run,
    periods_ns,
)

SHAPE = Shape((1, 0), 0, 256)
MS = 1_000_000


def launches(*took: int, begin: int = 1) -> list[int]:
    """Of steps that took so long, and of the one after them."""
    return list(accumulate(took, initial=begin))


def run_of(*marks: int, visited: bool = False) -> Run:
    return Run(0, 0, SHAPE, visited, list(marks))


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        ([], []),
        ([5], []),
        ([5, 15], []),
        ([5, 15, 26, 38], [11, 12]),
        ([5, WORKED, 15, 26, 38], [11, 12]),
        ([5, 15, WORKED, 26, 38, 51], [12, 13]),
        ([5, 15, WORKED, WORKED, 26, WORKED, 38, 51], [13]),
        ([5, 15, 26, INTERRUPTED, 38, 51, 65], [11, 14]),
        ([5, 15, 26, WORKED, INTERRUPTED, WORKED, 38, 51, 65], [11, 14]),
        ([INTERRUPTED, 5, 15, 26], [11]),
    ],
)
def test_a_period_is_a_steps_own(marks: list[int], told: list[int]) -> None:
    """One of its kind runs before it, and neither a prefill nor the rule's work falls into it."""
    assert periods_ns(marks) == told


def test_a_loop_that_waited_is_no_steps_time() -> None:
    """For a lease or a command: the device has nothing to run when the next step is launched, so
    the one after that is launched at once, and that is no step's time either."""
    marks = launches(10, 11, 12, 60_000, 2, 13, 14)
    assert periods_ns(marks) == [11, 12, 13, 14]
    assert periods_ns(launches(10, 11, 11 * LOOP_WAITED, 12)) == [11, 11 * LOOP_WAITED, 12]
    assert periods_ns(launches(10, 1, 11, 12, 13)) == [1, 11, 12, 13], "a short one says nothing"
    *before, last = launches(10, 11, 12, 60_000)
    assert periods_ns([*before, WORKED, last, last + 2, last + 15]) == [11, 12, 13]
    at_its_end = launches(10, 11, 12, 60_000)
    assert periods_ns(at_its_end) == [11, 12]


def test_first_steps_are_told_of_after_a_visit_and_last_ones_before() -> None:
    steps = [100 * MS + number * MS for number in range(LONGEST_PROBE + BESIDE + 4)]
    *marks, now = launches(*steps)
    us = [ns // 1000 for ns in steps[1:]]
    first, last = us[:LONGEST_PROBE], us[-BESIDE:]
    assert run_of(*marks).looked_at(now) == last
    assert run_of(*marks, visited=True).looked_at(now) == first + last
    few = run_of(*marks[: BESIDE + 2], visited=True)
    assert few.looked_at(marks[BESIDE + 2]) == us[: BESIDE + 1], "each once"
    assert run_of(1, 2, 3, visited=True).looked_at(4) == [1, 1], "no step takes nothing"


def test_the_first_steps_of_a_run_are_told_of_once_however_often_it_is_looked_at() -> None:
    run = run_of(1, WORKED, visited=True)
    told = []
    half = LONGEST_PROBE // 2
    for look in range(4):
        begin = run.marks[0]
        took = [MS * (100 * look + step) for step in range(5, 6 + half)]
        *marks, now = launches(*took, begin=begin)
        run.marks += marks[1:]
        told.append(run.looked_at(now))
        assert run.marks == [now, WORKED], "the look falls into the step that begins"
    first = [1000 * step for step in range(6, 6 + half)]
    assert [some[: half + 1] for some in told[:2]] == [first, [100_000 + us for us in first]]
    assert [len(some) for some in told] == [half] * 4, "the last ones are told of at each"
    assert run.told == LONGEST_PROBE


def test_steps_far_apart_are_not_compared() -> None:
    run = run_of(1, WORKED, MS, INTERRUPTED)
    run.looked_at(MS + APART_NS)
    assert not run.stood
    run.marks += [INTERRUPTED]
    run.looked_at(MS + 2 * APART_NS + 1)
    assert run.stood
    run.looked_at(MS + 2 * APART_NS + 2)
    assert not run.stood
