"""The device's clock in captured steps, from their results to what the rule knows."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from policy_world import OPTIONS, automatic_policy, table_of
from test_policy_chooser import FakeRanks, batch, req, what_comes

from overstory.workers.policy import chooser
from overstory.workers.policy.choice import PROBE_RUN
from overstory.workers.policy.chooser import StepChooser, Told, Walks
from overstory.workers.policy.clocks import WORK_LEAST
from overstory.workers.policy.options import CHAIN


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    with automatic_policy():
        yield


def one_of(host_waits: bool = False, ranks: FakeRanks | None = None, rank: int = 0) -> StepChooser:
    one = StepChooser(OPTIONS, (ranks or FakeRanks()).of(rank), host_waits)
    one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    return one


def chains(requests: int, times: Sequence[int] | None) -> Told:
    """A captured step of chains, all of them accepted to the end."""
    parts = ([-1, *range(7)], [-1] + [0] * 7, 8, list(range(8)))
    walks = Walks.viewed(*(torch.tensor([part] * requests) for part in parts))
    return Told(walks, None if times is None else np.array(times))


def step(one: StepChooser, at_hand: Any, told: Told) -> bool:
    """One decode step, whose outcome is read at once; whether it was counted."""
    policy, _ = one.next(at_hand)
    outcome = one.outcome(at_hand, policy, *[None] * 2, told)  # type: ignore[arg-type]
    if outcome is not None:
        outcome.judge([True] * len(at_hand.reqs))
    return outcome is not None


def device_times(one: StepChooser, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What ``one`` is told of the device from now on: option, requests, microseconds."""
    assert one._auto is not None
    assert one._auto.steering is not None
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        one._auto.steering,
        "observe_device",
        lambda option, shape, took_us: seen.append((option, shape.batch, took_us)),
    )
    return seen


@pytest.mark.parametrize(
    ("times", "took"),
    [
        ((5_000, 455_999), [450]),
        ((7, 1_007), [1]),
        ((0, 0), []),
        ((9_000, 9_000), []),
        ((9_000, 3_000), []),
        (None, []),
    ],
)
def test_a_clock_that_says_nonsense_is_not_heard(
    times: tuple[int, int] | None, took: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walks are counted all the same, and nothing is launched for them."""
    one, at_hand = one_of(), batch(req(), req())
    seen = device_times(one, monkeypatch)
    assert step(one, at_hand, chains(2, times))
    option = OPTIONS.policies.index(one._last.policy) if one._last is not None else None
    assert seen == [(option, 2, us) for us in took]
    report = one.report()
    assert report is not None
    assert report["greedy"]["seen"] == 2
    assert one._run is not None
    assert one._run.marks.count(chooser.WORKED) == 2, "the look and the count; no copy"


def test_the_clock_is_heard_where_the_step_is_the_one_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not where a request has left since the look: its place in the table is of more requests."""
    one, reqs = one_of(), [req() for _ in range(8)]
    seen = device_times(one, monkeypatch)
    assert step(one, batch(*reqs), chains(8, (0, 450_000)))
    assert step(one, batch(*reqs[1:]), chains(7, (0, 440_000)))
    assert [row[1:] for row in seen] == [(8, 450)]
    waits = one_of(host_waits=True)
    seen = device_times(waits, monkeypatch)
    assert step(waits, batch(*reqs), chains(8, (0, 450_000)))
    assert not seen, "its steps are timed one by one"


@pytest.mark.parametrize("lasts", [PROBE_RUN, 4 * PROBE_RUN])
def test_a_visit_reads_the_clock_twice(lasts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So often that it is known by one visit; and in its first and last step, which are not timed
    by the host or whose outcome comes after it."""
    one, at_hand = one_of(), batch(req())
    monkeypatch.setattr(one, "_settled", True)
    tried = chooser.Decision(CHAIN, "probe")
    counted = []
    for since in range(lasts):
        assert one._auto is not None
        one.next(at_hand)
        assert one._last is not None
        one._auto.beliefs = replace(one._auto.beliefs, probe_steps=lasts)
        one._last, one._auto.since = one._last._replace(decision=tried), since
        counted.append(one._to_be_counted(one._auto))
    assert counted == [True, *[False] * (lasts - 2), True]
    assert sum(counted) >= WORK_LEAST


@pytest.mark.parametrize("seed", [3, 7])
def test_two_ranks_choose_alike_whatever_the_devices_clock_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that come and go: in some places the clock is read before any step is timed."""
    ranks, dice, now = FakeRanks(), random.Random(seed), [1]
    pair = [one_of(ranks=ranks, rank=rank) for rank in (0, 1)]
    monkeypatch.setattr(chooser.time, "perf_counter_ns", lambda: now[0])
    choices = set()
    for at_hand in what_comes(pair, dice, 2000, 30):
        policy, told = pair[0].next(at_hand)
        assert pair[1].next(at_hand) == (policy, told)
        choices.add(told.split()[0])
        now[0] += 1000 * dice.randrange(700, 1400)
        times = dice.choice([(0, 0), (5, 4), *[(9, 1000 * dice.randrange(500, 900))] * 8])
        given = chains(len(at_hand.reqs), times)
        one, other = (
            rank.outcome(at_hand, policy, *[None] * 2, given)  # type: ignore[arg-type]
            for rank in pair
        )
        assert other is None
        if one is not None:
            one.judge([True] * len(at_hand.reqs))
    assert len(choices) > 2
    assert pair[0]._auto is not None
    assert pair[0]._auto.steering is not None
    known = [clocks.work_us([1] * 9) for clocks in pair[0]._auto.steering._periods._clocks]
    assert sum(map(bool, known)) > 1, "in several places"
