"""DDTREE under SGLang's CUDA graph runner, run by a stand-in for the graphs themselves.

The texts must be those of eager forwards whatever the batch size, the tier and the padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from ddtree_support import (
    GREEDY,
    check_scripted,
    policy,
    random_prompts,
    run_under,
    server_args,
)
from graph_standin import capture, put_backends

from overstory.workers.ddtree.graph_tiers import tier_rows
from overstory.workers.step_stats import STATS

if TYPE_CHECKING:
    from harness import EngineHarness

ROWS = 20
FULL = pytest.mark.full
POLICIES = (
    pytest.param("plain", marks=FULL),
    "chain",
    "tree-9",
    pytest.param("tree-19", marks=FULL),
    pytest.param("spine-12", marks=FULL),
)


@pytest.fixture(scope="module")
def graphed(pair: tuple[str, str], no_shared_engine: None) -> Iterator[EngineHarness]:
    from harness import EngineHarness

    with pytest.MonkeyPatch.context() as monkeypatch:
        put_backends(monkeypatch, ROWS)
        harness = EngineHarness(pair[0], **server_args(pair[1], ROWS))
        eager = run_under(harness, "plain", _prompts(5), GREEDY | {"max_new_tokens": 24})
        harness.eager_texts = eager  # type: ignore[attr-defined]
        capture(harness, monkeypatch, [1, 2, 4])
        yield harness
        harness.close()


def _prompts(count: int) -> list[list[int]]:
    return random_prompts([40, 3, 17, 90, 64][:count], seed=4)


def test_tiers_are_captured(graphed: EngineHarness) -> None:
    tiers = graphed.scheduler.model_worker._tiers
    assert tiers.rows == tier_rows(ROWS, 8) == (1, 8, 16, 20)


def test_what_the_automatic_rule_chooses_from_is_what_runs(graphed: EngineHarness) -> None:
    """Trees of 4 and 8 nodes would be grown to 7 and 15."""
    worker = graphed.scheduler.model_worker
    options = worker.chooser.options
    assert options.names == ("plain", "chain", "tree-7", "tree-15", "tree-19")
    assert [worker._nodes(one) for one in options.policies] == list(options.nodes)


@pytest.mark.parametrize("name", POLICIES)
def test_graphs_say_what_eager_forwards_say(graphed: EngineHarness, name: str) -> None:
    """Batches of 3 are padded to 4; of 5 there is no graph."""
    worker = graphed.scheduler.model_worker
    params = GREEDY | {"max_new_tokens": 24}
    for count in (1, 3, 5):
        before = _replays(graphed)
        texts = run_under(graphed, name, _prompts(count), params)
        assert texts == graphed.eager_texts[:count]  # type: ignore[attr-defined]
        verified, drafted = (now - was for now, was in zip(_replays(graphed), before, strict=True))
        assert verified > 0 or count == 5
        assert (drafted > 0) == (verified > 0 and name != "plain")
    nodes = {"plain": 0, "chain": 7, "tree-9": 15, "tree-19": 19, "spine-12": 15}[name]
    with policy(name):
        from overstory.workers import tree_policy

        assert worker._nodes(tree_policy.current()) == nodes
    counted = STATS.snapshot()["verify"][name]
    assert counted["rows"] >= counted["requests"] * (1 + nodes)


def test_branches_are_accepted(graphed: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """By drafts that are right on purpose: a mask of another step or tree would show."""
    params = GREEDY | {"max_new_tokens": 24}
    wanted = graphed.eager_texts[:3]  # type: ignore[attr-defined]
    check_scripted(graphed, _prompts(3), params, wanted, monkeypatch, ("tree-19", "chain"), seed=2)


def test_sampled_texts_do_not_depend_on_graphs(graphed: EngineHarness) -> None:
    params = [
        {"temperature": 1.0, "sampling_seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 4},
        {"temperature": 0.0, "frequency_penalty": 0.4},
        {"temperature": 0.0, "logit_bias": {"7": -50.0}},
        {"temperature": 1.0, "min_p": 0.05, "sampling_seed": 5},
    ]
    each = [one | {"max_new_tokens": 16, "ignore_eos": True} for one in params]
    eager = run_under(graphed, "tree-19", _prompts(5), each)
    for i in range(0, 5, 2):
        one_by_one = run_under(graphed, "tree-19", _prompts(5)[i : i + 2], each[i : i + 2])
        assert one_by_one == eager[i : i + 2]


def _replays(engine: EngineHarness) -> tuple[int, int]:
    """Forwards that came from graphs: the target's and the drafter's."""
    worker = engine.scheduler.model_worker
    verified = sum(runner.backend.replays for runner in worker._tiers._runners.values())
    return verified, worker.draft_model_runner.decode_cuda_graph_runner.backend.replays
