"""KV after tree steps, checked on any engine: tests of single slots and of pages share these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from ddtree_support import (
    GREEDY,
    ScriptedDrafts,
    policy,
    prefilled_kv,
    random_prompts,
    request_kv,
    run_under,
)

from overstory.workers.ddtree.commit import kv_buffers
from overstory.workers.defrag.audit import audit

if TYPE_CHECKING:
    import pytest
    from harness import EngineHarness

UNWRITTEN = 7.5


def check_committed_kv(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Target and drafter hold, for every committed token, what a prefill of the text computes."""
    prompt = random_prompts([37], seed=21)[0]
    params = GREEDY | {"max_new_tokens": 80}
    text = run_under(harness, "plain", [prompt], params)[0]
    drafts = ScriptedDrafts(seed=1)
    drafts.install(monkeypatch)
    _leave_nothing_written(harness)
    rid = f"kv-{name}-{harness.scheduler.forward_ct}"
    drafts.know(rid, prompt, text)
    harness.submit(prompt, params, rid=rid)
    with policy(name):
        while len(harness.outputs[rid].ids) < 40:
            harness.step()
    tokens, stepped = request_kv(harness, rid)
    assert tokens == [*prompt, *text][: len(tokens)]
    assert len(tokens) > len(prompt) + 30
    harness.abort(rid)
    harness.run([rid])
    _leave_nothing_written(harness)
    _, prefilled = prefilled_kv(harness, tokens, 8)
    for ours, wanted in zip(stepped, prefilled, strict=True):
        assert not (ours == UNWRITTEN).flatten(1).all(dim=1).any(), "a committed token has no KV"
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)


def _leave_nothing_written(harness: EngineHarness) -> None:
    """Fills the pools of an idle engine with what no forward writes: rows that neither a step nor a
    prefill writes would be alike in both."""
    harness.flush_cache()
    worker = harness.scheduler.model_worker
    for runner in (worker.model_runner, worker.draft_model_runner):
        for buffer in kv_buffers(runner.token_to_kv_pool):
            buffer.fill_(UNWRITTEN)


