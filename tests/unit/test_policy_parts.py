"""Steps that run in parts, where others are one graph: costs of their own, learnt apart."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from policy_world import NUMBERS, OPTIONS, World, automatic_policy

from overstory.workers.policy import OPT_OUT, chooser
from overstory.workers.policy.beliefs import GREEDY, ONE, Beliefs
from overstory.workers.policy.choice import Decision, Shape, choose, place_of, places_of, step_us
from overstory.workers.policy.chooser import StepChooser, shape_of
from overstory.workers.policy.compared import NEAR
from overstory.workers.policy.cost_table import DRAFTS_IN_PARTS, IN_PARTS, WHOLE, CostTable
from overstory.workers.policy.options import CHAIN, PLAIN
from overstory.workers.policy.periods import Periods
from overstory.workers.policy.steering import Steering

#        plain chain  4    8    15   31
COSTS = (1000, 1500, 1450, 1500, 1550, 1700)
PARTS = (500, 6000, 6000, 6000, 6000, 6000)
BATCHES = (1, 16)


def _table(parts: tuple[int, ...] = PARTS) -> CostTable:
    pairs = list(itertools.product(NUMBERS, range(len(BATCHES))))
    cells = {(o, b, 0): COSTS[o] + 100 * b for o, b in pairs}
    more = {(o, b): parts[o] for o, b in pairs}
    return CostTable.measured(OPTIONS.names, BATCHES, (256,), cells, parts_us=more)


def _req(top_k: int = 1, **custom: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(top_k=top_k, custom_params=custom))


def test_costs_are_those_of_the_way_steps_run() -> None:
    table = _table()
    assert (table.cost(CHAIN, 1, 256), table.cost(PLAIN, 1, 256)) == (1500, 1000)
    assert table.cost(CHAIN, 1, 256, launch=IN_PARTS) == 7500
    assert table.cost(PLAIN, 16, 256, launch=IN_PARTS) == 1600
    assert table.cost(CHAIN, 1, 256, launch=DRAFTS_IN_PARTS) == 7500
    assert table.cost(PLAIN, 1, 256, launch=DRAFTS_IN_PARTS) == 1000
    assert table.cost(CHAIN, 1, 256) == 1500, "what is kept of one way is not that of another"


def test_what_a_batch_asks_for_says_how_its_steps_run() -> None:
    def of(*reqs: Any, parts: bool = False) -> Shape:
        return shape_of(SimpleNamespace(reqs=list(reqs), seq_lens_sum=9), parts)  # type: ignore

    assert of(_req(), _req(50)).launch == WHOLE
    assert of(_req(), _req(**{OPT_OUT: False})).launch == DRAFTS_IN_PARTS
    assert of(_req(), parts=True).launch == IN_PARTS
    assert of(_req(**{OPT_OUT: False}), parts=True).launch == IN_PARTS


def test_every_way_of_every_batch_has_a_place_of_its_own() -> None:
    shapes = [
        Shape((bs, 0), plain, 256, sampled, parts)
        for bs in BATCHES
        for sampled in (False, True)
        for plain, parts in ((0, False), (0, True))
    ]
    shapes += [Shape((bs - 1, 0), 1, 256, sampled) for bs in BATCHES for sampled in (False, True)]
    table = _table()
    assert sorted(place_of(table, shape) for shape in shapes) == list(range(places_of(table)))
    none = _table((0,) * len(PARTS))
    assert places_of(none) == 2 * len(BATCHES), "nothing is captured: there is one way"
    assert {place_of(none, s) for s in shapes} == set(range(places_of(none)))


def test_a_choice_is_made_by_the_cost_of_steps_as_they_run() -> None:
    """Trees pay where a step is one graph, and lose where they run in parts."""
    table = _table()
    tokens = (ONE, 3000, 2900, 3100, 3300, 3500)
    blank = Beliefs.none(len(OPTIONS), places_of(table))
    beliefs = Beliefs(1, (tokens, tokens), (1, 1), blank.overhead_us, blank.factors)
    whole, parts = Shape((4, 0), 0, 256), Shape((4, 0), 0, 256, parts=True)
    spared = Shape((3, 0), 1, 256)
    assert OPTIONS.names[choose(table, beliefs, whole, NUMBERS, PLAIN)] == "tree-15"
    assert choose(table, beliefs, parts, NUMBERS, NUMBERS[-1]) == PLAIN
    assert choose(table, beliefs, spared, NUMBERS, NUMBERS[-1]) == PLAIN
    assert step_us(table, beliefs, spared, PLAIN) == step_us(table, beliefs, whole, PLAIN)


def test_what_is_learnt_of_one_way_says_nothing_of_the_other() -> None:
    """Requests with rules among others: their steps take long, which is no fault of whole ones."""
    table = _table()
    whole, parts = Shape((1, 0), 0, 256), Shape((1, 0), 0, 256, parts=True)
    world, steering = World(0.9, random.Random(3)), Steering(OPTIONS, table, 0.0)
    for _ in range(64):
        walk = world.walk(NUMBERS[-1])
        assert walk is not None
        steering.observe(GREEDY, walk)

    def steps(shape: Shape, slower: float) -> None:
        for option in (PLAIN, CHAIN, PLAIN, NUMBERS[-1], PLAIN):
            expected = table.cost(option, 1, 256, launch=shape.launch)
            for _ in range(NEAR):
                steering.observe_periods(option, shape, [round(expected * slower)])

    steps(whole, 1.0)
    believed = steering.next_beliefs(16, whole, NUMBERS, PLAIN)
    before = [step_us(table, believed, whole, o) for o in NUMBERS]
    for _ in range(20):
        steps(parts, 3.0)
        steps(whole, 1.0)
    believed = steering.next_beliefs(16, whole, NUMBERS, PLAIN)
    assert [step_us(table, believed, whole, o) for o in NUMBERS] == before
    took = table.cost(CHAIN, 1, 256, launch=IN_PARTS)
    assert step_us(table, believed, parts, CHAIN) == pytest.approx(3 * took, rel=0.01)
    shown = steering.report()["overhead_us"]
    assert shown["greedy"]["1"]["chain"] == 0
    assert shown["greedy, in parts"]["1"]["chain"] == pytest.approx(2 * took, rel=0.01)


def test_a_place_without_steps_follows_one_where_they_run_alike() -> None:
    """Two batches; whole, drafts in parts, in parts, greedy and sampled each."""
    periods = Periods([[100, 200]] * 12, batches=2)
    for place, took in ((0, 150), (9, 500)):
        for _ in range(NEAR):
            periods.add(place, 0, (100, 200), [took])
        periods.overheads()
    rows = periods.overheads()
    assert rows is not None
    assert [row[0] for row in rows[:4]] == [50] * 4
    assert [row[0] for row in rows[8:]] == [400] * 4, "not those of a nearer batch in one graph"


@pytest.fixture
def automatic() -> Iterator[None]:
    with automatic_policy():
        yield


def test_launches_of_both_ways_are_not_compared(
    automatic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(decides=True, host_ints=lambda values: values)
    one = StepChooser(OPTIONS, group, False, lambda batch: batch.ruled)  # type: ignore[arg-type]
    one.start(_table(), 0.0)
    assert one._auto is not None
    steering = one._auto.steering
    assert steering is not None
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        one._auto.steering,
        "observe_periods",
        lambda option, shape, took: seen.extend(
            (shape.launch, _table().cost(option, shape.batch, shape.context, launch=shape.launch))
            for _ in took
        ),
    )
    now = itertools.count(1, 30_000_000)
    monkeypatch.setattr(chooser.time, "perf_counter_ns", lambda: next(now))

    def decide(auto: Any, _rule: Any, shape: Shape) -> Decision:
        auto.since, one._place = 0, place_of(auto.table, shape)
        return Decision(CHAIN, "best")

    monkeypatch.setattr(one, "_decide", decide)
    for ruled in (False, True, False):
        one.interrupted()
        alone = _req()
        for _ in range(5):
            one.next(SimpleNamespace(reqs=[alone], seq_lens_sum=256, ruled=ruled))  # type: ignore
    assert seen == [(WHOLE, 1500)] * 3 + [(IN_PARTS, 7500)] * 3, "the first and the last are not"
