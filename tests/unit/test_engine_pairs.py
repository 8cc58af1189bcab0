"""`auto` against fixed policies in turn: what it tells on a machine that is disturbed."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from engine_host import by_file
from engine_loop import Mark, Window, window_of
from engine_pairs import (
    LEARN_MESSAGES,
    ROUNDS,
    OwnWork,
    Shape,
    Spent,
    Watch,
    _row,
    against,
    asked_rivals,
    asked_shapes,
    compared,
    measure,
)
from engine_runs import stages_of
from policy_world import NUMBERS, OPTIONS, automatic_policy, table_of

from overstory.workers import tree_policy
from overstory.workers.policy.beliefs import GREEDY
from overstory.workers.policy.choice import Shape as PolicyShape
from overstory.workers.policy.chooser import StepChooser
from overstory.workers.policy.evidence import WANTED, Walk

TOKENS = {"auto": 7, "tree-15": 7, "tree-31": 8, "chain": 5, "plain": 1}
RATES = {"auto": 9700.0, "tree-15": 10000.0, "tree-31": 9950.0, "chain": 7000.0, "plain": 1000.0}
SHAPE = Shape(1, 0.0)


class Machine:
    """A closed loop whose steps are slower by up to half in stretches of 0.3 to 3 s."""

    def __init__(self, seed: int) -> None:
        self.now, self.turn = 0.0, 0
        self.opened: list[Shape] = []
        self.taken: list[tuple[str, int, float]] = []
        """Of each window its policy, its turn and its size."""
        self._dice, self._until, self._slower = random.Random(seed), 0.0, 1.0

    @contextmanager
    def open(self, shape: Shape) -> Iterator[Machine]:
        self.opened.append(shape)
        yield self

    def window(self, policy: str, tokens: float = math.inf, most: int = 1 << 40) -> Window:
        if self.now >= self._until:
            self._until += self._dice.uniform(0.3, 3)
            self._slower = self._dice.uniform(1, 1.5)
        rate = RATES[policy] / self._slower / (1 + abs(self._dice.gauss(0, 0.02)))
        steps = math.ceil(min(most, tokens / TOKENS[policy]))
        made, begun = steps * TOKENS[policy], self.now
        self.now += made / rate
        self.taken.append((policy, self.turn, tokens))
        ms = 1e3 * made / rate / steps
        ran = {policy: steps}
        each = TOKENS[policy]
        return Window(begun, made, made / rate, steps - 1, 1, ms, 0.9 * ms, each, 1.0, ran)

    def clock(self) -> float:
        return self.now


def run(
    machine: Machine, seconds: float, put: Callable[[list[Any]], None] = lambda _: None
) -> list[dict[str, Any]]:
    fixed = [name for name in RATES if name != "auto"]
    return measure(machine.open, seconds, put, fixed, [SHAPE] * 2, machine.clock)


@pytest.mark.parametrize("seed", range(4))
def test_hundredths_are_told_where_rates_are_off_by_a_third(seed: int) -> None:
    for row in run(Machine(seed), 1000.0):
        rivals = against(row)
        assert set(rivals) == {"tree-15", "tree-31"}, "the best two"
        for kind in ("rounds", "steps_alone"):
            for name, ratio in against(row, kind).items():
                assert ratio.median == pytest.approx(RATES["auto"] / RATES[name], abs=0.01)
                assert ratio.interval[0] <= ratio.median <= ratio.interval[1]
                assert ratio.count == ROUNDS
        for name in rivals:
            tokens = TOKENS["auto"] / TOKENS[name]
            ms = tokens * RATES[name] / RATES["auto"]
            assert against(row, "step_tokens")[name].median == pytest.approx(tokens)
            assert against(row, "step_ms")[name].median == pytest.approx(ms, abs=0.01)
        apart = [one["auto"] for one in row["median_ms"]]
        assert apart == pytest.approx([0.9 * one["auto"] for one in row["step_ms"]])
        rates = [one["auto"] for one in row["rounds"]]
        assert max(rates) > 1.25 * min(rates), "the machine is disturbed"
        steps = math.ceil(row["window"]["tokens"] / TOKENS["auto"])
        assert row["ran"] == {"auto": steps * ROUNDS}
        assert row["ran_each"] == [{"auto": steps}] * ROUNDS
        for name in ("ms_per_step", "steps", "prefills", "prefill_share", "running"):
            assert row[name].keys() == {"auto", *rivals}
        assert row["prefills"]["auto"] == 1
        assert row["steps"]["auto"] == steps - 1
        assert row["prefill_share"]["auto"] == pytest.approx(1 / steps)


def test_it_ends_in_time_and_shapes_have_their_share() -> None:
    told: list[int] = []
    machine = Machine(0)
    found = run(machine, 40.0, lambda rows: told.append(len(rows)))
    assert told == [1, 2]
    assert machine.opened == [SHAPE] * 2, "a loop for each"
    assert 39 < machine.now < 41
    counts = [len(row["rounds"]) for row in found]
    assert min(counts) > 10
    assert max(counts) < 1.4 * min(counts)


def test_windows_are_as_long_as_asked_and_alike_for_all() -> None:
    """In whole requests of the pace that `auto` has, once it has learnt."""
    machine = Machine(1)
    row = run(machine, 1000.0)[0]
    size = row["window"]["tokens"]
    assert row["window"]["new"] == SHAPE.new
    assert size == SHAPE.new, "0.12 s of 9,700 tokens/s are hardly more than one text"
    learnt = [tokens for _, _, tokens in machine.taken].index(size)
    assert learnt > 3.0 / (LEARN_MESSAGES * TOKENS["auto"] / RATES["auto"] * 1.6)
    turns = [turn for _, turn, _ in machine.taken[:learnt]]
    assert turns == list(range(learnt)), "it learns of other texts in each window"
    sizes = {tokens for _, _, tokens in machine.taken[learnt : learnt + 3 * ROUNDS]}
    assert sizes == {size}
    rate = row["fixed"]["plain"]
    assert rate < 1100, "plain is told, though its windows are cut short"
    assert machine.now < 1000


def test_who_is_first_changes_from_round_to_round() -> None:
    machine = Machine(0)
    row = run(machine, 1000.0)[1]
    taken = machine.taken
    rounds = [taken[-3 * n : len(taken) - 3 * (n - 1)] for n in range(ROUNDS, 0, -1)]
    assert [tuple(policy for policy, *_ in some) for some in rounds] == row["order"]
    assert all(len({policy for policy, *_ in some}) == 3 for some in rounds)
    turns = [{turn for _, turn, _ in some} for some in rounds]
    assert turns == [{number} for number in range(ROUNDS)], "texts of a round are alike"
    firsts = [some[0][0] for some in rounds]
    assert {firsts.count(name) for name in ("auto", "tree-15", "tree-31")} == {ROUNDS // 3}
    begun = [
        row["begun"][number][name] for number, some in enumerate(row["order"]) for name in some
    ]
    assert begun == sorted(begun)


def test_a_window_counts_what_came_behind_its_first_message() -> None:
    """Two prefills in nine messages; the stretches that a prefill is in are no step's time."""
    kinds = [(0, 0), (1, 0), (3, 1), (2, 0), (1, 0), (1, 0), (1, 0), (4, 1), (1, 0)]
    at, marks = 10.0, []
    for took, prefill in kinds:
        at += took
        marks.append(Mark(at, 1 if prefill else 5, 1 if prefill else 3, bool(prefill)))
    window = window_of(marks, {"chain": 6})
    assert (window.begun, window.seconds) == (10.0, 14.0)
    assert (window.tokens, window.steps, window.prefills) == (6 * 5 + 2, 6, 2)
    assert window.ms_per_step == window.median_ms == 1000.0
    assert (window.step_tokens, window.requests) == (5.0, 3.0)
    assert window.rate == pytest.approx(32 / 14)
    assert window.step_rate == pytest.approx(5.0)
    assert window.prefill_share == pytest.approx(8 / 14)


