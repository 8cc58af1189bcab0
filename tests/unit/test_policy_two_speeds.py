"""The automatic rule beside a host of two speeds, as an H200's was: at the fast one steps are bound
by the device and larger trees take longer, at the slow one by the host and all take the same."""

from __future__ import annotations

import json
import math
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

BETWEEN_US = 60
"""What the device does between the work of two steps."""

STRETCH_US = (3e3, 40.0)
"""Shortest stretch of one speed, and the longest in times of it."""


def measured_table() -> CostTable:
    """As that engine measured it, of the options of its run before trees were grown."""
    runs = json.loads(STORED.read_text())["runs"]
    tables = (run["cost_table"] for run in runs if "cost_table" in run)
    return CostTable.from_json(next(t for t in tables if tuple(t["options"]) == OPTIONS.names))


class TwoSpeeds:
    """Steps of one number of requests.

    Args:
        clocked: whether the device's clock is read in steps that are counted.
        wrong: how far off (logarithm) the table is of what each option takes the device.
    """

    def __init__(
        self,
        temperature: float,
        requests: int,
        seed: int,
        clocked: bool = True,
        wrong: float = 0.0,
    ) -> None:
        self._recorded = Recorded(temperature, requests, 3)  # what trees give
        self._table, self._host = measured_table(), HOST_US[requests]
        self._dice, self._until, self._slow, self._now = random.Random(seed), 0.0, False, 0.0
        self._clocked = clocked
        costs = self._table.costs(requests, self._recorded.context)
        self._device = [cost * math.exp(self._dice.gauss(0.0, wrong)) for cost in costs]
        sampled = temperature > 0
        self._shape = Shape((0, requests) if sampled else (requests, 0), 0, 256, sampled)
        self._rule = Rule(OPTIONS, self._table)
        dice = random.Random(7)
        self._us = [
            fmean(self._took(option, turn % 2 == 0, dice) for turn in range(4000))
            for option in NUMBERS
        ]

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
            took = self._took(option, self._slow, self._dice)
            self._now += took
            walk = partial(self._recorded.walk, option, self._dice)
            clock = self._device[option] * self._dice.gauss(1.0, 0.01) if self._clocked else None
            self._rule.ran(decision, self._shape, took, walk, clock)
            tokens += self._recorded.tokens[option]
            us += self._us[option]
        return tokens / us / max(self.rates)

    def _took(self, option: int, slow: bool, dice: random.Random) -> float:
        """A step: what the host needs, which differs, or the device, which hardly does."""
        host = self._host * (SLOW if slow else 1.0) * (1 + abs(dice.gauss(0, 0.08)))
        if dice.random() < 0.05:
            host *= 1 + dice.random()
        return max(host, BETWEEN_US + self._device[option] * dice.gauss(1.0, 0.005))


@pytest.mark.parametrize("requests", HOST_US)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_auto_reaches_the_goal_beside_a_host_of_two_speeds(
    temperature: float, requests: int, wrong: float
) -> None:
    """After two seconds of work, with a table that is right or not. Without the device's clock the
    rule reached 0.972 to 0.981 of the best option with a table that is off by a tenth, with it
    0.991 to 0.998 (means of 20 runs)."""
    shares = []
    for seed in range(5):
        world = TwoSpeeds(temperature, requests, seed, wrong=wrong)
        world.share(2000)
        shares.append(world.share(2000))
    assert fmean(shares) >= GOAL, shares
    assert min(shares) >= GOAL - 0.05, shares


def test_without_the_devices_clock_it_is_near_the_goal() -> None:
    """Where steps run in parts, or the clock is off: by the table and what was compared."""
    worlds = [TwoSpeeds(1.0, 8, seed, clocked=False) for seed in range(5)]
    for world in worlds:
        world.share(2000)
    shares = [world.share(2000) for world in worlds]
    assert fmean(shares) >= GOAL, shares
