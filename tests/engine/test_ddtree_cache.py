"""KV after tree steps: what is committed, what the prefix cache hands on, no slot lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    ScriptedDrafts,
    policy,
    random_prompts,
    request_kv,
    run_under,
    server_args,
)

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
TREES = ("plain", "chain", "tree-31", "spine-15")


@pytest.fixture
def harness(engine: Engine, pair: tuple[str, str]) -> EngineHarness:
    return engine(**server_args(pair[1], chunked_prefill_size=64))


@pytest.mark.parametrize("name", TREES)
def test_committed_kv_equals_prefill(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Target and drafter hold, for every committed token, what a prefill of the text computes."""
    prompt = random_prompts([37], seed=21)[0]
    params = GREEDY | {"max_new_tokens": 80}
    text = run_under(harness, "plain", [prompt], params)[0]
    drafts = ScriptedDrafts(seed=1)
    drafts.install(monkeypatch)
    harness.flush_cache()
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
    harness.flush_cache()
    again = harness.submit(tokens, GREEDY | {"max_new_tokens": 8})
    with policy("plain"):
        while not harness.outputs[again].ids:
            harness.step()
        prefilled_tokens, prefilled = request_kv(harness, again)
        harness.run([again])
    assert prefilled_tokens[: len(tokens)] == tokens
    for ours, wanted in zip(stepped, prefilled, strict=True):
        torch.testing.assert_close(ours, wanted[: len(tokens)], rtol=1e-3, atol=1e-3)


def test_prefix_hits_with_tokens_made_by_trees(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follow-up that continues a finished text hits its KV and goes on as if computed anew."""
    prompt, extra = random_prompts([50, 7], seed=22)
    params = GREEDY | {"max_new_tokens": 40}
    text = run_under(harness, "plain", [prompt], params)[0]
    follow_up = prompt + text + extra
    harness.flush_cache()
    cold = run_under(harness, "plain", [follow_up], params)[0]
    drafts = ScriptedDrafts(seed=2)
    drafts.install(monkeypatch)
    for name in TREES:
        harness.flush_cache()
        rids = [f"hit-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(2)]
        drafts.know(rids[0], prompt, text)
        drafts.know(rids[1], follow_up, cold)
        assert run_under(harness, name, [prompt], params, [rids[0]])[0] == text
        assert run_under(harness, name, [follow_up], params, [rids[1]])[0] == cold
        assert harness.outputs[rids[1]].cached_tokens >= len(prompt) + len(text) - 1


def test_chunked_prefill_between_tree_steps(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive, some with prompts of several chunks, while others are in the middle."""
    prompts = random_prompts([20, 300, 10, 150, 64, 65], seed=23)
    params = GREEDY | {"max_new_tokens": 40}
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


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_in_the_middle_of_trees(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    harness = engine(
        **server_args(pair[1], chunked_prefill_size=64, disable_overlap_schedule=not overlap)
    )
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


def test_retraction_under_memory_pressure(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool too small for all requests makes the scheduler take some back; texts stay the same.

    What they put out before still counts for their penalties, and their grammars stand behind it.
    """
    harness = engine(**server_args(pair[1], rows=32, max_total_tokens=700))
    prompts = random_prompts([60, 50, 70, 40], seed=25)
    params = {"temperature": 0.8, "sampling_seed": 9, "ignore_eos": True, "max_new_tokens": 110}
    ruled = {"frequency_penalty": 0.4, "repetition_penalty": 1.2, "regex": "([a-c]{2}[0-9] )*"}
    every = [params | ruled, params] * 2
    alone = []
    for prompt, one in zip(prompts, every, strict=True):
        harness.flush_cache()
        alone.append(run_under(harness, "plain", [prompt], one)[0])
    retracted = []
    release = type(harness.scheduler.running_batch).release_req

    def counting(batch: Any, index: int, *arguments: object) -> object:
        retracted.append(batch.reqs[index].sampling_params.frequency_penalty)
        return release(batch, index, *arguments)

    monkeypatch.setattr(type(harness.scheduler.running_batch), "release_req", counting)
    harness.flush_cache()
    assert run_under(harness, "tree-15", prompts, every) == alone
    assert any(retracted), "the pool was large enough: the test shows nothing"
