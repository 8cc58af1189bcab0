"""Relocation passes under fire: the output is that without them, and slot numbers add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import (
    GREEDY,
    SAMPLED,
    ScriptedDrafts,
    policy,
    random_prompts,
    run_under,
    server_args,
)
from defrag_support import Passes

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
ARGUMENTS = {"rows": 32, "chunked_prefill_size": 64}


def mixed(length: int, seed: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Short and long prompts, two of which share a prefix; greedy and seeded requests."""
    prompts = random_prompts([9, 150, 40, 70, 23], seed)
    prompts.append(prompts[1][:100] + prompts[2])
    params: list[dict[str, Any]] = [GREEDY | {"max_new_tokens": length} for _ in range(3)]
    for i, one in enumerate(SAMPLED[:3]):
        params.append(one | {"sampling_seed": 60 + i, "ignore_eos": True, "max_new_tokens": length})
    return prompts, params


def check_outputs(
    harness: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    length: int,
    seed: int,
) -> None:
    """Requests arrive while others run; some are aborted; passes come every few steps."""
    prompts, params = mixed(length, seed)
    harness.flush_cache()
    wanted = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed)
    drafts.install(monkeypatch)
    for name in policies:
        harness.flush_cache()
        passes = Passes(harness, seed)
        rids = [f"defrag-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        with policy(name):
            doomed = harness.submit(prompts[3], params[3] | {"max_new_tokens": 500})
            for rid, prompt, text, one in zip(rids, prompts, wanted, params, strict=True):
                drafts.know(rid, prompt, text)
                harness.submit(prompt, one, rid=rid)
                harness.step()
                passes.one()
            harness.abort(doomed)
            passes.run(rids)
        assert [harness.outputs[rid].ids for rid in rids] == wanted, name
        assert passes.rows > 100
        harness.step(2)
        harness.assert_no_leak()
        again = run_under(harness, name, prompts, params)
        assert again == wanted, "the prefix cache hands on what a pass has spoilt"


@pytest.mark.parametrize("overlap", [True, False])
def test_output_with_passes_equals_output_without(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS, disable_overlap_schedule=not overlap))
    check_outputs(harness, monkeypatch, ("tree-15",), length=24, seed=31)


def test_two_ranks_move_alike(
    engine_tp2: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_outputs(
        engine_tp2(**server_args(pair[1], **ARGUMENTS)), monkeypatch, ("tree-15",), 16, seed=32
    )
