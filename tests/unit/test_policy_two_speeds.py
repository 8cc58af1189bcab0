"""The automatic rule beside a host of two speeds, as an H200's was: at the fast one steps are bound
by the device and larger trees take longer, at the slow one by the host and all take the same."""

from __future__ import annotations

import json
import random
from functools import partial
from statistics import fmean

import pytest
from recorded_world import FOLDER, NUMBERS, OPTIONS, Recorded, Rule

from overstory.workers.policy.choice import Shape
from overstory.workers.policy.cost_table import CostTable

STORED = FOLDER / "auto_pairs_h200.json"
GOAL = 0.98
HOST_US = {1: 560, 8: 740}
SLOW = 2.0
"""A step of one request took now 570 us and now 1150, with nothing else on the host's cores."""

STRETCH_US = (3e3, 40.0)
"""Shortest stretch of one speed, and the longest in times of it."""


def measured_table() -> CostTable:
    """As that engine measured it, of the options of its run before trees were grown."""
    runs = json.loads(STORED.read_text())["runs"]
    tables = (run["cost_table"] for run in runs if "cost_table" in run)
    return CostTable.from_json(next(t for t in tables if tuple(t["options"]) == OPTIONS.names))


class TwoSpeeds:
    """Steps of one number of requests."""

    def __init__(self, temperature: float, requests: int, seed: int) -> None:
        self._recorded = Recorded(temperature, requests, 3)  # what trees give
        self._table, self._host = measured_table(), HOST_US[requests]
        self._dice, self._until, self._slow, self._now = random.Random(seed), 0.0, False, 0.0
        self._device = self._table.costs(requests, self._recorded.context)
        sampled = temperature > 0
        self._shape = Shape((0, requests) if sampled else (requests, 0), 0, 256, sampled)
        self._rule = Rule(OPTIONS, self._table)
        means = [fmean(self._took(option, slow) for slow in (False, True)) for option in NUMBERS]
        self._us = means

    @property
    def rates(self) -> list[float]:
        """By option, tokens of a request per microsecond, half of the steps at each speed."""
        return [tokens / us for tokens, us in zip(self._recorded.tokens, self._us, strict=True)]

    def share(self, steps: int) -> float:
        """What so many steps give, of the best option."""
        tokens = us = 0.0
        for _ in range(steps):
            decision = self._rule.next(self._shape)
            option = decision.option
            while self._now >= self._until:
                self._until += STRETCH_US[0] * STRETCH_US[1] ** self._dice.random()
                self._slow = not self._slow
            took = self._took(option, self._slow) * (1 + abs(self._dice.gauss(0, 0.08)))
            if self._dice.random() < 0.05:
                took *= 1 + self._dice.random()
            self._now += took
            walk = partial(self._recorded.walk, option, self._dice)
            self._rule.ran(decision, self._shape, took, walk)
            tokens += self._recorded.tokens[option]
            us += self._us[option]
        return tokens / us / max(self.rates)

    def _took(self, option: int, slow: bool) -> float:
        return max(self._host * (SLOW if slow else 1.0), self._device[option])


@pytest.mark.parametrize("requests", HOST_US)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_auto_reaches_the_goal_beside_a_host_of_two_speeds(
    temperature: float, requests: int
) -> None:
    """After two seconds of work. One run in some twenty holds a wrong comparison that long and
    longer."""
    shares = []
    for seed in range(5):
        world = TwoSpeeds(temperature, requests, seed)
        world.share(2000)
        shares.append(world.share(2000))
    assert fmean(shares) >= GOAL, shares
    assert min(shares) >= GOAL - 0.05, shares
