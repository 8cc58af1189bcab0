"""`auto` against the fixed policies that are best at a shape, text by text in turn.

A machine that is disturbed in stretches of tenths of a second takes the same from all texts of one
round, which lasts about as long: the median over rounds of their ratios tells hundredths where
rates themselves are off by a third. `engine_runs.py` uses it (role `pairs`), `engine_compare.py`
prints it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

FIXED = tuple(os.environ.get("ENGINE_SESSION_RIVALS", "chain tree-15 tree-31 tree-63").split())
"""From these the best two of each shape are taken."""

TIMED_KEPT = 2000
"""Most timed steps of a shape that are kept."""

RIVALS = 2
CHOOSING_ROUNDS = 5
ROUNDS = 60
LEARN_SECONDS = 3.0
"""How long `auto` runs at each shape before it is compared: a server has run for hours, and the
first visits of other options cost 2 to 3% of the first thousand steps."""


class Shape(NamedTuple):
    """``new``: tokens of each request, so many that a text takes about a tenth of a second."""

    requests: int
    temperature: float
    new: int


SHAPES = (
    Shape(1, 0.0, 640),
    Shape(1, 1.0, 256),
    Shape(8, 0.0, 256),
    Shape(8, 1.0, 128),
    Shape(32, 0.0, 128),
    Shape(32, 1.0, 64),
)


class Text(NamedTuple):
    """What a text took: tokens/s, milliseconds of a step, steps by what they ran."""

    rate: float
    ms_per_step: float
    ran: Mapping[str, int]


Speed = Callable[[str, Shape, int], Text]
"""A text of a policy at a shape; the number chooses the seeds, so that one round's are alike."""


def measure(
    speed: Speed,
    until: float,
    put: Callable[[list[dict[str, Any]]], None],
    fixed: Sequence[str] = FIXED,
    shapes: Sequence[Shape] = SHAPES,
    clock: Callable[[], float] = time.time,
    about: Callable[[], dict[str, Any]] = dict,
) -> list[dict[str, Any]]:
    """Runs all shapes, each for its share of the time until ``until`` (of ``clock``).

    Returns:
        of each shape ``requests``, ``T``, ``fixed`` (tokens/s by which rivals were chosen),
        ``rounds`` (tokens/s by policy), ``ms_per_step`` by policy (median) and ``ran``, the steps
        of `auto` in the rounds by what they ran, and what ``about`` tells when the shape is
        over. Handed to ``put`` after each shape too.
    """
    found: list[dict[str, Any]] = []
    for number, shape in enumerate(shapes):
        share = clock() + (until - clock()) / (len(shapes) - number)
        learnt = clock() + LEARN_SECONDS
        speed("auto", shape, 0)
        while clock() < min(learnt, share):
            speed("auto", shape, 0)
        tried = {
            policy: statistics.median(text.rate for text in texts)
            for policy, texts in _in_turn(speed, shape, fixed, CHOOSING_ROUNDS, share, clock)
        }
        best = sorted(tried, key=tried.__getitem__, reverse=True)[:RIVALS]
        texts = dict(_in_turn(speed, shape, ("auto", *best), ROUNDS, share, clock))
        ran: Counter[str] = Counter()
        for text in texts["auto"]:
            ran.update(text.ran)
        found.append(
            {
                "requests": shape.requests,
                "T": shape.temperature,
                "fixed": tried,
                "rounds": [
                    {policy: text.rate for policy, text in zip(texts, some, strict=True)}
                    for some in zip(*texts.values(), strict=True)
                ],
                "ms_per_step": {
                    policy: statistics.median(text.ms_per_step for text in some)
                    for policy, some in texts.items()
                },
                "ran": dict(ran),
                **about(),
            }
        )
        put(found)
    return found


def _in_turn(
    speed: Speed,
    shape: Shape,
    policies: Sequence[str],
    rounds: int,
    until: float,
    clock: Callable[[], float],
) -> list[tuple[str, list[Text]]]:
    """Texts of each policy, one a round; who begins goes round, and every other round goes back."""
    texts: dict[str, list[Text]] = {policy: [] for policy in policies}
    for number in range(rounds):
        if number and clock() >= until:
            break
        turn = number // 2 % len(policies)
        order = (*policies[turn:], *policies[:turn])
        for policy in order if number % 2 else order[::-1]:
            texts[policy].append(speed(policy, shape, number))
    return list(texts.items())


