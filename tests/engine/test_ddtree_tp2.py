"""TP 2, and 4, over gloo: the ranks agree step by step, and on the text of TP 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import (
    GREEDY,
    POLICIES,
    SAMPLED,
    check_scripted,
    policy,
    random_prompts,
    run_under,
    server_args,
)

from overstory.workers.step_stats import STATS
from overstory.workers.tiny.prompts import heldout_prompts

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]


def _requests(length: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    prompts = random_prompts([11, 45, 70, 23, 30, 16, 9], seed=51)
    params: list[dict[str, Any]] = [GREEDY | {"max_new_tokens": length} for _ in range(3)]
    for i, one in enumerate(SAMPLED[:2]):
        params.append(one | {"sampling_seed": 40 + i, "ignore_eos": True, "max_new_tokens": length})
    params[1]["logit_bias"] = {"77": 2.0, "4000": 3.0}
    params.append(params[-1] | {"frequency_penalty": 0.8, "repetition_penalty": 1.2})
    params.append(params[0] | {"regex": r"([a-c]{2}[0-9] )*"})
    return prompts, params


def _check(
    engine: Engine,
    engine_tp2: Engine,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    length: int,
    **arguments: Any,
) -> None:
    prompts, params = _requests(length)
    one = engine(**server_args(pair[1], rows=32))
    wanted, accepted = run_under(one, "plain", prompts, params), _accepted(one)
    two = engine_tp2(**server_args(pair[1], **arguments))
    assert _accepted(two) == accepted
    check_scripted(two, prompts, params, wanted, monkeypatch, policies, seed=1)


def _accepted(harness: EngineHarness) -> list[int]:
    """Requests by the depth that was accepted of their drafts. Texts are right whatever is drafted:
    ranks that take their own part of the vocabulary for all of it show here alone."""
    prompts = [list(prompt.ids) for prompt in heldout_prompts()[:4]]
    known = STATS.snapshot()["verify"].get("tree-15", {}).get("accepted_by_depth", [])
    run_under(harness, "tree-15", prompts, GREEDY | {"max_new_tokens": 24})
    now = STATS.snapshot()["verify"]["tree-15"]["accepted_by_depth"]
    added = [after - before for after, before in zip(now, [*known, *[0] * 8], strict=False)]
    assert added[0] > 10
    return added


def test_two_ranks_give_the_text_of_one(
    engine: Engine,
    engine_tp2: Engine,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _check(engine, engine_tp2, pair, monkeypatch, ("plain", "chain", "tree-15"), 24)


def test_two_ranks_agree_on_aborts_and_switches(engine_tp2: Engine, pair: tuple[str, str]) -> None:
    two = engine_tp2(**server_args(pair[1]))
    prompts, params = _requests(40)
    rids = [two.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    names = ("tree-8", "plain", "chain", "spine-15")
    for i in range(12):
        with policy(names[i % 4]):
            two.step()
        if i == 5:
            two.abort(rids[1])
    for rid in rids:
        two.abort(rid)
    two.run(rids)
    two.assert_no_leak()


_DECIDES = pytest.MonkeyPatch()


def _leave_decisions_to_rank_0(scheduler: Any) -> None:
    """From now on rank 1 fails where it merges candidates, builds a tree or draws."""
    from overstory.workers.ddtree import draft, sampler, worker

    if scheduler.draft_worker._group.decides:
        return

    def never(*_arguments: Any, **_named: Any) -> Any:
        raise AssertionError("rank 1 decides by itself")

    for module, name in (
        (draft, "merge_candidates"),
        (draft, "tree_build"),
        (worker, "draw"),
        (sampler, "draw"),
    ):
        _DECIDES.setattr(module, name, never)


def _as_before(_scheduler: Any) -> None:
    _DECIDES.undo()


def test_rank_0_alone_decides(engine_tp2: Engine, pair: tuple[str, str]) -> None:
    """Ranks that compute alike on a CPU may differ by rounding on GPUs, and then deadlock."""
    two = engine_tp2(**server_args(pair[1]))
    prompts, params = _requests(12)
    wanted = run_under(two, "plain", prompts, params)
    two.at_boundary(_leave_decisions_to_rank_0)
    for name in ("plain", "chain", "tree-15"):
        assert run_under(two, name, prompts, params) == wanted
    two.at_boundary(_as_before)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [False, True])
def test_two_ranks_under_all_policies(
    engine: Engine,
    engine_tp2: Engine,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    overlap: bool,
) -> None:
    _check(
        engine, engine_tp2, pair, monkeypatch, POLICIES, 48, disable_overlap_schedule=not overlap
    )


@pytest.mark.full
def test_four_ranks_give_the_text_of_one(
    engine: Engine, engine_tp4: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(engine, engine_tp4, pair, monkeypatch, ("plain", "chain", "tree-15"), 24)
