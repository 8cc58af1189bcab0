"""`auto` against the fixed policies that are best at a shape, window by window of one closed loop.

So many requests run all the time (`engine_loop.py`), and policies take turns in windows of the same
number of tokens. A machine that is disturbed in stretches of tenths of a second takes the same from
all windows of one round, which lasts about as long: the median over rounds of their ratios tells
hundredths where rates themselves are off by a third. Neither end of a window stops anything.
`engine_runs.py` uses it (role `pairs`), `engine_compare.py` prints it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from engine_loop import ClosedLoop, Window

FIXED = "plain chain tree-7 tree-15 tree-31 tree-63"
SHAPES = "1:0 1:1 8:0 8:1 32:0 32:1"
MOST_REQUESTS = 64
BLOCK, MOST_NODES = 8, 63
"""Of the built-in drafter, and of the engine's trees."""

TIMED_KEPT = 2000
"""Most timed steps of a shape that are kept."""

OWN_KEPT = 5000
"""Most steps of a shape whose own work is kept, under `auto` and under fixed policies: without
those of learning, where there are as many later ones."""

RULES = ("auto", "fixed")
SWITCH_STEPS = 6
"""Steps after a change of what runs that are told of: one more than a visit has."""

RIVALS = 2
CHOOSING_ROUNDS = 5
ROUNDS = 150
WINDOW_S = 0.12
LEARN_SECONDS = 3.0
"""How long `auto` runs at each shape before it is compared: a server has run for hours, and the
first visits of other options cost 2 to 3% of the first thousand steps."""

NEW, NEW_SAMPLED = 1024, 640
"""Tokens of a request alone: prefills are few, and windows, which are as long at least, no longer
than they have to be (it says about half as many tokens in a step where it samples)."""

NEW_OF_MANY = 4096
"""Most tokens of one of several, which has as many more as there are requests: with 1,024 prefills
took half of the time of eight; with 4,096 a window of two sampled ones took 0.8 s, and their texts
parted early in it. The built-in pair has twice as many positions."""

LEARN_MESSAGES = 100
"""Of a window while it learns."""

LONGEST = 3
"""A window ends after so many times the messages of `auto`'s: plain takes a step for each token."""


class Shape(NamedTuple):
    """Requests that run all the time, and their temperature."""

    requests: int
    temperature: float

    @property
    def new(self) -> int:
        """Tokens of a request."""
        alone = NEW_SAMPLED if self.temperature else NEW
        return min(alone * self.requests, NEW_OF_MANY)


def shapes_of(text: str) -> list[Shape]:
    """Shapes as ENGINE_SESSION_SHAPES names them.

    Raises:
        ValueError: not like ``SHAPES``.
    """
    found = []
    for part in text.split():
        requests, _, temperature = part.partition(":")
        try:
            shape = Shape(int(requests), float(temperature))
        except ValueError:
            shape = Shape(0, 0.0)
        if not 1 <= shape.requests <= MOST_REQUESTS or not 0 <= shape.temperature <= 2:
            raise ValueError(
                f"ENGINE_SESSION_SHAPES={text!r}: {part!r} is not REQUESTS:TEMPERATURE with 1 to "
                f"{MOST_REQUESTS} requests and a temperature of 0 to 2; write it like {SHAPES!r}"
            )
        found.append(shape)
    if not found:
        raise ValueError(f"ENGINE_SESSION_SHAPES={text!r} names no shape; write it like {SHAPES!r}")
    return list(dict.fromkeys(found))


def rivals_of(text: str) -> list[str]:
    """Fixed policies as ENGINE_SESSION_RIVALS names them.

    Raises:
        ValueError: fewer than two, or not fixed ones.
    """
    from overstory.workers.tree_policy import TreePolicy

    names = list(dict.fromkeys(text.split()))
    try:
        for name in names:
            if (nodes := TreePolicy.parse(name).drafted_nodes(BLOCK)) > MOST_NODES:
                raise ValueError(f"{name} drafts {nodes} nodes, the engine at most {MOST_NODES}")
    except ValueError as error:
        raise ValueError(f"ENGINE_SESSION_RIVALS={text!r}: {error}") from error
    if len(names) < RIVALS:
        raise ValueError(
            f"ENGINE_SESSION_RIVALS={text!r} names {len(names)} fixed policies, but `auto` is "
            f"compared to the best {RIVALS}: write it like {FIXED!r}"
        )
    return names


def asked_shapes() -> list[Shape]:
    """`shapes_of` the environment."""
    return shapes_of(os.environ.get("ENGINE_SESSION_SHAPES") or SHAPES)