def test_prefills_are_evened() -> None:
    """More of them fell into the windows of one policy, which is as fast as the other."""

    def window(seconds: float, prefills: int) -> Window:
        return Window(0.0, 2000, seconds, 100, prefills, 2.0, 2.0, 20.0, 2.0, {})

    # 0.01 s each; 100 steps of 2 ms beside them, or of 3 ms.
    windows = {
        "auto": [window(0.23, 3), window(0.23, 3)],
        "chain": [window(0.21, 1), window(0.2, 0)],
        "tree-15": [window(0.31, 1)._replace(ms_per_step=3.0)] * 2,
    }
    turns = SimpleNamespace(size=SimpleNamespace(tokens=2000), order=[])
    shape = Shape(1, 0.0)
    row: Any = _row(shape, {}, windows, turns)  # type: ignore[arg-type]
    assert all(one["auto"] < 0.92 * one["chain"] for one in row["rounds"])
    for one in row["evened"]:
        assert one["auto"] == pytest.approx(shape.new / (0.002 * shape.new / 20 + 0.01))
        assert one["chain"] == one["auto"]
        assert one["tree-15"] == pytest.approx(shape.new / (0.003 * shape.new / 20 + 0.01))


def test_what_seldom_comes_between_two_steps_is_in_the_mean_alone() -> None:
    at = [0.0, 1.0, 2.0, 3.0, 13.0, 14.0]
    window = window_of([Mark(when, 5, 1, False) for when in at], {})
    assert (window.ms_per_step, window.median_ms) == (2800.0, 1000.0)


