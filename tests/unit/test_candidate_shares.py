"""Acceptance by depth and candidate rank under fixed policies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overstory.kernels.reference import Accepted, Tree
from overstory.workers.ddtree import candidate_shares
from overstory.workers.ddtree.candidate_shares import CandidateShares, shares_of
from overstory.workers.policy import OPT_OUT
from overstory.workers.policy.chooser import OBSERVED, OBSERVED_EVERY_NS
from overstory.workers.policy.options import Options
from overstory.workers.tree_policy import parse_policy

OPTIONS = Options.of(4, 15)
TREE = parse_policy("tree-4")
PARENTS, RANKS, DEPTHS = [-1, 0, 0, 1, 2], [-1, 0, 1, 0, 0], [0, 1, 1, 2, 2]
"""Two candidates of depth 1 and the first one below each."""


def _batch(*asked: dict[str, Any]) -> Any:
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(
                sampling_params=SimpleNamespace(custom_params=one.get("custom"), top_k=one["top_k"])
            )
            for one in asked
        ]
    )


GREEDY, SAMPLED = {"top_k": 1}, {"top_k": -1}


def _step(paths: list[list[int]]) -> tuple[Tree, Accepted]:
    """Trees of all requests, and ``paths``: accepted rows behind the root."""
    bs = len(paths)

    def rows(values: list[int]) -> torch.Tensor:
        return torch.tensor([values] * bs)

    tree = Tree(rows([7] * 5), rows(PARENTS), rows(DEPTHS), rows(RANKS), torch.full((bs,), 5))
    walked = torch.tensor([[0, *path, *[-1] * (3 - len(path))] for path in paths])
    lengths = torch.tensor([len(path) for path in paths])
    return tree, Accepted(walked, walked, lengths, lengths)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    now = SimpleNamespace(ns=10**12)
    monkeypatch.setattr(candidate_shares.time, "perf_counter_ns", lambda: now.ns)
    return now


def _run(
    shares: CandidateShares, clock: Any, batch: Any, paths: list[list[int]], policy: Any = TREE
) -> bool:
    """One step; whether it was counted."""
    clock.ns += OBSERVED_EVERY_NS
    shares.begin(policy, fixed=True)
    outcome = shares.outcome(batch, policy, *_step(paths))
    if outcome is not None:
        outcome.judge([True] * len(paths))
    return outcome is not None


def test_shares_are_by_kind_parent_depth_and_candidate(clock: Any) -> None:
    shares = CandidateShares(OPTIONS, counts=True)
    batch = _batch(GREEDY, SAMPLED)
    assert _run(shares, clock, batch, [[1, 3], [2]])
    assert _run(shares, clock, batch, [[2, 4], []])
    found = shares.report()
    assert found is not None
    assert found["greedy"]["spine"][1] == {
        0: pytest.approx(0.5, abs=2e-3),
        1: found["greedy"]["spine"][1][1],
    }
    assert found["greedy"]["spine"][1][1] == pytest.approx(0.5, abs=2e-3)
    assert found["greedy"]["spine"][2] == {0: 1.0}
    assert found["greedy"]["off_spine"][2] == {0: 1.0}
    assert found["sampled"]["spine"][1][0] == 0.0
    assert found["sampled"]["off_spine"][2] == {0: 0.0}


def test_few_steps_are_looked_at(clock: Any) -> None:
    shares = CandidateShares(OPTIONS, counts=True)
    batch = _batch(GREEDY)
    counted = 0
    for _ in range(100):
        clock.ns += OBSERVED_EVERY_NS // 10
        shares.begin(TREE, fixed=True)
        counted += shares.outcome(batch, TREE, *_step([[1]])) is not None
    assert counted == 10


def test_of_a_large_batch_some_requests_are_counted_and_all_in_turn(clock: Any) -> None:
    shares = CandidateShares(OPTIONS, counts=True)
    batch = _batch(*[GREEDY] * 6)
    for at in range(3):
        paths: list[list[int]] = [[] for _ in range(6)]
        _run(shares, clock, batch, paths)
        evidence = shares._kinds[0]
        assert evidence.seen() == (at + 1) * OBSERVED
    seen: set[int] = set()
    for step in range(3):
        for b in range(6):
            one = CandidateShares(OPTIONS, counts=True)
            one._turn = step
            _run(one, clock, batch, [[1] if b == other else [] for other in range(6)])
            report = one.report()
            assert report is not None
            if report["greedy"]["spine"][1][0] > 0:
                seen.add(b)
    assert seen == set(range(6))


@pytest.mark.parametrize(
    ("policy", "fixed", "counts"),
    [("plain", True, True), ("tree-4", False, True), ("tree-4", True, False)],
)
def test_plain_steps_the_rule_s_own_and_those_of_other_ranks_are_not_counted(
    clock: Any, policy: str, fixed: bool, counts: bool
) -> None:
    shares = CandidateShares(OPTIONS, counts)
    chosen: Any = parse_policy(policy)
    shares.begin(chosen, fixed)
    assert shares.outcome(_batch(GREEDY), chosen, *_step([[1]])) is None
    assert (shares.report() is None) is not counts


def test_steps_that_nobody_began_are_not_counted(clock: Any) -> None:
    """Made-up ones, by which costs are measured."""
    shares = CandidateShares(OPTIONS, counts=True)
    assert _run(shares, clock, _batch(GREEDY), [[1]])
    clock.ns += 10 * OBSERVED_EVERY_NS
    assert shares.outcome(_batch(GREEDY), TREE, *_step([[1]])) is None


def test_ended_requests_and_those_without_drafts_are_left_out(clock: Any) -> None:
    shares = CandidateShares(OPTIONS, counts=True)
    spared = GREEDY | {"custom": {OPT_OUT: False}}
    clock.ns += OBSERVED_EVERY_NS
    shares.begin(TREE, fixed=True)
    outcome = shares.outcome(_batch(GREEDY, spared), TREE, *_step([[1], [1]]))
    assert outcome is not None
    outcome.judge([False, True])
    assert shares.report() == {
        name: {"spine": {}, "off_spine": {}} for name in candidate_shares.KIND_NAMES
    }


def test_those_of_the_automatic_rule() -> None:
    seen = {"spine": {1: {0: 0.5}}, "off_spine": {}}
    auto = {"choice": "chain", "greedy": {"candidates": seen}, "sampled": {"candidates": {}}}
    assert shares_of(auto) == {"greedy": seen, "sampled": {}}
    assert shares_of({"choice": "chain"}) is None  # another rank's
    assert shares_of(None) is None