def speed_of(
    engine: Any,
    prompts: Callable[[int], list[list[int]]],
    under: Callable[[str | None], AbstractContextManager[None]],
) -> Speed:
    """`Speed` of a real engine."""
    from engine_cuda import timed

    from overstory.workers.step_stats import STATS

    def forwards() -> Counter[str]:
        return Counter(
            {name: counts["forwards"] for name, counts in STATS.snapshot()["verify"].items()}
        )

    def speed(policy: str, shape: Shape, number: int) -> Text:
        params: dict[str, Any] = {
            "temperature": shape.temperature,
            "max_new_tokens": shape.new,
            "ignore_eos": True,
        }
        if shape.temperature:
            params["sampling_seed"] = 10 + number
        before = forwards()
        with under(policy):
            rate = timed(engine, prompts(shape.requests), params).as_dict()
        return Text(rate["tokens_per_s"], rate["ms_per_forward"], forwards() - before)

    return speed


class Watch:
    """What tells a wrong choice from the rule's cost and from noise: `about` of `measure`.

    `rule`: what the rule believes at the end of the shape. `timed`: of the steps that it timed
    meanwhile (option, requests, microseconds). `machine`: CPU seconds, as `machine_noise` has them.
    """

    def __init__(self, engine: Any) -> None:
        self._chooser = engine.scheduler.draft_worker.chooser
        steering = self._chooser._auto.steering
        self._timed: list[tuple[int, int, int]] = []
        given = steering.observe_period

        def observe(option: int, shape: Any, expected_us: int, took_us: int) -> None:
            self._timed.append((option, shape.batch, took_us))
            given(option, shape, expected_us, took_us)

        steering.observe_period = observe
        self._machine = self._now()

    def about(self) -> dict[str, Any]:
        before, self._machine = self._machine, self._now()
        timed, self._timed[:] = [*self._timed], []
        names = ("wall_s", "own_cpu_s", "other_cpu_s", "steal_s")
        spent = (b - a for a, b in zip(before, self._machine, strict=True))
        report = self._chooser.report()
        return {
            "rule": {"probes": report["probes"], **(report["believed"] or {})},
            "timed": timed[-TIMED_KEPT:],
            "machine": dict(zip(names, spent, strict=True)),
        }

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        from machine_noise import machine_seconds

        own, (busy, steal) = time.process_time(), machine_seconds()
        return time.perf_counter(), own, busy - own, steal


class Compared(NamedTuple):
    """Ratios of pairs: their median, its 95% interval, quartiles, and how many there are."""

    median: float
    interval: tuple[float, float]
    quartiles: tuple[float, float]
    count: int

    def __str__(self) -> str:
        return (
            f"{self.median:.3f} (95% {self.interval[0]:.3f} to {self.interval[1]:.3f}; quartiles "
            f"{self.quartiles[0]:.3f}, {self.quartiles[1]:.3f}; {self.count} pairs)"
        )


def compared(ratios: Sequence[float]) -> Compared:
    """Summary of at least two ratios; the interval is by their order alone."""
    ordered, n = sorted(ratios), len(ratios)
    low, _, high = statistics.quantiles(ordered, n=4)
    # Ranks that the median lies between with 95%: a binomial of n and one half.
    apart = math.ceil(1.96 * math.sqrt(n) / 2)
    first, last = max(0, n // 2 - apart), min(n - 1, (n - 1) // 2 + apart)
    return Compared(statistics.median(ordered), (ordered[first], ordered[last]), (low, high), n)


def against(row: Mapping[str, Any]) -> dict[str, Compared]:
    """`auto` against each rival of a shape, of `measure`."""
    rounds = row["rounds"]
    rivals = [name for name in rounds[0] if name != "auto"] if len(rounds) > 1 else []
    return {name: compared([one["auto"] / one[name] for one in rounds]) for name in rivals}
