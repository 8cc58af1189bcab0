"""Relocation passes under fire: the output is that without them, and slot numbers add up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ddtree_support import (
    GREEDY,
    SAMPLED,
    ScriptedDrafts,
    policy,
    random_prompts,
    run_under,
    server_args,
)
from defrag_support import EPOCH, Passes, checked_pass, random_plan

from overstory.orchestrator.defrag_plan import Plan, measure, permutation, plan_moves
from overstory.workers.commands import CommandContext, CommandTable
from overstory.workers.defrag import handlers
from overstory.workers.defrag import relocate as relocate_module
from overstory.workers.defrag.audit import SlotsAstray, audit
from overstory.workers.defrag.holders import holders, live_requests, nodes
from overstory.workers.defrag.relocate import (
    CannotRelocate,
    pool_buffers,
    relocate,
    take_picture,
)
from overstory.workers.handoff.commands import KvHandoff
from overstory.workers.scheduler_view import SglangScheduler

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]
ARGUMENTS = {"rows": 32, "chunked_prefill_size": 64}


def mixed(length: int, seed: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Short and long prompts, two of which share a prefix; greedy and seeded requests."""
    prompts = random_prompts([9, 150, 40, 23], seed)
    prompts.append(prompts[1][:100] + prompts[2])
    params: list[dict[str, Any]] = [GREEDY | {"max_new_tokens": length} for _ in range(3)]
    for i, one in enumerate(SAMPLED[:2]):
        params.append(one | {"sampling_seed": 60 + i, "ignore_eos": True, "max_new_tokens": length})
    params[0] = params[0] | {"frequency_penalty": 0.3, "min_new_tokens": 4}
    params[3] = params[3] | {"regex": r"[a-z ]{4,60}\."}
    return prompts, params


def check_outputs(
    harness: EngineHarness,
    monkeypatch: pytest.MonkeyPatch,
    policies: tuple[str, ...],
    length: int,
    seed: int,
) -> None:
    """Requests arrive while others run; one is aborted; passes come every few steps."""
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


