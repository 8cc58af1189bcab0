"""The automatic rule where launches queue behind the device, on a host whose speed changes, with
what the rule's own work takes an H200's host.

With overlap the host launches a step once the one before the last is done, so steps that take the
device longer than the host show it only when it has fallen behind.
"""

from __future__ import annotations

import math
import random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from policy_world import automatic_policy
from recorded_world import CONTEXT, NUMBERS, SIZES, Recorded

from overstory.workers.policy import chooser
from overstory.workers.policy.chooser import OBSERVED, StepChooser
from overstory.workers.policy.options import PLAIN

HOST_US = {1: 440, 2: 570, 4: 600, 8: 670, 16: 830, 32: 1000, 64: 1350}
"""Of a step at the host's best speed, by requests: on an H200 where the device needs less."""

AFTER_RESULT = 0.45
"""Share of it that comes after the result of the step before: the next launch waits for that."""

BELIEFS_US, LOOK_US, SWITCH_US, COUNT_US = 1000, 250, 350, 40
"""Of the rule: beliefs and a look, a look, the first step of another graph, walks of a step."""

SPEEDS = (1.0, 1.0, 1.12, 1.3)
NEW = {1: 1024, 2: 2048}
"""Tokens of a request by how many there are, else 4096. Where there are several, one that ends is
missed for two steps, then a prefill takes `PREFILL_US`."""

PREFILL_US = 6000
ONE_RANK: Any = SimpleNamespace(decides=True, host_ints=lambda values: values)
SAMPLE = {(4, 0.0), (32, 1.0)}
CELLS = [
    pytest.param(n, t, 3 if (n, t) in SAMPLE else 8, marks=[] if (n, t) in SAMPLE else [full])
    for full in [pytest.mark.full]
    for t in (0.0, 1.0)
    for n in SIZES
]


class Queue:
    """Host and device; ``now`` is when the step at hand is launched, in microseconds."""

    def __init__(self, temperature: float, requests: int, seed: int) -> None:
        self.recorded, self.requests = Recorded(temperature, requests), requests
        self.dice = random.Random(1000 * seed + 7 * requests + int(temperature))
        table = self.recorded.table.costs(requests, CONTEXT, temperature > 0, 0)
        self.device_us = [
            us * random.Random(13 * o + seed).uniform(0.97, 1.06) for o, us in enumerate(table)
        ]
        self.now = self._until = self._done = self._before = 0.0
        self._speed = 1.0

    def step(self, option: int, own_us: float = 0.0) -> float:
        """Microseconds from its launch to the next; the rule's own work falls into them."""
        dice = self.dice
        while self.now >= self._until:
            self._speed = dice.choice(SPEEDS)
            self._until += 3e3 * 40 ** dice.random()
        host = HOST_US[self.requests] * self._speed * math.exp(dice.gauss(0, 0.1))
        if dice.random() < 0.03:
            host *= 1 + dice.random()
        work = self.device_us[option] * (1 + abs(dice.gauss(0, 0.01))) + 30
        self._before, self._done = self._done, max(self._done, self.now + 20) + work
        begun, after = self.now, self._before + AFTER_RESULT * HOST_US[self.requests] * self._speed
        self.now = max(begun + host + own_us, after)
        return self.now - begun

    def prefill(self) -> None:
        self.now = self._before = self._done = max(self.now, self._done) + PREFILL_US

    def ends(self, option: int) -> bool:
        """Whether one of several requests ends in a step."""
        several = self.requests > 1
        share = self.recorded.tokens[option] * self.requests / NEW.get(self.requests, 4096)
        return several and self.dice.random() < share


def fixed_rate(queue: Queue, option: int, steps: int) -> float:
    """Tokens per microsecond of one option all the time."""
    took = sum(queue.step(option) for _ in range(steps))
    return queue.recorded.tokens[option] * queue.requests * steps / took


class Engine:
    """A chooser of one rank in a `Queue`."""

    def __init__(self, queue: Queue, temperature: float) -> None:
        self._queue, self._kind = queue, int(temperature > 0)
        self._chooser = StepChooser(queue.recorded.options, ONE_RANK, host_waits=False)
        self._chooser.start(queue.recorded.table, 0.05)
        self._reqs = [self._req() for _ in range(queue.requests)]
        self._counted: tuple[int, Any, int] | None = None
        self._option, self._missed = PLAIN, 0

    def _req(self) -> Any:
        params = SimpleNamespace(custom_params=None, top_k=-1 if self._kind else 1)
        return SimpleNamespace(sampling_params=params)

    def rate(self, steps: int) -> float:
        """Tokens per microsecond of so many steps."""
        tokens = took = 0.0
        for _ in range(steps):
            self._come_and_go()
            own = self._choose() + self._count()
            took += self._queue.step(self._option, own)
            tokens += self._queue.recorded.tokens[self._option] * self._queue.requests
        return tokens / took

    def _come_and_go(self) -> None:
        if self._missed == 2:
            self._queue.prefill()
            self._chooser.interrupted()
            self._reqs = [*self._reqs, self._req()]
            self._missed = 0
        elif self._missed:
            self._missed += 1
        elif self._queue.ends(self._option):
            self._reqs, self._missed = self._reqs[1:], 1

    def _choose(self) -> float:
        """The next step's option; microseconds of the host."""
        one = self._chooser
        assert one._auto is not None
        version, held = one._auto.beliefs.version, one._held
        batch: Any = SimpleNamespace(reqs=self._reqs, seq_lens_sum=CONTEXT * len(self._reqs))
        policy, _ = one.next(batch)
        option = self._queue.recorded.options.policies.index(policy)
        own = SWITCH_US if option != self._option else 0
        self._option = option
        if one._auto.beliefs.version != version:
            return own + BELIEFS_US
        return own + (LOOK_US if one._held is not held else 0)

    def _count(self) -> float:
        """The walks of the step before, if they count; microseconds of the host."""
        one, own = self._chooser, 0.0
        assert one._auto is not None
        assert one._last is not None
        one._turn += 1
        if self._counted is not None:
            option, shape, count = self._counted
            one._note_work()
            own = COUNT_US
            steering = one._auto.steering
            assert steering is not None
            for _ in range(min(OBSERVED, count)):
                steering.observe(self._kind, self._queue.recorded.walk(option, self._queue.dice))
            if shape.batch == count:
                steering.observe_device(option, shape, round(self._queue.device_us[option]))
        counts = self._option != PLAIN and one._to_be_counted(one._auto)
        self._counted = (self._option, one._last.shape, len(self._reqs)) if counts else None
        return own


@pytest.mark.parametrize(("requests", "temperature", "machines"), CELLS)
def test_auto_is_near_the_best_where_launches_queue(
    requests: int, temperature: float, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own work included; from 5,000 steps on. Over all cells and 8 machines each 0.990 in the
    mean, with visits of five steps 0.983: the first of a larger tree take the host's pace."""
    shares = []
    for seed in range(machines):
        best = max(
            fixed_rate(Queue(temperature, requests, seed), option, 6000) for option in NUMBERS
        )
        queue = Queue(temperature, requests, seed)
        clock = SimpleNamespace(perf_counter_ns=lambda queue=queue: int(1000 * queue.now))
        monkeypatch.setattr(chooser, "time", clock)
        with automatic_policy():
            engine = Engine(queue, temperature)
            engine.rate(5000)
            shares.append(engine.rate(16_000) / best)
    assert fmean(shares) >= 0.975, shares
    assert min(shares) >= 0.94, shares