def asked_rivals() -> list[str]:
    """`rivals_of` the environment."""
    return rivals_of(os.environ.get("ENGINE_SESSION_RIVALS") or FIXED)


class Loop(Protocol):
    """What is needed of a `ClosedLoop`."""

    turn: int

    def window(self, policy: str, tokens: float = ..., most: int = ...) -> Window: ...


def measure(
    opened: Callable[[Shape], AbstractContextManager[Loop]],
    until: float,
    put: Callable[[list[dict[str, Any]]], None],
    fixed: Sequence[str],
    shapes: Sequence[Shape],
    clock: Callable[[], float] = time.time,
    about: Callable[[], dict[str, Any]] = dict,
) -> list[dict[str, Any]]:
    """Runs all shapes, each for its share of the time until ``until`` (of ``clock``).

    Returns:
        of each shape `_row`, and what ``about`` tells when the shape is over. Handed to ``put``
        after each shape too.
    """
    found: list[dict[str, Any]] = []
    for number, shape in enumerate(shapes):
        share = clock() + (until - clock()) / (len(shapes) - number)
        with opened(shape) as loop:
            turns = _Turns(loop, _learnt(loop, shape, min(share, clock() + LEARN_SECONDS), clock))
            tried = {
                policy: statistics.median(window.rate for window in windows)
                for policy, windows in turns.take(fixed, CHOOSING_ROUNDS, share, clock).items()
            }
            best = sorted(tried, key=tried.__getitem__, reverse=True)[:RIVALS]
            windows = turns.take(("auto", *best), ROUNDS, share, clock)
        found.append(_row(shape, tried, windows, turns) | about())
        put(found)
    return found


class _Size(NamedTuple):
    """Of all windows of a shape: its tokens, a multiple of a request's, and its most messages."""

    tokens: int
    most: int


