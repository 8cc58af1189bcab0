"""What comparisons of short and of long visits say, and how much each counts."""

import math

import pytest

from overstory.workers.policy.compared import (
    BESIDE,
    KEPT,
    LEAST,
    MEDIAN_WORTH,
    NEAR,
    QUEUED,
    Compared,
    Known,
)

UNKNOWN = [Known(0.0, 9.0)] * 2
"""Nothing at all is expected."""

NOISE = 0.05


def steps(compared: Compared, option: int, *took: float) -> None:
    for each in took:
        compared.add(option, [each])


def visited(compared: Compared, took: float, count: int) -> None:
    """Option 1, among steps of 0 that take 0: as many as count before and after."""
    beside = [0.0] * (2 * BESIDE)
    steps(compared, 0, *beside)
    steps(compared, 1, *[took] * count)
    steps(compared, 0, *beside)


def told(compared: Compared) -> Known:
    return compared.known(UNKNOWN, NOISE)[1]


def test_steps_that_only_queue_behind_the_device_do_not_count() -> None:
    compared, count = Compared(), 4 * QUEUED
    steps(compared, 0, *[1.0] * (2 * count))
    steps(compared, 1, *[0.2] * QUEUED, *[1.5] * count)
    steps(compared, 0, *[3.0] * QUEUED, *[1.0] * count)
    assert compared.counts() == {0: 1, 1: 1}, "what came before is like what came after"
    runs, other = compared.known(UNKNOWN, NOISE)
    assert other.log - runs.log == pytest.approx(0.5, abs=0.001)


def test_few_steps_are_taken_by_their_median_and_many_by_their_mean() -> None:
    few = Compared()
    steps(few, 0, *[0.0] * NEAR)
    steps(few, 1, *[0.3] * (NEAR - 1), 5.0)
    steps(few, 0, *[0.0] * NEAR)
    assert told(few).log == pytest.approx(0.3, abs=0.001), "an accident"
    many = Compared()
    steps(many, 0, *[0.0] * (2 * NEAR))
    steps(many, 1, *[0.0, 0.0, math.log(2)] * (2 * NEAR // 3))
    steps(many, 0, *[0.0] * (2 * NEAR))
    assert told(many).log == pytest.approx(math.log(4 / 3), abs=0.001), "a host of two speeds"


def test_a_long_visit_outweighs_short_ones() -> None:
    compared = Compared()
    for took, count in ((0.1, LEAST), (0.1, LEAST), (0.5, QUEUED + BESIDE)):
        visited(compared, took, count)
    assert told(compared).log == pytest.approx(0.5, abs=0.01)


def test_the_longer_a_visit_the_less_it_may_be_off_as_far_as_stretches_let_it() -> None:
    short, long = Compared(), Compared()
    visited(short, 0.3, LEAST)
    visited(long, 0.3, QUEUED + BESIDE)
    at_least = MEDIAN_WORTH**0.5 * NOISE
    assert told(short).off == pytest.approx(at_least * 1.03**0.5, rel=0.01)
    # 32 steps beside 64 say as much as 21.3 beside ever so many, 3 beside 12 as much as 2.4.
    share = 2.4 / (32 * 64 / 96) + 0.03
    assert told(long).off == pytest.approx(at_least * share**0.5, rel=0.01)


def test_noise_is_that_of_a_short_comparison_whatever_its_length() -> None:
    short, long = Compared(), Compared()
    for took in (0.2, 0.4):
        visited(short, took, LEAST)
        visited(long, took, QUEUED + BESIDE)
    assert short.scatter == pytest.approx(2 * 0.1**2)
    assert long.scatter == pytest.approx(2 * 0.1**2 * (32 * 64 / 96) / 2.4)
    assert short.scattered == long.scattered == 1


def test_no_more_is_kept_than_counts() -> None:
    compared = Compared()
    for _ in range(2 * KEPT):
        visited(compared, 0.3, 10 * BESIDE)
    assert compared.counts() == {0: KEPT, 1: KEPT}
    assert all(len(run.steps) <= 2 * BESIDE + QUEUED for run in compared._runs)
