"""`auto` against fixed policies in turn: what it tells on a machine that is disturbed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from engine_pairs import ROUNDS, Shape, Text, Watch, against, compared, measure
from engine_runs import stages_of
from policy_world import NUMBERS, OPTIONS, table_of

from overstory.workers.policy.choice import Shape as PolicyShape
from overstory.workers.policy.chooser import StepChooser

RATES = {"auto": 970.0, "tree-15": 1000.0, "tree-31": 995.0, "chain": 700.0}
SHAPE = Shape(1, 0.0, 100)


class Machine:
    """Texts of a tenth of a second, slower by up to half in stretches of 0.3 to 3 s."""

    def __init__(self, seed: int) -> None:
        self.now, self.texts = 0.0, list[tuple[str, int]]()
        self._dice, self._until, self._slower = random.Random(seed), 0.0, 1.0

    def speed(self, policy: str, _shape: Shape, number: int) -> Text:
        if self.now >= self._until:
            self._until += self._dice.uniform(0.3, 3)
            self._slower = self._dice.uniform(1, 1.5)
        rate = RATES[policy] / self._slower / (1 + abs(self._dice.gauss(0, 0.02)))
        self.now += 100 / rate
        self.texts.append((policy, number))
        return Text(rate, 1e3 / rate, {policy: 2})

    def clock(self) -> float:
        return self.now


def run(
    machine: Machine, seconds: float, put: Callable[[list[Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    fixed = [name for name in RATES if name != "auto"]
    return measure(machine.speed, seconds, put, fixed, [SHAPE] * 2, machine.clock)


@pytest.mark.parametrize("seed", range(4))
def test_hundredths_are_told_where_rates_are_off_by_a_third(seed: int) -> None:
    for row in run(Machine(seed), 1000.0):
        rivals = against(row)
        assert set(rivals) == {"tree-15", "tree-31"}, "the best two"
        for name, ratio in rivals.items():
            assert ratio.median == pytest.approx(RATES["auto"] / RATES[name], abs=0.01)
            assert ratio.interval[0] <= ratio.median <= ratio.interval[1]
            assert ratio.count == ROUNDS
        rates = [one["auto"] for one in row["rounds"]]
        assert max(rates) > 1.25 * min(rates), "the machine is disturbed"
        assert row["ran"] == {"auto": 2 * ROUNDS}
        assert row["ms_per_step"].keys() == {"auto", *rivals}


def test_it_ends_in_time_and_shapes_have_their_share() -> None:
    told: list[int] = []
    machine = Machine(0)
    found = run(machine, 20.0, lambda rows: told.append(len(rows)))
    assert told == [1, 2]
    assert 19 < machine.now < 21
    counts = [len(row["rounds"]) for row in found]
    assert min(counts) > 10
    assert max(counts) < 1.4 * min(counts)


def test_who_is_first_changes_from_round_to_round() -> None:
    machine = Machine(0)
    run(machine, 1000.0)
    texts = machine.texts
    rounds = [texts[-3 * n : len(texts) - 3 * (n - 1)] for n in range(1, ROUNDS + 1)]
    firsts = [some[0][0] for some in rounds]
    assert all(len({policy for policy, _ in some}) == 3 for some in rounds)
    assert all(len({number for _, number in some}) == 1 for some in rounds), "the same seeds"
    assert {firsts.count(name) for name in ("auto", "tree-15", "tree-31")} == {ROUNDS // 3}


def test_the_interval_holds_the_median_nineteen_times_in_twenty() -> None:
    dice = random.Random(1)
    held = 0
    for _ in range(400):
        low, high = compared([dice.gauss(1, 0.1) for _ in range(45)]).interval
        held += low <= 1 <= high
    assert 0.93 < held / 400 < 0.99


def test_what_the_rule_believed_and_timed_is_told_shape_by_shape() -> None:
    """Of a chooser that ran: what was timed since the shape before, and what it believes now."""
    group: Any = SimpleNamespace(decides=True, host_ints=lambda values: values)
    chooser = StepChooser(OPTIONS, group, host_waits=False)
    chooser.start(table_of(), 0.0)
    auto = chooser._auto
    assert auto is not None
    assert auto.steering is not None
    engine = SimpleNamespace(
        scheduler=SimpleNamespace(draft_worker=SimpleNamespace(chooser=chooser))
    )
    watch, now = Watch(engine), PolicyShape((1, 0), 0, 256)
    assert watch.about()["rule"] == {"probes": 0}, "nothing was judged"
    for took in (21_000, 22_000, 23_000):
        auto.steering.observe_period(1, now, 22_000, took)
    auto.steering.next_beliefs(16, now, NUMBERS, 0)
    told = watch.about()
    assert told["timed"] == [(1, 1, 21_000), (1, 1, 22_000), (1, 1, 23_000)]
    assert told["rule"]["batch"] == 1
    assert list(told["rule"]["options"]) == list(OPTIONS.names)
    assert told["rule"]["options"]["chain"]["us"] == pytest.approx(21_000, rel=0.05)
    assert told["machine"]["wall_s"] >= 0 <= told["machine"]["own_cpu_s"]
    assert watch.about()["timed"] == []


def test_stages_of_the_steps_between_two_snapshots() -> None:
    old = {"forwards": 2, "idle_gaps": 1, "device_ns": 900, "idle_ns": 50, "stage_ns": {"step": 7}}
    new = {
        "forwards": 6,
        "idle_gaps": 3,
        "device_ns": 4900,
        "idle_ns": 4050,
        "stage_ns": {"step": 4007, "verify": 8000},
    }
    other = {"forwards": 0, "idle_gaps": 0, "device_ns": 0, "idle_ns": 0, "stage_ns": {}}
    told = stages_of({"chain": old}, {"chain": new, "plain": other})
    assert told == {
        "steps": 4,
        "idle_us": 2.0,
        "device_us": 1.0,
        "step_us": 1.0,
        "verify_us": 2.0,
    }