def check_prefix_hits(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, policies: Sequence[str]
) -> None:
    """A follow-up that continues a finished text hits its KV and goes on as if computed anew; one
    that leaves it in the middle hits as many whole pages as they share."""
    prompt, extra, other = random_prompts([50, 7, 60], seed=22)
    params = GREEDY | {"max_new_tokens": 18}
    page = harness.scheduler.tree_cache.page_size
    harness.flush_cache()
    text = run_under(harness, "plain", [prompt], params)[0]
    shared = len(prompt) + 14
    prompts = [prompt, prompt + text + extra, (prompt + text)[:shared] + other]
    whole = len(prompt) + len(text)
    # The last token of a text has KV where the step that gave it went beyond it.
    kept = [{0}, {whole // page * page, (whole - 1) // page * page}, {shared // page * page}]
    cold = [text]
    for one in prompts[1:]:
        harness.flush_cache()
        cold.append(run_under(harness, "plain", [one], params)[0])
    drafts = ScriptedDrafts(seed=2)
    drafts.install(monkeypatch)
    for name in policies:
        harness.flush_cache()
        for i, (one, wanted) in enumerate(zip(prompts, cold, strict=True)):
            rid = f"hit-{name}-{i}-{harness.scheduler.forward_ct}"
            drafts.know(rid, one, wanted)
            assert run_under(harness, name, [one], params, [rid])[0] == wanted
            assert harness.outputs[rid].cached_tokens in kept[i]


def check_chunks_between_steps(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive, some with prompts of several chunks, while others are in the middle."""
    prompts = random_prompts([20, 200, 10, 150, 65], seed=23)
    params = GREEDY | {"max_new_tokens": 20}
    harness.flush_cache()
    plain = [run_under(harness, "plain", [prompt], params)[0] for prompt in prompts]
    drafts = ScriptedDrafts(seed=3)
    drafts.install(monkeypatch)
    harness.flush_cache()
    rids = [f"chunk-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
    with policy("tree-15"):
        for rid, prompt, text in zip(rids, prompts, plain, strict=True):
            drafts.know(rid, prompt, text)
            harness.submit(prompt, params, rid=rid)
            harness.step(3)
        harness.run(rids)
    assert [harness.outputs[rid].ids for rid in rids] == plain
    harness.assert_no_leak()


def check_aborts(harness: EngineHarness) -> None:
    """Requests are taken away in the middle of trees, chunks and queues; nothing may leak."""
    draw = random.Random(7)
    prompts = random_prompts([draw.randrange(3, 200) for _ in range(12)], seed=24)
    params = GREEDY | {"max_new_tokens": 200}
    with policy("tree-31"):
        rids = []
        for prompt in prompts:
            rids.append(harness.submit(prompt, params))
            harness.step(draw.randrange(4))
            if draw.random() < 0.6:
                harness.abort(draw.choice(rids))
        for rid in rids:
            harness.abort(rid)
            harness.step(draw.randrange(2))
        harness.run(rids)
    harness.assert_no_leak()


def note_retracted(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests that the scheduler takes back from now on."""
    retracted: list[Any] = []
    batch_kind = type(harness.scheduler.running_batch)
    release = batch_kind.release_req

    def noting(batch: Any, index: int, *arguments: object) -> object:
        retracted.append(batch.reqs[index])
        return release(batch, index, *arguments)

    monkeypatch.setattr(batch_kind, "release_req", noting)
    return retracted


def check_retraction(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool too small for all requests makes the scheduler take some back; texts stay the same.

    What they put out before still counts for their penalties, and their grammars stand behind it.
    """
    prompts = random_prompts([60, 50, 70, 40], seed=25)
    params = {"temperature": 0.8, "sampling_seed": 9, "ignore_eos": True, "max_new_tokens": 110}
    ruled = {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "regex": "([a-c]{2}[0-9] )*"}
    every = [params | ruled, params] * 2
    alone = []
    for prompt, one in zip(prompts, every, strict=True):
        harness.flush_cache()
        alone.append(run_under(harness, "plain", [prompt], one)[0])
    retracted = note_retracted(harness, monkeypatch)
    harness.flush_cache()
    assert run_under(harness, "tree-15", prompts, every) == alone
    assert any(req.sampling_params.frequency_penalty for req in retracted), (
        "the pool was large enough: the test shows nothing"
    )


def check_eviction(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """More text than a pool of some 700 slots keeps goes by, twice; some of it is found again, some
    is gone."""
    prompts = random_prompts([130, 100, 64, 190], seed=72)
    prompts.append(prompts[1][:64] + prompts[2])
    params = GREEDY | {"max_new_tokens": 12}
    wanted = []
    for prompt in prompts:
        harness.flush_cache()
        wanted += run_under(harness, "plain", [prompt], params)
    evicted = []
    cache = type(harness.scheduler.tree_cache)
    evict = cache.evict

    def counting(self: Any, asked: Any) -> Any:
        result = evict(self, asked)
        evicted.append(result.num_tokens_evicted)
        return result

    monkeypatch.setattr(cache, "evict", counting)
    drafts = ScriptedDrafts(seed=72)
    drafts.install(monkeypatch)
    harness.flush_cache()
    hits = 0
    for turn in range(2):
        for some in ([0, 1, 2], [3, 4]):
            rids = [f"evict-{turn}-{i}-{harness.scheduler.forward_ct}" for i in some]
            for rid, i in zip(rids, some, strict=True):
                drafts.know(rid, prompts[i], wanted[i])
            texts = run_under(harness, "tree-15", [prompts[i] for i in some], params, rids)
            assert texts == [wanted[i] for i in some]
            hits += sum(harness.outputs[rid].cached_tokens for rid in rids)
            harness.at_boundary(audit)
    assert sum(evicted) > 0
    assert hits > 0
