"""Every verified node, accepted or not, over the steps of whole texts: its logits are those of its
own path run alone behind the committed text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import GREEDY, ScriptedDrafts, random_prompts, run_under, server_args

from overstory.workers.tiny.oracle import Oracle

if TYPE_CHECKING:
    from harness import EngineHarness

    from overstory.kernels.reference import Tree

Engine = Callable[..., "EngineHarness"]
LENGTH = 40
CLOSE = 5e-4
"""float32 forwards of other widths differ in the last bits of the logits."""


@dataclass
class Step:
    """One verify forward, as it came out."""

    rids: list[str]
    lengths: list[int]
    tree: Tree
    logits: torch.Tensor


def _note(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    from overstory.workers.ddtree import worker

    verify, steps = worker.verify, []

    def noting(target: Any, batch: Any, tree: Tree, *arguments: Any, **named: Any) -> Any:
        result = verify(target, batch, tree, *arguments, **named)
        logits = result.logits_output.next_token_logits
        shape = (*tree.tokens.shape, logits.shape[-1])
        rids = [req.rid for req in batch.reqs]
        steps.append(Step(rids, batch.seq_lens.tolist(), tree, logits.clone().view(shape)))
        return result

    monkeypatch.setattr(worker, "verify", noting)
    return steps


def _paths(tree: Tree, b: int) -> list[list[int]]:
    """By row in use, rows from the root to it."""
    paths: list[list[int]] = []
    for row, parent in enumerate(tree.parents[b, : int(tree.sizes[b])].tolist()):
        paths.append([row] if row == 0 else [*paths[parent], row])
    return paths


def _check(oracle: Oracle, committed: list[int], step: Step, b: int) -> int:
    """Compares the rows of one request; returns how many there were."""
    paths = _paths(step.tree, b)
    inner = {path[-2] for path in paths[1:]}
    seen: set[int] = set()
    for path in (path for path in paths if path[-1] not in inner):
        drafted = step.tree.tokens[b, path].tolist()
        alone = oracle.logits([*committed, *drafted])[len(committed) :]
        torch.testing.assert_close(step.logits[b, path], alone, atol=CLOSE, rtol=CLOSE)
        seen |= set(path)
    assert seen == set(range(len(paths)))
    return len(paths)


@pytest.mark.parametrize(
    "more",
    [
        {"disable_overlap_schedule": True},
        {"page_size": 16, "chunked_prefill_size": 32},
        pytest.param({"chunked_prefill_size": 64}, marks=pytest.mark.full),
    ],
    ids=["no-overlap", "pages-and-chunks", "chunks"],
)
def test_every_node_is_its_path_run_alone(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    harness, oracle = engine(**server_args(pair[1], rows=32, **more)), Oracle.load(*pair)
    prompts = random_prompts([6, 45, 70], seed=91)
    params = GREEDY | {"max_new_tokens": LENGTH}
    texts = run_under(harness, "plain", prompts, params)
    drafts = ScriptedDrafts(seed=91)
    drafts.install(monkeypatch)
    for name in ("chain", "tree-31", "spine-15"):
        steps = _note(monkeypatch)
        rids = [f"node-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        whole = {}
        for rid, prompt, text in zip(rids, prompts, texts, strict=True):
            drafts.know(rid, prompt, text)
            whole[rid] = [*prompt, *text]
        assert run_under(harness, name, prompts, params, rids) == texts
        checked = behind = 0
        for step in steps[::2]:
            for b, (rid, length) in enumerate(zip(step.rids, step.lengths, strict=True)):
                if length < len(whole[rid]):  # overlap runs one step too many
                    assert step.tree.tokens[b, 0] == whole[rid][length]
                    checked += _check(oracle, whole[rid][:length], step, b)
                    behind += length > len(prompts[rids.index(rid)]) + 10
        assert checked > 60
        assert behind >= 3, "the steps are those of the first tokens alone"
