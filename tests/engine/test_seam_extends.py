"""Extends of the `overstory` backend in blocks of rows, in a real engine, on the reference ops.

Keys and texts must be those of the same extends as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import GREEDY, prefilled_kv, random_prompts, run_under, server_args
from graph_standin import put_backends

from overstory.workers.seam import extend_blocks
from overstory.workers.seam.cuda_attention import OverstoryAttention

if TYPE_CHECKING:
    from harness import EngineHarness

ROWS = 16
CHUNK = 150


@pytest.fixture(scope="module")
def blocked(pair: tuple[str, str], no_shared_engine: None) -> Iterator[EngineHarness]:
    from harness import EngineHarness

    with pytest.MonkeyPatch.context() as monkeypatch:
        put_backends(monkeypatch, ROWS)
        arguments = server_args(pair[1], ROWS, chunked_prefill_size=CHUNK)
        harness = EngineHarness(pair[0], **arguments)
        yield harness
        harness.close()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Blocks of each extend that is cut, and rows of its largest."""
    plans: list[tuple[int, int]] = []
    plan_blocks = OverstoryAttention._plan_blocks

    def noting(self: Any, forward_batch: Any) -> Any:
        plan = plan_blocks(self, forward_batch)
        if plan is not None:
            plans.append((len(plan.key_bounds), plan.rows))
        return plan

    monkeypatch.setattr(OverstoryAttention, "_plan_blocks", noting)
    return plans


def leave_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extend_blocks, "left_to_triton", lambda *_: "asked by a test")


def test_chunks_of_a_prompt(
    blocked: EngineHarness, planned: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_prompts([2 * CHUNK + 70], seed=5)[0]
    blocked.flush_cache()
    text, keys = prefilled_kv(blocked, prompt, 12)
    assert planned == [(3, 64), (2, 64)]  # 150 rows behind 150, 70 behind 300
    leave_all(monkeypatch)
    blocked.flush_cache()
    wanted, whole = prefilled_kv(blocked, prompt, 12)
    assert len(planned) == 2
    assert text == wanted
    for ours, theirs in zip(keys, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_few_rows_behind_a_hit(blocked: EngineHarness, planned: list[tuple[int, int]]) -> None:
    """The last token of a prompt that is cached, and some more behind another."""
    prompts = random_prompts([80, 120], seed=6)
    params = GREEDY | {"max_new_tokens": 10}
    blocked.flush_cache()
    cold = run_under(blocked, "plain", prompts, params)
    planned.clear()
    assert run_under(blocked, "plain", prompts, params) == cold
    more = [prompts[0] + cold[0][:5], [*prompts[1][:100], 9, 8, 7]]
    hits = run_under(blocked, "plain", more, params)
    assert planned == [(2, 1), (2, 3)]  # the first text's tokens are cached too
    blocked.flush_cache()
    assert run_under(blocked, "plain", more, params) == hits
    assert hits[0][:5] == cold[0][5:]


def test_prefixes_beside_none(blocked: EngineHarness, planned: list[tuple[int, int]]) -> None:
    """One request of a batch has a prefix, another has none; trees go on from both."""
    known, fresh = random_prompts([90, 33], seed=7)
    params = GREEDY | {"max_new_tokens": 24}
    blocked.flush_cache()
    cold = run_under(blocked, "plain", [known, fresh], params)
    blocked.flush_cache()
    run_under(blocked, "plain", [known], params)
    planned.clear()
    assert run_under(blocked, "tree-15", [known, fresh], params) == cold
    assert planned == [(2, 33)]
