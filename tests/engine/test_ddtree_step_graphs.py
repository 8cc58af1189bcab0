"""Whole steps in one graph, with a stand-in for the graph: the texts of steps in parts.

What asks for more than a captured step gives is run in parts, in the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    check_scripted,
    policy,
    random_prompts,
    run_under,
    server_args,
)
from graph_standin import RerunRecorder, capture, capture_steps, put_backends

from overstory.workers.ddtree import candidate_shares
from overstory.workers.defrag.audit import audit
from overstory.workers.policy.chooser import shape_of
from overstory.workers.policy.cost_table import DRAFTS_IN_PARTS, IN_PARTS, WHOLE
from overstory.workers.step_stats import STATS

if TYPE_CHECKING:
    from harness import EngineHarness

ROWS = 16
FULL = pytest.mark.full
SIZES = [1, 4]


class Captured:
    """An engine that captures whole steps, and what it said before it did."""

    def __init__(self, engine: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.greedy = run_under(engine, "plain", _prompts(5), GREEDY | {"max_new_tokens": 24})
        capture(engine, monkeypatch, SIZES)
        self.sampled = run_under(engine, "tree-15", _prompts(4), SAMPLED)
        self.recorder: RerunRecorder = capture_steps(engine, SIZES)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="slots"),
        pytest.param({"page_size": 16}, marks=FULL, id="pages-of-16"),
        pytest.param({"disable_overlap_schedule": True}, marks=FULL, id="one-by-one"),
    ],
)
def captured(
    request: pytest.FixtureRequest, pair: tuple[str, str], no_shared_engine: None
) -> Iterator[Captured]:
    from harness import EngineHarness

    with pytest.MonkeyPatch.context() as monkeypatch:
        put_backends(monkeypatch, ROWS)
        harness = EngineHarness(pair[0], **server_args(pair[1], ROWS, **request.param))
        yield Captured(harness, monkeypatch)
        harness.close()


SAMPLED: list[dict[str, Any]] = [
    one | {"max_new_tokens": 16, "ignore_eos": True}
    for one in (
        {"temperature": 1.0, "sampling_seed": 3},
        {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 4},
        {"temperature": 0.0},
        {"temperature": 1.0, "min_p": 0.05, "top_k": 30, "sampling_seed": 5},
    )
]


def _prompts(count: int) -> list[list[int]]:
    return random_prompts([40, 3, 17, 90, 64][:count], seed=4)


def _steps(policy: str) -> dict[str, Any]:
    counted: dict[str, Any] = STATS.snapshot()["verify"][policy]
    return counted


@pytest.mark.parametrize("name", ["plain", "chain", pytest.param("tree-6", marks=FULL), "tree-15"])
def test_whole_steps_say_what_eager_forwards_say(captured: Captured, name: str) -> None:
    """Batches of 3 are padded to 4; those of 5 run in parts."""
    params = GREEDY | {"max_new_tokens": 24}
    for count in (1, 3, 5):
        before = captured.recorder.replays
        texts = run_under(captured.engine, name, _prompts(count), params)
        assert texts == captured.greedy[:count]
        assert (captured.recorder.replays > before) or count == 5
    counted = _steps(name)
    assert counted["stage_ns"]["step"] > 0
    nodes = {"plain": 0, "chain": 7, "tree-6": 7, "tree-15": 15}[name]
    assert counted["rows"] >= counted["requests"] * (1 + nodes)


@pytest.mark.parametrize("more", [{}, {"min_new_tokens": 1}], ids=["whole", "in parts"])
@pytest.mark.parametrize("name", ["chain", "tree-15"])
def test_candidates_that_were_right_are_counted_under_fixed_policies(
    captured: Captured, monkeypatch: pytest.MonkeyPatch, name: str, more: dict[str, Any]
) -> None:
    worker = captured.engine.scheduler.draft_worker
    monkeypatch.setattr(candidate_shares, "OBSERVED_EVERY_NS", 0)
    fresh = candidate_shares.CandidateShares(worker.chooser.options, counts=True)
    monkeypatch.setattr(worker, "_shares", fresh)
    known = STATS.snapshot()["verify"].get(name)
    params = GREEDY | {"max_new_tokens": 40, "ignore_eos": True} | more
    check_scripted(
        captured.engine,
        _prompts(1),
        params,
        run_under(captured.engine, "plain", _prompts(1), params),
        monkeypatch,
        [name],
        seed=2,
    )
    now = _steps(name)
    offered, accepted = (
        now[f"{what}_by_depth"][0] - (known[f"{what}_by_depth"][0] if known else 0)
        for what in ("offered", "accepted")
    )
    found = worker.candidate_shares()
    assert found["sampled"] == {"spine": {}, "off_spine": {}}
    first = found["greedy"]["spine"][1]
    assert 0 < accepted <= offered
    assert sum(first.values()) == pytest.approx(accepted / offered, abs=0.05)
    assert len(first) == (1 if name == "chain" else max(first) + 1)


def test_branches_are_accepted(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """By drafts that are right on purpose, in a batch that fills the captured size."""
    params = GREEDY | {"max_new_tokens": 24}
    before = captured.recorder.replays
    check_scripted(
        captured.engine, _prompts(4), params, captured.greedy[:4], monkeypatch, ["tree-15"], seed=2
    )
    assert captured.recorder.replays > before


@pytest.mark.parametrize("asked", [{"top_k": 2}, {"top_p": 0.4}, {"min_p": 0.3}])
def test_one_filter_alone_filters(captured: Captured, asked: dict[str, Any]) -> None:
    """Whether a captured step filters follows from what the batch asks: no filter is forgotten."""
    hot = {"temperature": 1.5, "max_new_tokens": 16, "ignore_eos": True, "sampling_seed": 6}
    prompts = _prompts(2)
    free = run_under(captured.engine, "tree-15", prompts, hot)
    before = captured.recorder.replays
    filtered = run_under(captured.engine, "tree-15", prompts, hot | asked)
    assert captured.recorder.replays > before
    in_parts = {"min_new_tokens": 1}  # and next to nothing else: the first token may not be an end
    assert filtered == run_under(captured.engine, "tree-15", prompts, hot | asked | in_parts)
    assert filtered != free


def test_sampled_texts_are_those_of_steps_in_parts(captured: Captured) -> None:
    """All ways to draw: two requests without filters, four of which some have, one greedy."""
    before = captured.recorder.replays
    for first, last in ((0, 4), (0, 1), (1, 3), (2, 3)):
        texts = run_under(captured.engine, "tree-15", _prompts(4)[first:last], SAMPLED[first:last])
        assert texts == captured.sampled[first:last]
    assert captured.recorder.replays > before


@pytest.mark.parametrize(
    "asked",
    [
        {"frequency_penalty": 0.4},
        {"logit_bias": {"7": -50.0}},
        {"custom_params": {"overstory_speculate": False}},
    ],
    ids=["penalty", "bias", "opt-out"],
)
def test_what_needs_parts_gets_them(captured: Captured, asked: dict[str, Any]) -> None:
    params = [GREEDY | {"max_new_tokens": 12}, GREEDY | {"max_new_tokens": 12} | asked]
    before = captured.recorder.replays
    texts = run_under(captured.engine, "chain", _prompts(2), params)
    assert captured.recorder.replays == before
    assert texts[0] == captured.greedy[0][:12]


@pytest.mark.parametrize(
    ("asked", "count", "launch"),
    [
        ({}, 2, WHOLE),
        ({"temperature": 0.9}, 1, WHOLE),
        ({"custom_params": {"overstory_speculate": False}}, 2, DRAFTS_IN_PARTS),
        ({"presence_penalty": 0.4}, 2, IN_PARTS),
        ({"min_new_tokens": 2}, 1, IN_PARTS),
        ({"regex": "a*"}, 1, IN_PARTS),
        ({}, 5, IN_PARTS),
    ],
)
def test_costs_are_taken_for_the_way_steps_run(
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    count: int,
    launch: int,
) -> None:
    """What the automatic rule takes a batch for is what its steps then are, under every option."""
    worker = captured.engine.scheduler.model_worker
    run_step, seen = worker.run_step, []

    def spy(policy: Any, batch: Any, publish: Any = None) -> Any:
        if len(batch.reqs) == count:
            shape = shape_of(batch, worker._asks_for_parts(batch))
            seen.append((shape.launch, [worker.runs_whole(p, batch) for p in every]))
        return run_step(policy, batch, publish)

    every = worker.chooser.options.policies
    drafts = [policy.mode != "plain" for policy in every]
    whole = {
        WHOLE: [True] * len(every),
        DRAFTS_IN_PARTS: [not drafting for drafting in drafts],
        IN_PARTS: [False] * len(every),
    }
    monkeypatch.setattr(worker, "run_step", spy)
    params = [GREEDY | {"max_new_tokens": 5}] * (count - 1) + [
        {"temperature": 0.0, "max_new_tokens": 5} | asked
    ]
    run_under(captured.engine, "chain", _prompts(count), params)
    assert seen
    assert all(one == (launch, whole[launch]) for one in seen)


def test_a_whole_spine_is_not_a_tree_of_as_many_rows(captured: Captured) -> None:
    before = captured.recorder.replays
    texts = run_under(captured.engine, "spine-15", _prompts(2), GREEDY | {"max_new_tokens": 12})
    assert captured.recorder.replays == before
    assert texts == [text[:12] for text in captured.greedy[:2]]


def test_log_probabilities_need_parts(captured: Captured) -> None:
    engine, before = captured.engine, captured.recorder.replays
    rid = engine.submit(
        _prompts(1)[0], GREEDY | {"max_new_tokens": 6}, return_logprob=True, top_logprobs_num=2
    )
    engine.run([rid])
    assert captured.recorder.replays == before
    assert len(engine.outputs[rid].top_logprobs) == 6


def test_what_captured_steps_keep_is_known_to_those_who_move_rows(captured: Captured) -> None:
    """Tensors whose addresses a graph holds: none keeps slot numbers between steps."""
    with policy("tree-15"):
        rid = captured.engine.submit(_prompts(1)[0], GREEDY | {"max_new_tokens": 40})
        before = captured.recorder.replays
        captured.engine.step(4)
        assert captured.recorder.replays > before, "a whole step ran"
        captured.engine.at_boundary(audit)
        captured.engine.run([rid])
    captured.engine.assert_no_leak()


@pytest.mark.parametrize("timed", [True, False])
def test_what_a_captured_step_hands_out(timed: bool) -> None:
    """Three places, two of them in use; the clock at both ends, or no clock (GPUs unless asked)."""
    from overstory.kernels.reference import Accepted, chain_tree
    from overstory.workers.ddtree.step_graph import LANDINGS, _Landing, _packed, _Raw
    from overstory.workers.policy.evidence import Walk

    tree = chain_tree(torch.tensor([5, 6, 7]), torch.tensor([[1, 2], [3, 4], [8, 9]]))
    accepted = Accepted(
        rows=torch.tensor([[0, 1], [0, -1], [0, -1]]),
        lengths=torch.tensor([1, 0, 0]),
        bonus=torch.tensor([21, 22, 23]),
        tokens=torch.tensor([[1, 21], [22, -1], [23, -1]]),
    )
    times = torch.tensor([[100], [130]]) if timed else torch.empty(0, 1, dtype=torch.int64)
    packed = _packed(tree, accepted, torch.tensor([40, 50, 1]), times)
    landing = _Landing(_Raw(packed, tree, accepted), 2, 3)
    first = packed.clone()
    outs = [landing.land()]
    for step in range(1, LANDINGS):  # each writes over what the one before gave
        packed.fill_(-step)
        outs.append(landing.land())
        assert outs[step].tokens.tolist() == [-step] * 4
    out = outs[0]
    assert out.tokens.tolist() == [1, 21, 22, -1]
    assert out.accept_lens.tolist() == [2, 1]
    assert out.deepest.tolist() == [2, 2]
    assert out.times.tolist() == ([100, 130] if timed else [])
    assert (out.told.times is not None) == timed
    assert out.told.walks.of(1, True) == Walk([-1, 0, 1], [-1, 0, 0], [], 3, True)
    assert out.told.walks.of(0, True) == Walk([-1, 0, 1], [-1, 0, 0], [1], 3, True)
    assert [len(part) for part in out.told.walks] == [2] * 4
    packed.copy_(first)
    assert landing.land().roots.tolist() == [21, 22]
    assert out.seq_lens.tolist() == [42, 51]


def test_the_device_is_timed(captured: Captured) -> None:
    before = _steps("tree-15")
    run_under(captured.engine, "tree-15", _prompts(1), GREEDY | {"max_new_tokens": 12})
    after = _steps("tree-15")
    steps = after["forwards"] - before["forwards"]
    assert after["idle_gaps"] - before["idle_gaps"] == steps - 1
    assert after["device_ns"] > before["device_ns"]
