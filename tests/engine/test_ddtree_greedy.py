"""Greedy output does not depend on the tree policy, the batch, or a switch in the middle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from ddtree_support import (
    GREEDY,
    POLICIES,
    SOME_POLICIES,
    ScriptedDrafts,
    check_scripted,
    policy,
    random_prompts,
    run_under,
    server_args,
)

from overstory.workers.tree_policy import TreePolicy

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
LENGTH = 48


@pytest.fixture(params=[True, False], ids=["no-overlap", "overlap"])
def harness(request: pytest.FixtureRequest, engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1], disable_overlap_schedule=request.param))


@pytest.mark.parametrize(
    "policies", [SOME_POLICIES, pytest.param(POLICIES, marks=pytest.mark.full)], ids=["some", "all"]
)
def test_policies_agree(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, policies: tuple[str, ...]
) -> None:
    prompts = random_prompts([5, 17, 40, 64, 90, 3], seed=11)
    params = GREEDY | {"max_new_tokens": LENGTH}
    plain = run_under(harness, "plain", prompts, params)
    counted = check_scripted(harness, prompts, params, plain, monkeypatch, policies, seed=0)
    # The first token of each comes from prefill.
    assert counted == dict.fromkeys(policies, len(prompts) * (LENGTH - 1))


def test_alone_equals_batch(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = random_prompts([9, 33, 70], seed=12)
    params = GREEDY | {"max_new_tokens": LENGTH}
    plain = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=3)
    drafts.install(monkeypatch)
    for i, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
        rid = f"alone-{i}-{harness.scheduler.forward_ct}"
        drafts.know(rid, prompt, text)
        assert run_under(harness, "tree-31", [prompt], params, [rid]) == [text]


def test_switching_policies_in_the_middle(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([8, 30, 55, 21], seed=13)
    params = GREEDY | {"max_new_tokens": 96}
    plain = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=4)
    drafts.install(monkeypatch)
    rids = [f"switch-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
    for rid, prompt, text in zip(rids, prompts, plain, strict=True):
        drafts.know(rid, prompt, text)
        harness.submit(prompt, params, rid=rid)
    draw = random.Random(5)
    used = set()
    while not all(harness.outputs[rid].done for rid in rids):
        name = draw.choice([*SOME_POLICIES, "plain"])
        used.add(TreePolicy.parse(name).mode)
        with policy(name):
            harness.step()
    harness.run(rids)
    assert [harness.outputs[rid].ids for rid in rids] == plain
    assert used == {"plain", "chain", "tree"}
    harness.assert_no_leak()