def _learnt(loop: Loop, shape: Shape, until: float, clock: Callable[[], float]) -> _Size:
    """Has `auto` run until it has learnt, and gives the size that windows have at its pace.

    Each window has other texts: of one request that said the same again and again, `auto` learnt
    what trees give on that text alone, and went by it for 20,000 steps.
    """
    windows = [loop.window("auto", most=LEARN_MESSAGES)]
    while clock() < until:
        loop.turn += 1
        windows.append(loop.window("auto", most=LEARN_MESSAGES))
    late = windows[len(windows) // 2 :]
    texts = max(1, round(WINDOW_S * statistics.median(w.rate for w in late) / shape.new))
    each = statistics.median(window.tokens / LEARN_MESSAGES for window in late)
    return _Size(texts * shape.new, math.ceil(LONGEST * texts * shape.new / each))


class _Turns:
    """Windows of several policies in turn.

    Attributes:
        order: who was when in each round of the newest `take`.
    """

    def __init__(self, loop: Loop, size: _Size) -> None:
        self._loop, self.size = loop, size
        self.order: list[tuple[str, ...]] = []

    def take(
        self, policies: Sequence[str], rounds: int, until: float, clock: Callable[[], float]
    ) -> dict[str, list[Window]]:
        """A window of each policy a round; who begins goes round, every other round goes back."""
        windows: dict[str, list[Window]] = {policy: [] for policy in policies}
        self.order = []
        for number in range(rounds):
            if number and clock() >= until:
                break
            turn = number // 2 % len(policies)
            order = (*policies[turn:], *policies[:turn])
            self.order.append(order if number % 2 else order[::-1])
            self._loop.turn = number
            for policy in self.order[-1]:
                windows[policy].append(self._loop.window(policy, *self.size))
        return windows


def _row(
    shape: Shape, tried: Mapping[str, float], windows: Mapping[str, list[Window]], turns: _Turns
) -> dict[str, Any]:
    """What was measured at a shape.

    Returns:
        ``requests``, ``T``; ``window``: tokens of a window and of a request; ``fixed``: tokens/s by
        which rivals were chosen; ``rounds``: tokens/s by policy; ``steps_alone``: the same without
        what prefills take; ``evened``: with as many prefills for all, one for the tokens of a
        request, each of `_prefill_s`; ``step_ms``, ``median_ms``: of a step, mean and median;
        ``step_tokens``: its tokens; ``order``: who was when; ``begun``: by the process's clock;
        means by policy: ``ms_per_step`` (median), ``prefills`` and ``steps`` of a window,
        ``prefill_share`` of its time, ``running`` requests of a step; ``ran``: steps of `auto` by
        what they ran, all together and ``ran_each`` round, which tells in which it tried others.
    """
    prefill_s = _prefill_s([window for some in windows.values() for window in some])
    ran_each = [dict(window.ran) for window in windows["auto"]]
    ran: Counter[str] = sum(map(Counter, ran_each), Counter())

    def rounds(value: Callable[[Window], float]) -> list[dict[str, float]]:
        every = zip(*windows.values(), strict=True)
        return [dict(zip(windows, map(value, some), strict=True)) for some in every]

    def means(value: Callable[[Window], float]) -> dict[str, float]:
        return {name: statistics.fmean(map(value, some)) for name, some in windows.items()}

    return {
        "requests": shape.requests,
        "T": shape.temperature,
        "window": {"tokens": turns.size.tokens, "new": shape.new},
        "fixed": dict(tried),
        "rounds": rounds(lambda window: window.rate),
        "steps_alone": rounds(lambda window: window.step_rate),
        "evened": rounds(lambda window: 1 / (1 / window.step_rate + prefill_s / shape.new)),
        "step_ms": rounds(lambda window: window.ms_per_step),
        "median_ms": rounds(lambda window: window.median_ms),
        "step_tokens": rounds(lambda window: window.step_tokens),
        "begun": rounds(lambda window: window.begun),
        "order": turns.order,
        "ms_per_step": {
            name: statistics.median(window.ms_per_step for window in some)
            for name, some in windows.items()
        },
        "steps": means(lambda window: window.steps),
        "prefills": means(lambda window: window.prefills),
        "prefill_share": means(lambda window: window.prefill_share),
        "running": means(lambda window: window.requests),
        "ran": dict(ran),
        "ran_each": ran_each,
    }


def _prefill_s(windows: Sequence[Window]) -> float:
    """Seconds that a prefill adds, whatever the policy. How many fall into a window of two requests
    is luck: in one run 2.4 into those of `auto` and 1.8 into its rivals', a fifth of the time."""
    each = [window.prefill_s / window.prefills for window in windows if window.prefills]
    return max(0.0, statistics.median(each)) if each else 0.0


def opened_in(
    engine: Any, prompts: Sequence[list[int]]
) -> Callable[[Shape], AbstractContextManager[Loop]]:
    """Closed loops of an engine. Text number n has prompt and seed of its own; its seed counts
    where it samples."""

    def opened(shape: Shape) -> ClosedLoop:
        from engine_loop import ClosedLoop

        def text(number: int) -> tuple[list[int], dict[str, Any]]:
            params: dict[str, Any] = {"temperature": shape.temperature}
            if shape.temperature:
                params["sampling_seed"] = 10 + number
            return prompts[number % len(prompts)], params

        return ClosedLoop(engine, shape.requests, text, shape.new)

    return opened


class Switches:
    """What a change of what runs takes: of the first steps after one, the time from launch to
    launch. Under ``fixed`` policies the automatic rule has no part in it.
    """

    def __init__(self) -> None:
        self._policy: Any = None
        self._launches: list[int] = []  # since the newest change
        self._each: dict[str, list[list[int]]] = {name: [] for name in RULES}

    def launched(self, rule: str, policy: Any, now: int) -> None:
        """A step of ``policy`` begins at ``now`` (ns)."""
        if len(self._launches) <= SWITCH_STEPS:
            self._launches.append(now)
        if policy is not self._policy and policy != self._policy:
            self._policy, self._launches = policy, [now]
            self._each[rule].append(self._launches)

    def about(self, rule: str) -> dict[str, Any]:
        """Since it was asked last, ``changes``: how many; ``visit_us``: medians of the first step,
        of the second ... where there were five of them, as in a visit; ``change_us``: where there
        were more."""
        each, self._each[rule] = self._each[rule], []
        took = [[later - at for at, later in pairwise(launches)] for launches in each]

        def medians(steps: int) -> list[float]:
            columns = zip(*(some for some in took if len(some) == steps), strict=True)
            return [statistics.median(column) / 1e3 for column in columns]

        visits, changes = medians(SWITCH_STEPS - 1), medians(SWITCH_STEPS)
        return {"changes": len(each), "visit_us": visits, "change_us": changes}


class OwnWork:
    """Wall time of the loop's thread in a chooser, of each step: the choice, the copy of the walks
    that are to be counted, and their counting, which falls into a later step.

    `about`: by ``auto`` and ``fixed`` (the rule in force at the step) microseconds of a step, mean
    and median, and of how many steps, the newest `OWN_KEPT` at most; and `Switches`.
    """

    def __init__(self, chooser: Any) -> None:
        from overstory.workers import tree_policy

        self._ns: dict[str, deque[int]] = {name: deque([0], maxlen=OWN_KEPT) for name in RULES}
        self._switches = Switches()
        self._at_hand = self._ns["fixed"]
        given_next, given_outcome = chooser.next, chooser.outcome

        def next_policy(batch: Any) -> Any:
            begun = time.perf_counter_ns()
            given = given_next(batch)
            spent = time.perf_counter_ns() - begun
            rule = RULES[isinstance(tree_policy.current(), tree_policy.TreePolicy)]
            self._at_hand = self._ns[rule]
            self._at_hand.append(spent)
            self._switches.launched(rule, given[0], begun)
            return given

        def outcome(*given: Any) -> Any:
            begun = time.perf_counter_ns()
            found = given_outcome(*given)
            self._at_hand[-1] += time.perf_counter_ns() - begun
            if found is not None:
                found.judge = self._judged(found.judge)
            return found

        chooser.next, chooser.outcome = next_policy, outcome

    def _judged(self, given: Callable[[list[bool]], None]) -> Callable[[list[bool]], None]:
        def judge(running: list[bool]) -> None:
            begun = time.perf_counter_ns()
            given(running)
            self._at_hand[-1] += time.perf_counter_ns() - begun

        return judge

    def about(self) -> dict[str, dict[str, Any]]:
        """See above; of the steps since it was asked last."""
        told: dict[str, dict[str, Any]] = {}
        for name, every in self._ns.items():
            us = [ns / 1e3 for ns in every if ns]
            every.clear()
            every.append(0)  # a walk may be counted before the next step is launched
            if us:
                mean, middle = statistics.fmean(us), statistics.median(us)
                own = {"mean_us": mean, "median_us": middle, "steps": len(us)}
                told[name] = own | self._switches.about(name)
        return told


class Spent:
    """Wall time of calls under the automatic rule, as `wrapped`."""

    def __init__(self) -> None:
        self._ns: dict[str, list[int]] = {}

    def wrapped(self, name: str, given: Callable[..., Any]) -> Callable[..., Any]:
        """``given``, timed."""
        from overstory.workers import tree_policy

        def call(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            found = given(*args)
            if not isinstance(tree_policy.current(), tree_policy.TreePolicy):
                self._ns.setdefault(name, []).append(time.perf_counter_ns() - begun)
            return found

        return call

    def about(self) -> dict[str, dict[str, float]]:
        """By name, since it was asked last: how many calls, and their mean microseconds."""
        every, self._ns = self._ns, {}
        return {
            name: {"calls": len(ns), "mean_us": statistics.fmean(ns) / 1e3}
            for name, ns in every.items()
        }


class Watch:
    """What tells a wrong choice from the rule's cost and from noise: `about` of `measure`.

    `own`: `OwnWork`. `spent`: `Spent` in looks and, as their part, in new beliefs. `rule`: what the
    rule believes at the end of the shape. `timed`: of the steps that it timed meanwhile (option,
    requests, microseconds, when by the clock of ``begun``), in their order. `machine`: CPU seconds,
    as `machine_noise` has them.
    """

    def __init__(self, engine: Any) -> None:
        self._chooser = engine.scheduler.draft_worker.chooser
        self._own, self._spent = OwnWork(self._chooser), Spent()
        steering = self._chooser._auto.steering
        self._chooser._looked_at = self._spent.wrapped("looks", self._chooser._looked_at)
        steering.next_beliefs = self._spent.wrapped("beliefs", steering.next_beliefs)
        self._timed: list[tuple[int, int, int, float]] = []
        given = steering.observe_periods

        def observe(option: int, shape: Any, took_us: Sequence[int]) -> None:
            now = time.perf_counter()
            self._timed += [(option, shape.batch, us, now) for us in took_us]
            given(option, shape, took_us)

        steering.observe_periods = observe
        self._machine = self._now()

    def about(self) -> dict[str, Any]:
        before, self._machine = self._machine, self._now()
        timed, self._timed[:] = [*self._timed], []
        names = ("wall_s", "own_cpu_s", "other_cpu_s", "steal_s")
        spent = (b - a for a, b in zip(before, self._machine, strict=True))
        report = self._chooser.report()
        return {
            "own": self._own.about(),
            "spent": self._spent.about(),
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


def against(row: Mapping[str, Any], kind: str = "rounds") -> dict[str, Compared]:
    """`auto` against each rival of a shape, of `measure`; or of its steps alone."""
    rounds = row[kind]
    rivals = [name for name in rounds[0] if name != "auto"] if len(rounds) > 1 else []
    return {name: compared([one["auto"] / one[name] for one in rounds]) for name in rivals}