def test_output_with_passes_equals_output_without(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in three passes move random slots, used and free; overlapped scheduling."""
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    check_outputs(harness, monkeypatch, ("tree-15",), length=28, seed=31)


@contextmanager
def running(harness: EngineHarness) -> Iterator[list[str]]:
    """Requests in the middle of their text, one of them at its second prefill chunk."""
    prompts, params = mixed(60, seed=33)
    with policy("chain"):
        rids = [harness.submit(p, s) for p, s in zip(prompts, params, strict=True)]
        harness.step(4)
        rids.append(harness.submit(random_prompts([200], seed=34)[0], params[0]))
        harness.step(2)
        try:
            yield rids
        finally:
            for rid in rids:
                harness.abort(rid)
            harness.run(rids)
    harness.assert_no_leak()


def test_a_planned_pass_gathers_running_requests(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    harness.flush_cache()
    with running(harness):
        table = harness.scheduler.req_to_token_pool.req_to_token
        address = table.data_ptr()
        harness.at_boundary(checked_pass, random_plan_here(harness, rows=200))
        harness.step()
        picture = harness.at_boundary(take_picture)[0]
        worker = harness.scheduler.model_worker
        drafter = worker.draft_model_runner.token_to_kv_pool
        both = [*worker.model_runner.token_to_kv_pool.kv_buffer, *drafter.k_buffer]
        both += drafter.v_buffer
        assert [b.data_ptr() for b in pool_buffers(harness.scheduler)] == [
            b.data_ptr() for b in both
        ]
        assert picture.row_bytes == sum(b[0].numel() * b.element_size() for b in both)
        plan = plan_moves(picture, EPOCH, 4096)
        done = harness.at_boundary(checked_pass, plan)[0]
        assert done.rows == plan.rows > 0
        after = measure(harness.at_boundary(take_picture)[0])
        assert after == plan.after
        assert after.runs < plan.before.runs / 4
        assert table.data_ptr() == address, "a CUDA graph would read the old table"


def _stale_row(scheduler: Any) -> torch.Tensor:
    request = next(r for r in live_requests(scheduler) if r.cache_protected_len > 1)
    return scheduler.req_to_token_pool.req_to_token[request.req_pool_idx, :2]


def _twice_in_a_row(scheduler: Any) -> torch.Tensor:
    request = live_requests(scheduler)[0]
    return scheduler.req_to_token_pool.req_to_token[
        request.req_pool_idx, request.kv.kv_allocated_len - 1 : request.kv.kv_allocated_len
    ]


def _noted_prefix(scheduler: Any) -> torch.Tensor:
    found = (r.prefix_indices for r in live_requests(scheduler) if len(r.prefix_indices) > 1)
    return next(found)[:2]


def _cached_node(scheduler: Any) -> torch.Tensor:
    return next(node.value for node in nodes(scheduler) if len(node.value) > 1)[:2]


def _free_slots(scheduler: Any) -> torch.Tensor:
    return scheduler.token_to_kv_pool_allocator.free_pages[:1]


@pytest.mark.parametrize(
    ("holder", "fault", "why"),
    [
        (_stale_row, lambda slots: slots.flip(0), "differs from the prefix in the cache"),
        (_noted_prefix, lambda slots: slots.flip(0), "differs from the prefix that it noted"),
        (_cached_node, lambda slots: slots.flip(0), "differs from the prefix in the cache"),
        (_cached_node, lambda slots: slots[:1].repeat(2), "1 slots are nobody's.*held twice"),
        (_twice_in_a_row, lambda slots: slots - slots + 1, "slots are nobody's.*held twice"),
        (_free_slots, lambda slots: slots - slots + 10**6, r"1 slot numbers are not in 1\.\."),
    ],
)
def test_the_audit_finds_what_was_not_rewritten(
    engine: Engine,
    pair: tuple[str, str],
    holder: Callable[[Any], torch.Tensor],
    fault: Callable[[torch.Tensor], torch.Tensor],
    why: str,
) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    with running(harness):
        harness.at_boundary(audit)
        slots = holder(harness.scheduler)
        right = slots.clone()
        plan = random_plan_here(harness)
        try:
            _write(slots, fault(right))
            with pytest.raises(SlotsAstray, match=why):
                harness.at_boundary(audit)
            with pytest.raises(CannotRelocate, match=why):
                harness.at_boundary(relocate, plan)
        finally:
            _write(slots, right)
        harness.at_boundary(audit)


@pytest.mark.parametrize(
    "holder", ["ReqToTokenPool.req_to_token", "Req.prefix_indices", "TreeNode.value"]
)
def test_a_holder_that_a_pass_forgets_ends_the_rank(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, holder: str
) -> None:
    """The error is none of those that a command refuses with: it leaves the loop."""
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    with running(harness):
        found = harness.at_boundary(lambda scheduler: list(holders(scheduler)))[0]
        forgotten = [one.slots for one in found if one.name == holder]
        kept = [one for one in found if one.name != holder]
        table = torch.from_numpy(permutation(plan := random_plan_here(harness, rows=300)))
        with monkeypatch.context() as without:
            without.setattr(relocate_module, "holders", lambda _: iter(kept))
            with pytest.raises(SlotsAstray):
                command(harness, handlers.relocate, plan=plan)
        for slots in forgotten:  # Done now, for the engine's other tests.
            _write(slots, table[slots.long()].to(slots.dtype))
        harness.at_boundary(audit)


def _write(slots: torch.Tensor, values: torch.Tensor) -> None:
    with torch.inference_mode():  # Some were made in it.
        slots.copy_(values)


def random_plan_here(harness: EngineHarness, rows: int = 20) -> Plan:
    return random_plan(harness.at_boundary(take_picture)[0], random.Random(1), rows)


def test_an_unlisted_holder_keeps_slots_from_moving(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    with running(harness):
        plan = random_plan_here(harness)
        harness.scheduler.tree_cache.kept_slots = [torch.arange(3)]
        with pytest.raises(CannotRelocate, match=r"RadixCache\.kept_slots may hold slots"):
            harness.at_boundary(relocate, plan, True)
        refused = command(harness, handlers.slot_picture, key="k", strict=True)
        assert "RadixCache.kept_slots" in refused["refused"]
        del harness.scheduler.tree_cache.kept_slots
        harness.at_boundary(checked_pass, plan)


def command(harness: EngineHarness, handler: Any, **arguments: Any) -> dict[str, Any]:
    """Result of a boundary command on rank 0, from a controller of epoch `EPOCH`."""
    context = CommandContext(0, SglangScheduler(harness.scheduler), EPOCH)
    answer: dict[str, Any] = harness.at_boundary(lambda _: handler(context, arguments))[0]
    return answer


def test_the_commands(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    with running(harness):
        seen = command(harness, handlers.slot_picture, key="one", strict=True)
        with pytest.raises(ValueError, match="another was taken since"):
            handlers.SHELF.take("other")
        picture = handlers.SHELF.take("one")
        assert seen["fragmentation"]["rows"] == measure(picture).rows > 0
        with pytest.raises(ValueError, match="no slot picture 'one' here"):
            handlers.SHELF.take("one")
        plan = plan_moves(picture, EPOCH, 100)
        done = command(harness, handlers.relocate, plan=plan)
        assert (done["plan"], done["rows"]) == (plan.digest, plan.rows)
        assert done["pause_ms"] > done["copy_ms"] > 0
        other = Plan(EPOCH + 1, plan.size, plan.sources, plan.targets, plan.before, plan.after)
        refused = command(harness, handlers.relocate, plan=other)["refused"]
        assert "epoch 2, the replica is at 1" in refused


def test_rows_that_are_handed_over_stay_where_they_are(
    engine: Engine, pair: tuple[str, str]
) -> None:
    """The giving thread goes by the slots that were held, between boundaries: a pass meanwhile
    would have it send other rows, with right checksums."""
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    harness.flush_cache()
    prompt = random_prompts([80], seed=38)[0]
    run_under(harness, "plain", [prompt], [GREEDY | {"max_new_tokens": 4}])
    handoff, table = KvHandoff(), CommandTable()
    handoff.register(table)
    handlers.register(table, handoff.holding)

    def act(name: str, **arguments: Any) -> dict[str, Any]:
        with torch.inference_mode():
            return command(harness, lambda *given: table.carry_out(name, *given), **arguments)

    hold = {"key": "k", "texts": [{"rid": "gone", "tokens": prompt}]}
    assert act("kv_hold", **hold)["lengths"] == [len(prompt)]
    slots = handoff._held["k"].texts[0].slots.clone()
    plan = random_plan_here(harness, rows=300)
    assert set(plan.sources) & set(slots.tolist())
    refused = act("relocate", plan=plan)["refused"]
    assert "must stay where they are" in refused
    assert torch.equal(handoff._held["k"].texts[0].slots, slots)
    handoff.led_by(CommandContext(0, SglangScheduler(harness.scheduler), EPOCH))
    assert handoff.holding() == 1, "its own controller leads on"
    harness.at_boundary(
        lambda scheduler: handoff.led_by(CommandContext(0, SglangScheduler(scheduler), EPOCH + 1))
    )
    assert handoff.holding() == 0, "a controller that is gone ends nothing any more"
    assert handoff.outgoing()["fetched"] == [], "its successor may still ask"
    assert act("relocate", plan=plan)["rows"] > 0
    harness.assert_no_leak()


def test_free_slots_are_handed_out_in_order(engine: Engine, pair: tuple[str, str]) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    harness.flush_cache()
    allocator = harness.scheduler.token_to_kv_pool_allocator
    size = allocator.size
    held = allocator.alloc(size)
    assert held is not None
    for freed in (held[5:9], held[1:3], held[7:4], held[20:40]):
        allocator.free(freed)
    got = allocator.alloc(10)
    assert got.tolist() == sorted(got.tolist())
    allocator.free(held[[*range(1), *range(3, 5), *range(9, 20), *range(40, size)]])
    allocator.free(got)
    harness.assert_no_leak()


def test_retraction_between_passes(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool too small for all: requests are taken back and begin anew, in slots that move."""
    harness = engine(**server_args(pair[1], rows=32, max_total_tokens=500))
    prompts = random_prompts([60, 50, 70], seed=35)
    params = {"temperature": 0.8, "sampling_seed": 9, "ignore_eos": True, "max_new_tokens": 90}
    alone = []
    for prompt in prompts:
        harness.flush_cache()
        alone.append(run_under(harness, "plain", [prompt], params)[0])
    retracted: list[int] = []
    batch = type(harness.scheduler.running_batch)
    release = batch.release_req

    def counting(self: Any, index: int, *arguments: Any) -> Any:
        retracted.append(index)
        return release(self, index, *arguments)

    monkeypatch.setattr(batch, "release_req", counting)
    harness.flush_cache()
    with policy("tree-15"):
        rids = [harness.submit(prompt, params) for prompt in prompts]
        Passes(harness, 36).run(rids)
    assert [harness.outputs[rid].ids for rid in rids] == alone
    assert retracted, "the pool was large enough: the test shows nothing"
    harness.assert_no_leak()


def test_two_ranks_move_alike(
    engine_tp2: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = engine_tp2(**server_args(pair[1], **ARGUMENTS))
    check_outputs(harness, monkeypatch, ("tree-15",), length=16, seed=32)


@pytest.mark.full
@pytest.mark.parametrize(
    "more",
    [
        {"disable_overlap_schedule": True},
        {"disable_radix_cache": True},
        {"speculative_algorithm": None, "speculative_draft_model_path": None},
    ],
    ids=lambda more: next(iter(more)),
)
def test_output_with_passes_on_other_engines(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS, **more))
    names = ("plain",) if "speculative_algorithm" in more else ("plain", "chain", "tree-31")
    check_outputs(harness, monkeypatch, names, length=40, seed=37)


@pytest.mark.full
@pytest.mark.parametrize("seed", [41, 42])
def test_output_with_passes_under_all_policies(
    engine: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    harness = engine(**server_args(pair[1], **ARGUMENTS))
    names = ("plain", "chain", "tree-8", "tree-31", "spine-15")
    check_outputs(harness, monkeypatch, names, length=48, seed=seed)


@pytest.mark.full
@pytest.mark.parametrize("overlap", [True, False])
def test_two_ranks_move_alike_for_long(
    engine_tp2: Engine, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    harness = engine_tp2(**server_args(pair[1], **ARGUMENTS, disable_overlap_schedule=not overlap))
    check_outputs(harness, monkeypatch, ("plain", "chain", "tree-15"), length=40, seed=43)
