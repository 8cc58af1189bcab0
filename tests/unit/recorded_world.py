"""An engine whose steps take and give what a stored run of an H200 says, disturbances included."""

from __future__ import annotations

import csv
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from overstory.workers.policy.choice import Decision, Shape
from overstory.workers.policy.chooser import (
    OBSERVED,
    OBSERVED_EVERY_NS,
    OBSERVED_STEPS,
    StepChooser,
    _Auto,
)
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.evidence import Walk
from overstory.workers.policy.options import CHAIN, FIRST_TREE, PLAIN, Options
from overstory.workers.tree_policy import AutoPolicy

FOLDER = Path(__file__).parents[2] / "docs" / "benchmarks"
RUNS = {3: FOLDER / "ddtree_h200_3.csv", 4: FOLDER / "ddtree_h200_4.csv"}
OPTIONS = Options.of(8, 63)
NUMBERS = tuple(range(len(OPTIONS)))
DEPTH = 7
SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 256

ALONE_US = {1: (380, 556, 533, 540, 560, 600, 660), 64: (610, 1180, 1000, 1050, 1110, 1730, 2470)}
"""By requests: what the cost table of that run had for each option, steps timed by themselves."""

NOT_RUN = {"tree-4": ("tree-15", 0.75), "tree-8": ("tree-15", 0.9)}
"""Budgets that were not timed: another one's time, and a share of what it accepts."""


def device_table() -> CostTable:
    """The table as it was measured: wrong of all that the host adds."""
    cells = {
        (option, b, 0): round(low + (high - low) * (batch - 1) / 63)
        for option, (low, high) in enumerate(zip(ALONE_US[1], ALONE_US[64], strict=True))
        for b, batch in enumerate(SIZES)
    }
    return CostTable.measured(OPTIONS.names, SIZES, (CONTEXT,), cells)


class World(Protocol):
    """What `run` plays: one number of requests, of one temperature and context.

    Attributes:
        table: what the engine had measured of its steps.
        us: by option, what a step takes when nothing disturbs it.
        tokens: by option, of a request and step.
    """

    options: Options
    table: CostTable
    requests: int
    sampled: bool
    context: int
    us: list[float]
    tokens: list[float]

    def walk(self, option: int, dice: random.Random) -> Walk:
        """One request's step under a drafting option."""


class Recorded:
    """A `World` of one of the stored runs; ``us`` is of the fastest round."""

    options, context = OPTIONS, CONTEXT

    def __init__(self, temperature: float, requests: int, stored: int = 3) -> None:
        with RUNS[stored].open(newline="") as file:
            found = {
                row["mode"]: row
                for row in csv.DictReader(file)
                if row["engine"] == "ours"
                and float(row["temperature"]) == temperature
                and int(row["concurrency"]) == requests
            }
        self.requests, self.sampled, self.table = requests, temperature > 0, device_table()
        sources = [(name, 1.0) if name in found else NOT_RUN[name] for name in OPTIONS.names]
        self.us = [1000 * float(found[name]["least_ms_per_step"]) for name, _ in sources]
        self._reached = [
            [share * float(x) for x in found[name]["accepted_by_depth"].split()] or [0.0] * DEPTH
            for name, share in sources
        ]
        grid = [self._lengths((i + 0.5) / 400) for i in range(400)]
        self.tokens = [1 + sum(at[option] for at in grid) / 400 for option in NUMBERS]

    @property
    def rates(self) -> list[float]:
        """By option, tokens of a request per microsecond."""
        return [tokens / us for tokens, us in zip(self.tokens, self.us, strict=True)]

    def _lengths(self, at: float) -> list[int]:
        """By option, accepted rows of one step: one draw for all, so that larger trees hold what
        smaller ones do."""
        lengths = [sum(share > at for share in by_depth) for by_depth in self._reached]
        held = 0
        for option, (first, last) in enumerate(OPTIONS.bands, FIRST_TREE):
            held = lengths[option] = min(max(lengths[option], held), held + last - first + 1)
        lengths[CHAIN] = min(lengths[CHAIN], held)
        return lengths

    def walk(self, option: int, dice: random.Random) -> Walk:
        """One request's step under a drafting option."""
        lengths = self._lengths(dice.random())
        if option == CHAIN:
            rows = range(1, lengths[CHAIN] + 1)
            return Walk([-1, *range(DEPTH)], [-1] + [0] * DEPTH, list(rows), 1 + DEPTH, True)
        size, unreached = 1 + OPTIONS.nodes[option], 99
        parents, ranks = [-1] + [unreached] * (size - 1), [-1] + [1] * (size - 1)
        path: list[int] = []
        for depth in range(1, lengths[option] + 1):
            tree = next(o for o in range(FIRST_TREE, option + 1) if lengths[o] >= depth)
            row = max(path[-1] + 1 if path else 1, OPTIONS.bands[tree - FIRST_TREE][0])
            parents[row], ranks[row] = path[-1] if path else 0, int(depth > lengths[CHAIN])
            path.append(row)
        spine = min(lengths[CHAIN], lengths[option])
        above = path[spine - 1] if spine else 0
        refused = next((row for row in range(above + 1, size) if row not in path), None)
        if spine < DEPTH and refused is not None:  # the drafter's best guess, in vain
            parents[refused], ranks[refused] = above, 0
        return Walk(parents, ranks, path, size, False)


