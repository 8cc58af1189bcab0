"""What a step under a lease calls where nothing is due: on a GPU each function costs a step."""

from __future__ import annotations

import sys
from array import array
from types import SimpleNamespace
from typing import Any

from overstory.orchestrator.lease import Lease
from overstory.workers.digest import DigestChain
from overstory.workers.gate import StepGate
from overstory.workers.scheduler_view import SglangScheduler, note_choice

REQUESTS = 3


class _Request:
    """As much of SGLang's `Req` as is noted."""

    def __init__(self, number: int) -> None:
        self.rid, self.req_pool_idx = f"r{number}", number
        self.origin_input_ids, self.output_ids = [1, 2, 3], array("q")
        self.finished_reason, self.kv_committed_len = None, 3


def _scheduler() -> Any:
    """As much of SGLang's as is asked, on a GPU."""
    requests = [_Request(number) for number in range(REQUESTS)]
    return SimpleNamespace(
        forward_ct=0,
        _engine_paused=False,
        running_batch=SimpleNamespace(reqs=requests),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        device="cuda",
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 60),
    )


def test_a_quiet_step_takes_one_call_of_each_part() -> None:
    scheduler = _scheduler()
    view, chain = SglangScheduler(scheduler), DigestChain()
    notes = view.notes(chain)
    gate = StepGate(0, 30.0, lambda lease: notes.lease(lease.steps))
    gate.offer(Lease(gate.attach(), 1, 64, "chain"))
    called: list[str] = []

    def step() -> None:
        begins = gate.before_pull(view)
        gate.after_broadcast(begins, view)
        scheduler.forward_ct += 1
        batch = SimpleNamespace(
            reqs=scheduler.running_batch.reqs, forward_iter=scheduler.forward_ct
        )
        for request in batch.reqs:
            request.output_ids.append(7)
        result = SimpleNamespace()
        note_choice(result, "chain")
        notes.note(batch, result)

    def noted(frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    for _ in range(3):
        step()
    sys.setprofile(noted)
    try:
        step()
    finally:
        sys.setprofile(None)
    assert [name for name in called if name not in ("step", "note_choice")] == [
        "before_pull", "running_at", "after_broadcast", "note",
    ]  # fmt: skip
    notes.close()
    facts = chain.facts(4)
    assert facts is not None
    assert [list(given.values()) for given in facts.emitted()] == [[(7,)] * REQUESTS] * 4
