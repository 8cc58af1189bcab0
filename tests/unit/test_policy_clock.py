"""What the device's clock says of options that the host runs ahead of: `policy/clocks.py`."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from overstory.workers.policy.clocks import (
    BOUND,
    OFF,
    SMALLER_OFF,
    STEPS_KEPT,
    STEPS_LEAST,
    WORK_KEPT,
    WORK_LEAST,
    Clocks,
    longer_by,
)
from overstory.workers.policy.periods import Periods

COSTS = [400, 600, 700, 800]
"""Of plain, a chain and two trees, by the table."""


def told(device: Sequence[int], ran: Sequence[tuple[int, int]]) -> Periods:
    """After steps of (option, microseconds), one after the other, and what the clock said."""
    periods = Periods([COSTS, COSTS], 1)
    for option, took in ran:
        periods.add(0, option, COSTS, [took])
    for option, took in enumerate(device):
        for _ in range(WORK_LEAST):
            periods.add_device(0, option, COSTS, took)
    return periods


def relative(periods: Periods) -> list[float]:
    """What options take, of the chain."""
    rows = periods.overheads()
    assert rows is not None
    took = [cost + more for cost, more in zip(COSTS, rows[0], strict=True)]
    return [us / took[1] for us in took]


def test_what_a_step_would_have_taken_in_the_place_of_another() -> None:
    paced_by_the_device, by_the_host = np.full(4, 500.0), np.full(4, 1000.0)
    assert longer_by(paced_by_the_device, 500, [600])[0] == pytest.approx(math.log(1.2))
    assert longer_by(by_the_host, 500, [600])[0] == 0.0
    half = np.array([500.0, 1000.0])
    assert longer_by(half, 500, [600])[0] == pytest.approx(math.log(1600 / 1500))
    slow = longer_by(half, 500, [400])[0]
    assert slow == pytest.approx(math.log(1400 / 1500)), "at the host's pace"
    nonsense = longer_by(np.array([5.0]), 1000, [10])[0]
    assert nonsense < 0, "a clock that says nonsense breaks nothing"


def test_the_clock_says_what_lies_between_options() -> None:
    """The table has a tree a sixth dearer than the chain; on the device it is a third."""
    chain = [(1, 450)] * STEPS_LEAST
    periods = told([300, 450, 600, 450], chain)
    _, _, tree, large = relative(periods)
    assert tree == pytest.approx(600 / 450, rel=0.01)
    assert large == pytest.approx(1.0, rel=0.01), "as much as the chain, whatever the table says"
    hidden = relative(told([300, 450, 600, 450], [(1, 900)] * STEPS_LEAST))
    assert hidden[2] == pytest.approx(1.0, rel=0.01), "the host takes longer than either"


def test_the_table_counts_until_the_clock_is_known() -> None:
    few = [(1, 600)] * (STEPS_LEAST - 1)
    assert relative(told([300, 450, 600, 450], few)) == relative(told([], few))
    assert relative(told([], few))[2] > 1.1
    periods = Periods([COSTS, COSTS], 1)
    for _ in range(STEPS_LEAST):
        periods.add(0, 1, COSTS, [600])
    for option in (1, 2):
        for _ in range(WORK_LEAST - 1):
            periods.add_device(0, option, COSTS, 450)
    assert relative(periods)[2] > 1.1, "one reading is none"


def test_a_smaller_option_is_known_by_its_own_steps() -> None:
    """What the host needs shows where the device needs less: of the chain's steps, half as long as
    a tree's, half are the host's."""
    steps = [(3, 800)] * STEPS_LEAST + [(1, 450), (1, 700)] * STEPS_LEAST
    periods = told([300, 450, 600, 800], steps)
    took = relative(periods)
    assert took[3] == pytest.approx(800 / 575, rel=0.01)


def test_no_comparison_outvotes_the_clock() -> None:
    """A machine that is disturbed had a tree look twice as dear in the only visit there was."""
    ran = [(1, 450)] * STEPS_LEAST + [(2, 900)] * 4 + [(1, 450)] * 6
    assert relative(told([300, 450, 460, 480], ran))[2] == pytest.approx(460 / 450, rel=0.05)
    assert relative(told([], ran))[2] > 1.2, "by the table alone it counts"


def test_what_lies_between_two_steps_is_the_devices_too() -> None:
    """32 greedy requests of the built-in pair on an H200: steps of tree-15 took 1.185 times the
    chain's, which take 0.1 ms more than their work; without that the clock had 1.116."""
    work, chain_us = [300, 879, 1208, 1668], (985, 1040, 1109, 1150, 1200)
    periods = told(work, [(1, us) for us in chain_us] * STEPS_LEAST)
    assert relative(periods)[2] == pytest.approx(1.185, abs=0.02)


def test_what_the_host_adds_is_not_taken_for_it() -> None:
    """Two requests: all steps take the host 0.7 ms, whatever the device does in 0.52 to 0.6."""
    periods = told([300, 524, 556, 592], [(1, 700), (1, 730)] * STEPS_LEAST)
    assert relative(periods)[2:] == pytest.approx([1.0, 1.0], abs=0.01)


