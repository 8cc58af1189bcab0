"""DDTREE with pages of several slots: texts, KV, prefix cache, and what becomes of every page.

The pool is small and the context short, so that one engine sees evictions, retraction and the end
of the context. SGLang's own checks of pages are on, and after each test every page must be free or
the prefix cache's, and every text in its pages in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cache_checks import (
    check_aborts,
    check_chunks_between_steps,
    check_committed_kv,
    check_eviction,
    check_prefix_hits,
    check_retraction,
    note_retracted,
)
from ddtree_support import (
    GREEDY,
    ScriptedDrafts,
    check_scripted,
    policy,
    random_prompts,
    run_under,
    server_args,
)

from overstory.workers.defrag.audit import SlotsAstray, audit
from overstory.workers.defrag.holders import live_requests, nodes
from overstory.workers.defrag.relocate import CannotRelocate, take_picture
from overstory.workers.tiny.oracle import Oracle

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
CONTEXT = 256
POLICIES = ("plain", "chain", "tree-15", "tree-31", "spine-15")
EDGES = (3, 15, 16, 17, 48, 63, 64, 65)
"""Lengths of prompts around the ends of pages."""


def arguments(drafter: str, page_size: int, overlap: bool = True) -> dict[str, Any]:
    return server_args(
        drafter,
        rows=32,
        page_size=page_size,
        context_length=CONTEXT,
        chunked_prefill_size=64,
        max_total_tokens=768,
        disable_overlap_schedule=not overlap,
    )


@pytest.fixture(
    scope="module",
    params=[
        (16, True),
        pytest.param((16, False), marks=pytest.mark.full),
        pytest.param((64, True), marks=pytest.mark.full),
        pytest.param((64, False), marks=pytest.mark.full),
    ],
    ids=lambda shape: f"pages-of-{shape[0]}-{'' if shape[1] else 'no-'}overlap",
)
def shape(request: pytest.FixtureRequest) -> tuple[int, bool]:
    given: tuple[int, bool] = request.param
    return given


@pytest.fixture
def checks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SGLang: pages neither owned twice nor by nobody, each allocation in its pages."""
    monkeypatch.setenv("SGLANG_CHECK_KV_PAGE_INVARIANTS", "1")
    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")


@pytest.fixture
def harness(
    checks_on: None, engine: Engine, pair: tuple[str, str], shape: tuple[int, bool]
) -> Iterator[EngineHarness]:
    held = engine(**arguments(pair[1], *shape))
    allocator = held.scheduler.token_to_kv_pool_allocator
    assert (type(allocator).__name__, allocator.page_size) == (
        "PagedTokenToKVPoolAllocator",
        shape[0],
    )
    assert allocator.debug_mode
    held.flush_cache()
    yield held
    held.assert_no_leak()
    held.at_boundary(audit)
    held.flush_cache()
    assert held.free_slots() == allocator.num_pages * shape[0]


@pytest.mark.parametrize(
    "policies",
    [("chain", "tree-31"), pytest.param(POLICIES, marks=pytest.mark.full)],
    ids=["some", "all"],
)
def test_texts_are_those_of_the_oracle(
    harness: EngineHarness,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
) -> None:
    """All in one batch that the pool does not hold: token for token what plain PyTorch decodes."""
    prompts = random_prompts(EDGES, seed=71)
    oracle = Oracle.load(*pair)
    wanted = [oracle.greedy(prompt, 24, ignore_eos=True) for prompt in prompts]
    params = GREEDY | {"max_new_tokens": 24}
    retracted = note_retracted(harness, monkeypatch)
    check_scripted(harness, prompts, params, wanted, monkeypatch, policies, seed=71)
    assert retracted, "the pool was large enough"


