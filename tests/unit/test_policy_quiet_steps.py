"""What the automatic rule does in a step for which nothing has changed: most of all steps. On a GPU
its time is time of the step, so it must not grow with the requests, nor exceed what a fixed policy
takes by more than a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median_low
from types import FrameType
from typing import Any

import pytest
from policy_world import NUMBERS, OPTIONS, automatic_policy, table_of, tree_of
from test_policy_chooser import FakeRanks, batch, req

from overstory.kernels.reference import Accepted, Tree, tree_accept
from overstory.workers import tree_policy
from overstory.workers.policy import chooser
from overstory.workers.policy.chooser import StepChooser
from overstory.workers.tree_policy import TreePolicy, parse_policy

STEP_NS = 1_000_000
LEARN, COUNTED = 2000, 300
OURS = {
    *map(str, Path(chooser.__file__).parent.glob("*.py")),
    str(tree_policy.__file__),
}


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    with automatic_policy():
        yield


class Calls:
    """Calls of the rule's own functions and those that they make, while it is entered."""

    def __init__(self) -> None:
        self.made = 0

    def __enter__(self) -> Calls:
        self.made = 0
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _what: Any) -> None:
        caller = frame.f_back if event == "call" else frame
        files = {frame.f_code.co_filename, caller.f_code.co_filename if caller else ""}
        self.made += event in ("call", "c_call") and not files.isdisjoint(OURS)


def drafts_of(requests: int) -> dict[TreePolicy, tuple[Tree, Accepted]]:
    """Of each policy that drafts, trees and walks of so many requests."""
    found = {}
    for option in NUMBERS[1:]:
        tree = tree_of(option, 0.9)
        fields = (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.sizes)
        many = Tree(*(field.expand(requests, *field.shape[1:]) for field in fields))
        accepted = tree_accept(many, (1 + many.depths * 8).clamp(max=56), 8)
        found[OPTIONS.policies[option]] = many, accepted
    return found


def quiet(rule: str, requests: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of a step under ``rule`` that is not looked at and whose walks are not counted, once
    the automatic one knows what such requests accept."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    now, calls, seen = [0], Calls(), []
    monkeypatch.setattr(chooser.time, "perf_counter_ns", lambda: now[0])
    drafts, reqs = drafts_of(requests), [req(1 << 30 if sampled else 1) for _ in range(requests)]
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    for number in range(LEARN + COUNTED):
        if number == LEARN:
            tree_policy.HOLDER.set_current(parse_policy(rule))
        now[0] += STEP_NS
        at_hand, held = batch(*reqs, context=600 + number % 50), one._held
        with calls if number >= LEARN else nullcontext():
            policy, _ = one.next(at_hand)
            drafted = policy in drafts
            outcome = one.outcome(at_hand, policy, *drafts[policy]) if drafted else None
            one.ended(at_hand)
        if outcome is not None:
            outcome.judge([True] * requests)
        elif number >= LEARN and (rule != "auto" or held is one._held is not None):
            seen.append(calls.made)
    assert len(seen) > COUNTED // 2, "most are"
    return median_low(seen)


@pytest.mark.parametrize("sampled", [False, True])
def test_quiet_steps_take_no_longer_than_a_fixed_policy_s(
    sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = quiet("tree-15", 1, sampled, monkeypatch)
    ours = [quiet("auto", requests, sampled, monkeypatch) for requests in (1, 8, 32)]
    assert len(set(ours)) == 1, f"as many requests, as many calls: {ours}"
    assert ours[0] <= fixed, (ours, fixed)
