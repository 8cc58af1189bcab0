"""Passes in the middle of generation, for the defragmentation tests. Every rank imports this."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from overstory.orchestrator.defrag_plan import Plan, measure, plan_moves
from overstory.workers.defrag.audit import audit
from overstory.workers.defrag.holders import live_requests
from overstory.workers.defrag.relocate import PassDone, pool_buffers, relocate, take_picture

if TYPE_CHECKING:
    from harness import EngineHarness

EPOCH = 1


def random_plan(picture: Any, draw: random.Random, rows: int) -> Plan:
    """Random moves over the whole pool: held and free slots, chains and cycles."""
    slots = range(1, picture.size + 1)
    held = sorted({int(slot) for s in picture.sequences for slot in s.slots})
    sources = draw.sample(held, min(rows, len(held)))
    targets = draw.sample(slots, len(sources))
    seen = measure(picture)
    return Plan(EPOCH, picture.size, tuple(sources), tuple(targets), seen, seen)


def contents(scheduler: Any) -> dict[str, torch.Tensor]:
    """Committed KV of each live request, all layers of both pools side by side."""
    buffers = pool_buffers(scheduler)
    table = scheduler.req_to_token_pool.req_to_token
    return {
        request.rid: torch.cat(
            [
                buffer[table[request.req_pool_idx, : request.kv_committed_len].long()].flatten(1)
                for buffer in buffers
            ],
            dim=1,
        )
        for request in live_requests(scheduler)
    }


def checked_pass(scheduler: Any, plan: Plan) -> PassDone:
    """A pass that must leave every request's KV as it was, and slot numbers that add up."""
    before = contents(scheduler)
    done = relocate(scheduler, plan, look_for_unknown=True)
    audit(scheduler)
    after = contents(scheduler)
    assert before.keys() == after.keys()
    for rid, kv in before.items():
        assert torch.equal(kv, after[rid]), f"the KV of {rid} has changed"
    return done


class Passes:
    """Carries passes out every few steps of a harness; counts the rows that moved."""

    def __init__(self, harness: EngineHarness, seed: int) -> None:
        self._harness = harness
        self._draw = random.Random(seed)
        self._stale: Plan | None = None
        self.rows = 0
        self.passes = 0

    def one(self) -> PassDone:
        """A random plan, one that gathers, or one that was made some passes ago."""
        picture = self._harness.at_boundary(take_picture)[0]
        kind = self._draw.randrange(4)
        plan = random_plan(picture, self._draw, (300, 1, 60, 7)[self.passes % 4])
        if kind == 0:
            plan = plan_moves(picture, EPOCH, 200, long_run=1000)
        if kind == 1 and self._stale is not None:
            plan = self._stale
        if kind > 1:
            self._stale = plan
        first, *others = self._harness.at_boundary(checked_pass, plan)
        for other in others:
            assert (other.plan, other.state, other.rows) == (first.plan, first.state, first.rows)
        self.rows += first.rows
        self.passes += 1
        return first

    def run(self, rids: list[str], max_steps: int = 3000) -> None:
        """Steps until the requests are done, with a pass before every 1 to 3 steps."""
        for _ in range(max_steps):
            if all(self._harness.outputs[rid].done for rid in rids):
                return
            self.one()
            self._harness.step(self._draw.randrange(1, 4))
        raise AssertionError(f"not done after {max_steps} steps")
