"""The rank slice's run of the automatic policy, played with the step times that it measured.

`slice_auto.AutoBench` itself, its points in their order, on an engine whose host runs ahead of the
device and counts walks as a worker does. The runs at be0b148 and 9b923f7 are met to the step in
this way. The slice reads no device's clock (`AutoBench` leaves what a step brings to the host), nor
do steps of several ranks; an engine of one rank does, so each is played with it too.
"""

from __future__ import annotations

import functools
import json
import random
import sys
from bisect import bisect_left
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_world import automatic_policy

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from slice_auto import SURE, AutoBench, Drafts
from slice_roles import AUTO

from overstory.workers.policy import chooser
from overstory.workers.policy.chooser import StepChooser
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.measure import Grid, _table
from overstory.workers.policy.options import Options

STORED = Path(__file__).parents[2] / "docs" / "benchmarks" / "rank_slice_h200.json"
RUNS = (
    ("fits", "c16b465"),
    ("fits badly", "be0b148"),
    ("fits badly", "9b923f7"),
    ("fits badly", "c16b465"),
)
"""The runs whose step times are taken, by drafter."""
GOAL = 0.98
GRID = Grid((1, 2, 4, 8, 16), (256, 2048, 16384, 65536), 1_049_169, 33)
"""Of the cost table that an engine of 16 requests measures."""
WHOLE, CUT = 20, 11
"""Cells of it that were timed. At 9b923f7 16 were in 8 s, four of 65,536 tokens not among them."""
LAUNCH_NS = 600_000
BETWEEN_US = 70.0
"""What lies between two steps on the device; the rest of one is its work."""
OPTIONS = Options.of(8, 32).grown(lambda rows: next(n for n in (1, 8, 9, 17, 33) if n >= rows))
Times = dict[tuple[int, int], list[float]]
ONE_RANK: Any = SimpleNamespace(decides=True, host_ints=lambda values: values)


@functools.cache
def times(drafter: str, commit: str) -> Times:
    """Microseconds of a step, by batch and context, then by option."""
    roles = json.loads(STORED.read_text())["roles"]
    rows = [row for role in roles if role["commit"] == commit for row in role.get("auto", [])]
    return {
        (row["batch"], row["context"]): [
            1e6 * row["batch"] * tokens / row["rates"][name]
            for name, tokens in zip(OPTIONS.names, row["tokens_per_step"], strict=True)
        ]
        for row in rows
        if row["drafter"] == drafter
    }


def between(known: list[int], at: int) -> tuple[int, int, float]:
    """The two of ``known`` on whose line ``at`` lies, and its share of the way."""
    right = min(max(1, bisect_left(known, at)), len(known) - 1)
    left, far = known[right - 1], known[right]
    return left, far, (at - left) / (far - left)


def step_us(measured: Times, batch: int, context: int) -> list[float]:
    """By option, at a place of the table: on lines through what was measured."""
    batches = sorted({b for b, _ in measured})
    sides = []
    low, high, share = between(batches, batch)
    for side in (low, high):
        left, far, way = between(sorted(c for b, c in measured if b == side), context)
        ends = zip(measured[side, left], measured[side, far], strict=True)
        sides.append([a + (b - a) * way for a, b in ends])
    return [a + (b - a) * share for a, b in zip(*sides, strict=True)]


def table(measured: Times, timed: int) -> CostTable:
    """Of so many cells, the others filled in."""
    cells = GRID.cells()[:timed]
    found = {cell: [round(us) for us in step_us(measured, *cell)] for cell in cells}
    nothing = dict.fromkeys(GRID.batches, [0] * len(OPTIONS))
    return _table(OPTIONS, found, nothing, nothing)


class _Chooser(StepChooser):
    """``chosen``: whether the step to be launched is one that it chose."""

    chosen = False

    def next(self, batch: Any) -> Any:
        self.chosen = True
        return super().next(batch)


class Engine:
    """Worker, timer and device in one; ``now`` is the host's clock in nanoseconds.

    Args:
        clocked: whether the rule is told what the work of the steps that it chose took the device.
    """

    def __init__(
        self, measured: Times, timed: int, drafts: Drafts, noise: float, seed: int, clocked: bool
    ) -> None:
        self.chooser = _Chooser(OPTIONS, ONE_RANK, host_waits=False)
        self._clocked = clocked
        self.chooser.start(table(measured, timed), 0.05)
        self._measured, self._trees = measured, drafts._trees
        self._noise, self._dice = noise, random.Random(seed)
        self.now = self._end = 0
        self._batch: Any = None
        self._us: list[float] = []

    def prepare(self, batch: int, context: int) -> None:
        self._us = self._measured[batch, context]
        params = SimpleNamespace(top_k=1, custom_params=None)
        reqs = [SimpleNamespace(sampling_params=params) for _ in range(batch)]
        self._batch = SimpleNamespace(reqs=reqs, seq_lens_sum=batch * context)

    def launch(self, policy: Any) -> None:
        """Returns when the step before this one is over."""
        before, option = self._end, OPTIONS.policies.index(policy)
        self.now += LAUNCH_NS
        took_us = self._us[option] * (1 + self._dice.gauss(0, self._noise))
        self._end = max(self.now, before) + round(1000 * took_us)
        self.now = max(self.now, before)
        if self._trees[option] is not None:  # as a worker tells of what it drafted
            tree = self._trees[option][0]
            rows: Any = SimpleNamespace(rows=torch.full((1, 8), -1))
            outcome = self.chooser.outcome(self._batch, policy, tree, rows)
            # A fixed budget's step is none of those that the rule chose.
            if self._clocked and self.chooser.chosen and outcome and outcome.timed:
                outcome.timed(round(took_us - BETWEEN_US))
        self.chooser.chosen = False

    def wait(self) -> None:
        self.now = max(self.now, self._end)


@functools.cache
def drafts(drafter: str) -> Drafts:
    return Drafts(OPTIONS, 7, SURE[drafter])


@pytest.mark.parametrize("clocked", [False, True])
@pytest.mark.parametrize(("noise", "timed"), [(0.002, WHOLE), (0.01, WHOLE), (0.003, CUT)])
@pytest.mark.parametrize(("drafter", "commit"), RUNS)
def test_every_point_is_within_two_hundredths_of_the_best_budget(
    drafter: str,
    commit: str,
    noise: float,
    timed: int,
    clocked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of ten were not at be0b148, with 128 steps timed: trials that came late, since steps
    after one were too few to compare, and trials of budgets that are a third worse. One was not at
    9b923f7, whose table had taken a context to cost four requests four times what it costs one."""
    measured = times(drafter, commit)
    assert measured.keys() == set(AUTO)
    for seed in range(3):
        engine = Engine(measured, timed, drafts(drafter), noise, seed, clocked)
        clock = SimpleNamespace(perf_counter_ns=lambda engine=engine: engine.now)
        monkeypatch.setattr(chooser, "time", clock)
        with automatic_policy(OPTIONS.nodes[-1]):
            bench = AutoBench(engine, engine, on_cuda=False, clock=clock.perf_counter_ns)
            found = [bench.cell(*at, drafts(drafter), 9.0) for at in AUTO]
        told = [one["device_us"] for p in found for one in p["believed"]["options"].values()]
        assert any(told) == clocked
        missed = [(p["batch"], p["context"], p["of_best"]) for p in found if p["of_best"] < GOAL]
        assert not missed, [p["used"] for p in found if p["of_best"] < GOAL]