@pytest.mark.parametrize(
    "text", ["8", "0:0", "65:0", "8:-1", "8:nan", "8:2.5", "x:0", "1:0,8:0", " "]
)
def test_shapes_that_are_none_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SESSION_SHAPES", text)
    with pytest.raises(ValueError, match=r"ENGINE_SESSION_SHAPES=.*write it like '1:0 "):
        asked_shapes()


def test_shapes_and_rivals_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_SESSION_SHAPES", "ENGINE_SESSION_RIVALS"):
        monkeypatch.setenv(name, "")
    assert asked_shapes() == [Shape(n, t) for n in (1, 8, 32) for t in (0.0, 1.0)]
    assert asked_rivals() == ["plain", "chain", "tree-7", "tree-15", "tree-31", "tree-63"]
    monkeypatch.setenv("ENGINE_SESSION_SHAPES", "2:0 16:0.7 2:0")
    monkeypatch.setenv("ENGINE_SESSION_RIVALS", "chain tree-63 chain")
    assert asked_shapes() == [Shape(2, 0.0), Shape(16, 0.7)]
    assert asked_rivals() == ["chain", "tree-63"]


@pytest.mark.parametrize("text", ["chain", "chain auto", "chain tree-64", "chain chain"])
def test_rivals_that_cannot_run_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SESSION_RIVALS", text)
    with pytest.raises(ValueError, match="ENGINE_SESSION_RIVALS="):
        asked_rivals()


def test_a_profile_is_summed_by_our_files() -> None:
    """With what they call outside Python; what others call is theirs."""
    a, b = ("/x/workers/policy/chooser.py", 3, "next"), ("/x/workers/gate.py", 9, "before_pull")
    other = ("/lib/sglang/scheduler.py", 1, "run")
    nothing: dict[Any, Any] = {}
    stats = {
        a: (10, 10, 2e-3, 9e-3, nothing),
        (a[0], 8, "hold"): (5, 5, 1e-3, 1e-3, nothing),
        b: (20, 20, 4e-3, 4e-3, nothing),
        other: (10, 10, 7e-3, 8e-3, nothing),
        ("~", 0, "<len>"): (9, 9, 8e-3, 8e-3, {a: (4, 4, 5e-3, 5e-3), other: (5, 5, 3e-3, 3e-3)}),
        ("/x/workers_else/y.py", 1, "z"): (1, 1, 1.0, 1.0, nothing),
    }
    told = [line.split() for line in by_file(stats, 10, ["/x/workers"])[1:]]
    assert told == [
        ["700.00", "500.00", "3.50", "all", "of", "them"],
        ["400.00", "0.00", "2.00", "workers/gate.py"],
        ["300.00", "500.00", "1.50", "workers/policy/chooser.py"],
    ]


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
    for _ in range(WANTED):  # else nothing is judged
        auto.steering.observe(GREEDY, Walk([-1, 0, 1], [-1, 0, 0], [1, 2], 3, True))
    begun = time.perf_counter()
    for took in (21_000, 22_000, 23_000):
        auto.steering.observe_periods(1, now, [took])
    auto.steering.next_beliefs(16, now, NUMBERS, 0)
    told = watch.about()
    assert [row[:3] for row in told["timed"]] == [(1, 1, us) for us in (21_000, 22_000, 23_000)]
    when = [row[3] for row in told["timed"]]
    stretch = [begun, *when, time.perf_counter()]
    assert stretch == sorted(stretch)
    assert told["rule"]["batch"] == 1
    assert list(told["rule"]["options"]) == list(OPTIONS.names)
    assert told["rule"]["options"]["chain"]["us"] == pytest.approx(21_000, rel=0.05)
    assert told["own"] == {}, "no step ran"
    assert told["machine"]["wall_s"] >= 0 <= told["machine"]["own_cpu_s"]
    assert watch.about()["timed"] == []