@pytest.mark.parametrize("name", ["tree-31", pytest.param("chain", marks=pytest.mark.full)])
def test_committed_kv_equals_prefill(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check_committed_kv(harness, monkeypatch, name)


def test_hits_are_whole_pages(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    check_prefix_hits(harness, monkeypatch, ("tree-31",))


def test_chunked_prefill_between_steps(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_chunks_between_steps(harness, monkeypatch)


def test_aborts(harness: EngineHarness) -> None:
    check_aborts(harness)


@pytest.mark.full
def test_retraction_of_requests_with_rules(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_retraction(harness, monkeypatch)


def test_eviction(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    check_eviction(harness, monkeypatch)


def test_the_end_of_the_context(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's window there reaches beyond the context, into the last page's rest."""
    prompts = random_prompts([200, 233, 240], seed=73)
    params = GREEDY | {"max_new_tokens": CONTEXT}
    plain = run_under(harness, "plain", prompts, params)
    left = [CONTEXT - len(prompt) - len(text) for prompt, text in zip(prompts, plain, strict=True)]
    assert set(left) == {2}, "SGLang ends a request 2 tokens before its context does"
    drafts = ScriptedDrafts(seed=73)
    drafts.install(monkeypatch)
    for name in ("chain", "tree-31"):
        rids = [f"ctx-{name}-{i}-{harness.scheduler.forward_ct}" for i in range(len(prompts))]
        for rid, prompt, text in zip(rids, prompts, plain, strict=True):
            drafts.know(rid, prompt, text)
        assert run_under(harness, name, prompts, params, rids) == plain


def test_ends_inside_a_path(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """By stop tokens and limits: what lies behind the end is in pages that go back, too."""
    (prompt,) = random_prompts([43], seed=76)
    (text,) = run_under(harness, "plain", [prompt], GREEDY | {"max_new_tokens": 24})
    params: list[dict[str, Any]] = [GREEDY | {"max_new_tokens": n} for n in (1, 4, 5, 13, 22)]
    stops = [text[at] for at in (3, 9, 20)]
    params += [
        {"temperature": 0.0, "stop_token_ids": [stop], "max_new_tokens": 24} for stop in stops
    ]
    wanted = [text[:n] for n in (1, 4, 5, 13, 22)]
    wanted += [text[: text.index(stop) + 1] for stop in stops]
    drafts = ScriptedDrafts(seed=76)
    drafts.install(monkeypatch)
    rids = [f"ends-{i}-{harness.scheduler.forward_ct}" for i in range(len(params))]
    for rid in rids:
        drafts.know(rid, prompt, text)
    assert run_under(harness, "tree-31", [prompt] * len(params), params, rids) == wanted


def test_pages_in_the_middle_of_texts(harness: EngineHarness, shape: tuple[int, bool]) -> None:
    """Every few steps: whole pages, each one's own; and the audit sees where it is not so."""
    prompts = random_prompts([20, 100, 47], seed=74)
    with policy("tree-31"):
        rids = [harness.submit(p, GREEDY | {"max_new_tokens": 60}) for p in prompts]
        for _ in range(5):
            harness.step(2)
            harness.at_boundary(audit)
        allocated = [r.kv.kv_allocated_len for r in live_requests(harness.scheduler)]
        assert allocated
        assert all(length % shape[0] == 0 for length in allocated)
        for slots, fault, words in _faults(harness.scheduler):
            right = slots.clone()
            _write(slots, fault(right))
            with pytest.raises(SlotsAstray, match=words):
                harness.at_boundary(audit)
            _write(slots, right)
        with pytest.raises(CannotRelocate, match=f"pages of {shape[0]} .*engine.page_size 1"):
            harness.at_boundary(take_picture)
        harness.run(rids)


def _faults(scheduler: Any) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], Any], str]]:
    request = live_requests(scheduler)[0]
    row = scheduler.req_to_token_pool.req_to_token[request.req_pool_idx]
    tail = row[request.kv.kv_allocated_len - 2 : request.kv.kv_allocated_len]
    yield tail, lambda slots: slots.flip(0), "1 texts do not lie in whole pages"
    yield next(nodes(scheduler)).value, lambda slots: slots + 1, "do not lie in whole pages"
    free = scheduler.token_to_kv_pool_allocator.free_pages[:1]
    yield free, lambda pages: pages * 0 + 10**6, r"1 page numbers are not in 1\.\."
    yield free, lambda pages: pages * 0 + row[0] // scheduler.page_size, "held twice"


def _write(slots: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode():  # Some were made in it.
        slots.copy_(values)


@pytest.mark.full
@pytest.mark.parametrize("page_size", [16, 64])
def test_two_ranks(
    checks_on: None,
    engine_tp2: Engine,
    pair: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    page_size: int,
) -> None:
    """TP 2: the same texts, and alike pages on both ranks after aborts and retraction."""
    two = engine_tp2(**arguments(pair[1], page_size))
    prompts = random_prompts(EDGES, seed=75)
    oracle = Oracle.load(*pair)
    wanted = [oracle.greedy(prompt, 24, ignore_eos=True) for prompt in prompts]
    params = GREEDY | {"max_new_tokens": 24}
    check_scripted(two, prompts, params, wanted, monkeypatch, ("plain", "chain", "tree-31"), 75)
    check_aborts(two)
    assert len(two.at_boundary(audit)) == 2