def test_a_place_whose_steps_were_never_timed() -> None:
    """Its work is read with the walks, its steps only beside a visit: it is like another place."""
    periods = Periods([COSTS, COSTS], 1)
    for _ in range(STEPS_LEAST):
        periods.add(0, 1, COSTS, [600])
    for _ in range(WORK_LEAST):
        periods.add_device(1, 1, COSTS, 450)
    for _ in range(2):
        rows = periods.overheads()
    assert rows is not None
    assert rows[1] == rows[0]


def test_what_the_clock_found_of_the_table_is_known_at_other_places() -> None:
    """A tree that the table has a sixth too dear: where the clock does not tell of it, neighbours'
    steps do, whether these were told apart by their clock, by visits or by both."""
    visits = ([(1, 600)] * STEPS_LEAST + [(2, 610)] * 4) * 6 + [(1, 600)] * STEPS_LEAST
    steps, work = [(1, 600)] * STEPS_LEAST, [300, 560, 570, 780]
    for periods in (told([], visits), told(work, visits), told(work, steps)):
        rows = periods.overheads()
        assert rows is not None
        for row in rows:
            took = [cost + more for cost, more in zip(COSTS, row, strict=True)]
            assert took[2] / took[1] == pytest.approx(1.0167, abs=0.005)


def test_it_may_be_off_by_as_much_as_the_clock_where_no_comparison_counts() -> None:
    visits = ([(1, 600)] * STEPS_LEAST + [(2, 1200)] * 4) * 12 + [(1, 600)] * STEPS_LEAST
    periods = told([300, 560, 570, 780], visits)
    assert relative(periods)[2] == pytest.approx(1.0167, abs=0.02)
    assert periods.off(0, 2) == pytest.approx(OFF, rel=0.1)


def clocks(work: Sequence[int], ran: Sequence[tuple[int, int]], costs: Sequence[int]) -> Clocks:
    """As `told`, of one place alone."""
    known = Clocks()
    for option, took in ran:
        known.add_steps(option, costs[option], [took])
    for option, took in enumerate(work):
        for _ in range(WORK_LEAST):
            known.add_work(option, costs[option], took)
    return known


def test_one_wild_reading_is_not_believed_and_old_ones_are_forgotten() -> None:
    known = Clocks()
    for took in (450, 90_000, 450) * WORK_KEPT:
        known.add_work(1, 600, took)
    assert known.work_us(COSTS) == {1: pytest.approx(450)}
    for _ in range(WORK_KEPT):
        known.add_work(1, 600, 500)
    longer = [2 * cost for cost in COSTS]
    assert known.work_us(longer) == {1: pytest.approx(1000)}, "at the context of now"


def test_it_goes_by_the_newest_steps_of_what_runs() -> None:
    """Not of what was visited last, nor of what ran before."""
    work, old = [300, 450, 600, 900], [(3, 950)] * (STEPS_KEPT + 90)
    runs = [(1, 800)] * (STEPS_KEPT // 2)
    visited = clocks(work, [*old, *runs, *[(1, 500)] * 30, (2, 900), (2, 900)], COSTS)
    more = visited.relative_to(3, COSTS)
    assert more[3].log == 0.0
    chain_us = (STEPS_KEPT // 2 * 800 + 30 * 500) / (STEPS_KEPT // 2 + 30)
    assert more[1].log == pytest.approx(math.log(chain_us / 950)), "the tree's by the chain's"
    for _ in range(STEPS_KEPT):
        visited.add_steps(1, COSTS[1], [1000])
    assert visited.relative_to(3, COSTS)[1].log == pytest.approx(0.0), "the host's pace by now"


def test_how_far_off_it_may_be() -> None:
    """Of an option that needs less than what runs, what the host would need is not known."""
    more = clocks([300, 450, 600, 800], [(2, 600)] * STEPS_LEAST, COSTS).relative_to(2, COSTS)
    assert all(known.clocked for known in more.values())
    assert more[3].off == OFF
    assert more[1].off == pytest.approx(OFF + SMALLER_OFF * math.log(600 / 450))


def test_a_step_little_longer_than_its_work_is_of_the_devices_pace() -> None:
    ran = np.full(4, 500 * (BOUND - 0.1))
    assert longer_by(ran, 500, [400])[0] == pytest.approx(math.log(450 / 550))


def test_what_lies_between_two_steps_is_no_single_short_step_s() -> None:
    steps = [(1, 450), *[(1, 530)] * 19]
    more = clocks([300, 450, 600, 800], steps, COSTS).relative_to(1, COSTS)
    assert more[2].log == pytest.approx(math.log(680 / 530), abs=0.005)


def test_the_devices_part_of_a_step_grows_with_the_context() -> None:
    """Twice the context: what took the device 420 us takes it 840."""
    double = [2 * cost for cost in COSTS]

    def chain(took: int) -> float:
        """What its steps take now, if all took that before."""
        known = clocks([300, 420, 630, 800], [(1, took)] * STEPS_LEAST, COSTS)
        ran = known._steps[1].us(double[1], known.work_us(double)[1])
        assert ran is not None
        assert len(ran) == STEPS_LEAST
        return float(ran.mean())

    assert chain(450) == pytest.approx(900)
    assert chain(580) == pytest.approx(1160), "with what lies between two steps"
    assert chain(1200) == pytest.approx(1200), "what the host needs does not grow"
    assert chain(700) == pytest.approx(840), "but it takes no less than the device"