class Chosen:
    """A chooser whose parts take so many microseconds, and what it would count."""

    def __init__(self, clock: list[int]) -> None:
        self._clock, self.judged = clock, 0

    def next(self, batch: Any) -> tuple[str, str]:
        self._clock[0] += 10_000
        return batch, "told"

    def outcome(self, counted: bool) -> Any:
        self._clock[0] += 2_000
        return SimpleNamespace(judge=self._judge) if counted else None

    def _judge(self, running: list[bool]) -> None:
        self._clock[0] += 50_000
        self.judged += len(running)


def test_the_choosers_own_work_is_told_by_what_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk that is counted while the next step runs is that step's."""
    clock = [0]
    monkeypatch.setattr("engine_pairs.time.perf_counter_ns", lambda: clock[0])
    chooser = Chosen(clock)
    own = OwnWork(chooser)
    assert own.about() == {}
    with automatic_policy():
        found: list[Any] = []
        for number, rule in enumerate(("auto", "auto", "auto", "chain")):
            tree_policy.HOLDER.set_current(tree_policy.parse_policy(rule))
            assert chooser.next("tree-15") == ("tree-15", "told")
            found.append(chooser.outcome(number == 0))
            clock[0] += 1_000_000  # what else a step takes
            if number == 1:
                found[0].judge([True, False])
        assert chooser.judged == 2
        told = own.about()
    auto = {"mean_us": pytest.approx((12 + 62 + 12) / 3), "median_us": 12.0, "steps": 3}
    assert told["auto"] == auto | {"changes": 1, "change_us": [], "visit_us": []}
    fixed = {"mean_us": 12.0, "median_us": 12.0, "steps": 1}
    assert told["fixed"] == fixed | {"changes": 0, "change_us": [], "visit_us": []}
    assert own.about() == {}, "a shape's own"


def test_what_calls_take_under_the_rule_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spent = [0], Spent()
    monkeypatch.setattr("engine_pairs.time.perf_counter_ns", lambda: clock[0])

    def look(us: int) -> int:
        clock[0] += 1000 * us
        return us

    timed = spent.wrapped("looks", look)
    with automatic_policy():
        for rule, us in (("auto", 20), ("chain", 1000), ("auto", 40)):
            tree_policy.HOLDER.set_current(tree_policy.parse_policy(rule))
            assert timed(us) == us
    assert spent.about() == {"looks": {"calls": 2, "mean_us": 30.0}}
    assert spent.about() == {}, "a shape's own"


def test_the_first_steps_after_a_change_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A visit of five steps, then what ran before; a fixed policy that runs what the rule did is no
    change."""
    clock = [0]
    monkeypatch.setattr("engine_pairs.time.perf_counter_ns", lambda: clock[0])
    chooser = Chosen(clock)
    own, took = OwnWork(chooser), {"chain": 1_000_000, "tree-31": 2_000_000}
    with automatic_policy():
        rules = ["auto"] * 30 + ["chain"] * 10 + ["tree-31"] * 10
        for number, rule in enumerate(rules):
            tree_policy.HOLDER.set_current(tree_policy.parse_policy(rule))
            tried = rule == "auto" and 10 <= number < 15
            policy = "tree-31" if tried or rule == "tree-31" else "chain"
            first = 500_000 * (number in (0, 10, 15, 40))
            chooser.next(policy)
            clock[0] += took[policy] - 10_000 + first
    told = own.about()
    assert told["auto"]["changes"] == 3, "the first step of all, and to and from the visit"
    assert told["auto"]["change_us"] == [1500, 1000, 1000, 1000, 1000, 1000]
    assert told["auto"]["visit_us"] == [2500, 2000, 2000, 2000, 2000]
    assert told["fixed"]["changes"] == 1
    assert told["fixed"]["change_us"] == [2500, 2000, 2000, 2000, 2000, 2000]


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