class Disturbed:
    """What else the machine does: stretches of 0.03 to 2 s, half of them slower by up to two times,
    and single steps."""

    def __init__(self, dice: random.Random) -> None:
        self._dice, self._until, self._slower = dice, 0.0, 1.0

    def times(self, now_us: float) -> float:
        """How much longer a step takes now."""
        while now_us >= self._until:
            self._until += 3e4 * 67 ** self._dice.random()
            self._slower = 1.0 if self._dice.random() < 0.5 else self._dice.uniform(1.1, 2.0)
        return self._slower * (1 + abs(self._dice.gauss(0, 0.06)))


@dataclass
class Outcome:
    """Steps under the automatic rule; ``us`` of an undisturbed machine."""

    tokens: float = 0.0
    us: float = 0.0
    used: dict[str, int] = field(default_factory=dict)


class Rule:
    """The automatic rule of one rank whose host runs ahead of the device, `StepChooser`'s own."""

    def __init__(self, options: Options, table: CostTable) -> None:
        alone: Any = SimpleNamespace(decides=True, host_ints=lambda values: values)
        self._chooser = StepChooser(options, alone, host_waits=False)
        self._chooser.start(table, 0.05)
        self._steps, self._last = 0, (PLAIN, 0)
        self._now = self._counted = 0.0

    def next(self, shape: Shape) -> Decision:
        """Of a step that begins."""
        self._steps += 1
        return self._chooser._decide(self._auto, AutoPolicy(), shape)

    def ran(
        self,
        decision: Decision,
        shape: Shape,
        took_us: float,
        walk: Callable[[], Walk],
        device_us: float | None = None,
    ) -> None:
        """That step is over; ``walk`` draws what became of one request's draft, where it counts;
        ``device_us`` is what the step's work took on the device, where that is read."""
        steering, option = self._auto.steering, decision.option
        assert steering is not None
        if self._last == (option, shape.batch):
            steering.observe_periods(option, shape, [round(took_us)])
        self._last = option, shape.batch
        self._now += took_us
        if option == PLAIN or not self._to_be_counted(decision):
            return
        for _ in range(min(shape.batch, OBSERVED)):
            steering.observe(int(shape.sampled), walk())
        if device_us is not None:
            steering.observe_device(option, shape, round(device_us))

    def _to_be_counted(self, decision: Decision) -> bool:
        """As `StepChooser._to_be_counted`, by this world's clock."""
        if decision.why == "unknown":
            return True
        if decision.why == "probe":
            return self._auto.since in (0, self._auto.beliefs.probe_steps - 1)
        late = self._now - self._counted >= OBSERVED_EVERY_NS / 1000
        if self._steps % OBSERVED_STEPS == 1 and late:
            self._counted = self._now
            return True
        return False

    @property
    def _auto(self) -> _Auto:
        assert self._chooser._auto is not None
        return self._chooser._auto


def run(recorded: World, seed: int, stages: tuple[int, ...]) -> list[Outcome]:
    """The rule as `StepChooser` runs it where the host runs ahead of the device, for stages of so
    many steps one after the other."""
    dice = random.Random(seed)
    noise, rule = Disturbed(dice), Rule(recorded.options, recorded.table)
    count, sampled = recorded.requests, recorded.sampled
    shape = Shape((0, count) if sampled else (count, 0), 0, recorded.context, sampled)
    outcomes, now = [], 0.0
    for stage in stages:
        outcomes.append(out := Outcome())
        for _ in range(stage):
            decision = rule.next(shape)
            option = decision.option
            took = recorded.us[option] * noise.times(now)
            now += took
            rule.ran(decision, shape, took, functools.partial(recorded.walk, option, dice))
            out.tokens += recorded.tokens[option]
            out.us += recorded.us[option]
            name = recorded.options.names[option]
            out.used[name] = out.used.get(name, 0) + 1
    return outcomes
