"""What the DDTREE engine tests share: prompts, policies, and drafts that are right by design."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers import tree_policy
from overstory.workers.step_stats import STATS
from overstory.workers.tree_policy import TreePolicy

if TYPE_CHECKING:
    import pytest
    from harness import EngineHarness

POLICIES = ("plain", "chain", "tree-8", "tree-15", "tree-31", "tree-63", "spine-15", "spine-31")
SOME_POLICIES = ("plain", "chain", "tree-8", "tree-31", "spine-15")
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "top_p": 0.95, "top_k": 200},
)


def server_args(drafter: str, rows: int = 64, **more: Any) -> dict[str, Any]:
    """Arguments of an engine with room for trees of ``rows - 1`` nodes."""
    return {
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": rows,
        "random_seed": 1,
    } | more


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, 4096) for _ in range(length)] for length in lengths]


@contextmanager
def policy(name: str) -> Iterator[None]:
    """The policy of all steps inside."""
    before = tree_policy.current()
    tree_policy.set_current(TreePolicy.parse(name))
    try:
        yield
    finally:
        tree_policy.set_current(before)


def run_under(
    harness: EngineHarness,
    name: str,
    prompts: Sequence[Sequence[int]],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    rids: Sequence[str] | None = None,
) -> list[list[int]]:
    """New token ids of each prompt, all in one batch, under one policy; nothing may leak."""
    every = [params] * len(prompts) if isinstance(params, Mapping) else list(params)
    with policy(name):
        submitted = [
            harness.submit(prompt, one, rid=rids[i] if rids else None)
            for i, (prompt, one) in enumerate(zip(prompts, every, strict=True))
        ]
        harness.run(submitted)
    harness.assert_no_leak()
    return [harness.outputs[rid].ids for rid in submitted]


def request_kv(harness: EngineHarness, rid: str) -> tuple[list[int], list[torch.Tensor]]:
    """Committed tokens of a running request, and the rows of every KV layer, target and drafter."""
    scheduler = harness.scheduler
    batches = [scheduler.running_batch, scheduler.last_batch]
    req = next(r for b in batches if b is not None for r in b.reqs if r.rid == rid)
    committed = int(req.kv_committed_len)
    slots = scheduler.req_to_token_pool.req_to_token[req.req_pool_idx, :committed].long()
    worker = scheduler.model_worker
    target = worker.model_runner.token_to_kv_pool.kv_buffer
    drafter = worker.draft_model_runner.token_to_kv_pool
    tokens = [*req.origin_input_ids, *req.output_ids][:committed]
    layers = [*target, *drafter.k_buffer, *drafter.v_buffer]
    return tokens, [layer[slots].clone() for layer in layers]


def prefilled_kv(
    harness: EngineHarness, tokens: list[int], new: int
) -> tuple[list[int], list[torch.Tensor]]:
    """The first of `new` tokens after ``tokens``, which plain decoding finds, and the rows of every
    KV layer before them."""
    rid = harness.submit(tokens, GREEDY | {"max_new_tokens": new})
    with policy("plain"):
        while not harness.outputs[rid].ids:
            harness.step()
        held, rows = request_kv(harness, rid)
        harness.run([rid])
    assert held[: len(tokens)] == tokens
    return harness.outputs[rid].ids, [layer[: len(tokens)] for layer in rows]


class ScriptedDrafts:
    """Puts known continuations into the drafter's candidates, for some depths and at some rank.

    So trees are accepted to every depth and along every kind of branch, whatever the drafter at
    hand has learnt. What the target answers is not touched.
    """

    def __init__(self, seed: int = 0) -> None:
        self.texts: dict[str, list[int]] = {}
        self._draw = random.Random(seed)
        self._batch: Any = None
        self._of_block = 0

    def know(self, rid: str, prompt: Sequence[int], continuation: Sequence[int]) -> None:
        self.texts[rid] = [*prompt, *continuation]

    def install(self, monkeypatch: Any) -> None:
        from overstory.workers.ddtree import draft, step_graph

        hidden, merge = draft.Drafter.hidden, draft.merge_candidates
        captured = step_graph.StepGraphs.run

        def remember(drafter: Any, batch: Any, *arguments: Any) -> torch.Tensor:
            self._batch, self._of_block = batch, drafter._block_size - 1
            return hidden(drafter, batch, *arguments)

        def remember_captured(graphs: Any, shape: Any, batch: Any, roots: torch.Tensor) -> Any:
            self._batch, self._of_block = batch, graphs._worker.limits.block_size - 1
            return captured(graphs, shape, batch, roots)

        def scripted(shards: Any, k: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self._rewrite(*merge(shards, k), k)

        monkeypatch.setattr(draft.Drafter, "hidden", remember)
        monkeypatch.setattr(step_graph.StepGraphs, "run", remember_captured)
        monkeypatch.setattr(draft, "merge_candidates", scripted)

    def _rewrite(
        self, logprobs: torch.Tensor, ids: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        requests, depth = self._batch.reqs, self._of_block
        rows = ids.view(-1, depth, k).tolist()  # a captured step may have more than there are
        starts = self._batch.seq_lens.tolist()
        for candidates, req, start in zip(rows[: len(requests)], requests, starts, strict=True):
            text = self.texts.get(req.rid, [])
            right = text[start + 1 : start + 1 + self._draw.randrange(depth + 1)]
            for level, token in enumerate(right):
                rank = min(self._draw.choice([0, 0, 0, 1, 1, 2]), k - 1)
                others = [other for other in candidates[level] if other != token]
                candidates[level] = [*others[:rank], token, *others[rank:]][:k]
        spread = -0.7 - 0.35 * torch.arange(k, dtype=logprobs.dtype)
        return spread.expand_as(logprobs).contiguous(), torch.tensor(rows).view_as(ids)


def check_scripted(
    harness: EngineHarness,
    prompts: Sequence[Sequence[int]],
    params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    wanted: Sequence[Sequence[int]],
    monkeypatch: pytest.MonkeyPatch,
    policies: Sequence[str],
    seed: int,
) -> dict[str, int]:
    """The batch gives `wanted` under each policy, by drafts of which many are accepted.

    Returns:
        tokens of verify forwards, by policy.
    """
    counted = {}
    drafts = ScriptedDrafts(seed)
    drafts.install(monkeypatch)
    for name in policies:
        rids = [f"{seed}-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        for rid, prompt, text in zip(rids, prompts, wanted, strict=True):
            drafts.know(rid, prompt, text)
        before = STATS.snapshot()["verify"].get(name, {"requests": 0, "tokens": 0})
        assert run_under(harness, name, prompts, params, rids) == wanted, name
        after = STATS.snapshot()["verify"][name]
        counted[name] = after["tokens"] - before["tokens"]
        gain = counted[name] / (after["requests"] - before["requests"])
        assert gain == 1 if name == "plain" else gain > 1.5, "little was accepted"
    return counted
