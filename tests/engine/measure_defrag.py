"""What sorted slots and relocation passes gain and cost on a CPU, over a trace of many tenants.

The allocator, prefix cache, slot rows, plans and passes are the real ones; there is no model.
Allocator and copies are in CPU time, pauses in wall time.

    .venv/bin/python tests/engine/measure_defrag.py --json docs/benchmarks/defrag.json
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overstory.workers.environment import prepare_process

SEEDS = (1, 2, 3)
WARM_STEPS = 300
STEPS = 500
LOOK_EVERY = 20
PASS_EVERY = (100, 20)
"""Steps between two passes, in the traces with some."""
PASS_ROWS = 1024
COPY_ROUNDS = 15
FIELDS = (
    "runs_per_request",
    "rows_per_run",
    "worst_runs",
    "contiguous_share",
    "free_runs",
    "largest_free_run",
)


def run_trace(
    policy: str, seed: int, pass_every: int = 0, top_up: bool = True
) -> tuple[Any, list[Any], list[Any], float]:
    """The trace at its end; a measurement every `LOOK_EVERY` steps; the passes; allocator us."""
    import torch
    from churn_trace import LAYERS, ROW, SLOTS, ChurnTrace

    from overstory.orchestrator.defrag_plan import measure, plan_moves
    from overstory.workers.defrag.relocate import relocate, take_picture

    buffers = [torch.zeros(SLOTS + 1, 1, ROW, dtype=torch.bfloat16) for _ in range(LAYERS)]
    trace = ChurnTrace(seed, policy, top_up, buffers)
    seen, passes = [], []
    for step in range(WARM_STEPS + STEPS):
        if step == WARM_STEPS:
            trace.allocator_s = 0.0
        trace.step()
        if pass_every and step % pass_every == 0:
            plan = plan_moves(take_picture(trace), 1, PASS_ROWS)
            trace.step()  # A plan comes to the ranks some steps after its picture.
            passes.append((plan, relocate(trace, plan)))
        if step >= WARM_STEPS and step % LOOK_EVERY == 0:
            seen.append(measure(take_picture(trace)))
    return trace, seen, passes, trace.allocator_s / STEPS * 1e6


def figures(seen: Sequence[Any]) -> dict[str, float]:
    """Means of what was measured along the trace."""
    rows = [
        {
            **dataclasses.asdict(one),
            "runs_per_request": one.runs_per_request,
            "rows_per_run": one.rows / max(1, one.runs),
        }
        for one in seen
    ]
    return {name: round(statistics.mean(row[name] for row in rows), 4) for name in FIELDS}


def compare_policies(top_up: bool) -> dict[str, Any]:
    """Fragmentation and allocator time of each way to hand out free slots."""
    result: dict[str, Any] = {}
    for policy in ("as_freed", "lazy", "eager", "best_fit"):
        runs = [run_trace(policy, seed, top_up=top_up) for seed in SEEDS]
        result[policy] = {
            **figures([one for _, seen, _, _ in runs for one in seen]),
            "allocator_cpu_us_per_step": round(statistics.median(us for *_, us in runs), 1),
        }
    return result


def compare_passes(top_up: bool) -> dict[str, Any]:
    """The same figures with passes in the trace, and what they cost."""
    result: dict[str, Any] = {}
    for every in PASS_EVERY:
        runs = [run_trace("lazy", seed, every, top_up) for seed in SEEDS]
        passes = [one for _, _, some, _ in runs for one in some]
        result[f"every_{every}_steps"] = {
            **figures([one for _, seen, _, _ in runs for one in seen]),
            "rows_per_pass": round(statistics.mean(done.rows for _, done in passes), 1),
            "planned_rows": round(statistics.mean(plan.rows for plan, _ in passes), 1),
            "pause_ms_median": round(statistics.median(done.pause_ms for _, done in passes), 2),
            "pause_ms_max": round(max(done.pause_ms for _, done in passes), 2),
            "copy_ms_median": round(statistics.median(done.copy_ms for _, done in passes), 2),
        }
    return result


def one_job(top_up: bool, long_run: int) -> dict[str, Any]:
    """A whole `overstory defrag` on the pool that the trace leaves, and copying requests out."""
    from overstory.orchestrator.defrag_plan import measure, plan_moves
    from overstory.workers.defrag.relocate import relocate, take_picture

    trace, *_ = run_trace("lazy", SEEDS[0], top_up=top_up)
    before, copied = measure(take_picture(trace)), copy_out(trace)
    passes, plan_ms = [], []
    while True:
        picture, begun = take_picture(trace), time.perf_counter()
        plan = plan_moves(picture, 1, PASS_ROWS, long_run)
        plan_ms.append((time.perf_counter() - begun) * 1e3)
        if not plan.rows:
            break
        passes.append(relocate(trace, plan))
    return {
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(measure(take_picture(trace))),
        "passes": len(passes),
        "rows": sum(one.rows for one in passes),
        "pause_ms_median": round(statistics.median(one.pause_ms for one in passes), 2),
        "pause_ms_max": round(max(one.pause_ms for one in passes), 2),
        "plan_ms_median": round(statistics.median(plan_ms), 1),
        "copy_out_before": copied,
        "copy_out_after": copy_out(trace),
    }


def copy_out(trace: Any) -> dict[str, Any]:
    """Copies the KV of every running request to a buffer of its own, run by run and by index."""
    import torch

    from overstory.orchestrator.defrag_plan import runs_of
    from overstory.workers.defrag.relocate import pool_buffers

    buffers = pool_buffers(trace)
    table = trace.req_to_token_pool.req_to_token
    rows = [table[r.req_pool_idx, : r.kv_committed_len].long() for r in trace.running]
    spans = [stretches(slots) for slots in rows]
    out = torch.empty(max(map(len, rows)), *buffers[0].shape[1:], dtype=buffers[0].dtype)

    def by_runs() -> None:
        for some in spans:
            for buffer in buffers:
                at = 0
                for begin, end in some:
                    out[at : at + end - begin] = buffer[begin:end]
                    at += end - begin

    def by_index() -> None:
        for slots in rows:
            for buffer in buffers:
                torch.index_select(buffer, 0, slots, out=out[: len(slots)])

    calls = len(buffers) * sum(map(len, spans))
    assert calls == len(buffers) * sum(runs_of(slots.numpy()) for slots in rows)
    return {
        "requests": len(rows),
        "bytes": sum(map(len, rows)) * len(buffers) * buffers[0][0].numel() * 2,
        "calls_by_runs": calls,
        "cpu_ms_by_runs": timed(by_runs),
        "cpu_ms_by_index": timed(by_index),
    }


def stretches(slots: Any) -> list[tuple[int, int]]:
    """First slot and the one after the last, of each run."""
    edges = (slots.diff() != 1).nonzero().view(-1).tolist()
    begins = [0, *(edge + 1 for edge in edges)]
    ends = [*(edge + 1 for edge in edges), len(slots)]
    first = slots.tolist()
    return [(first[a], first[b - 1] + 1) for a, b in zip(begins, ends, strict=True)]


def timed(act: Callable[[], None]) -> float:
    """Median milliseconds of CPU time."""
    spent = []
    for _ in range(COPY_ROUNDS):
        begun = time.thread_time()
        act()
        spent.append((time.thread_time() - begun) * 1e3)
    return round(statistics.median(spent), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    prepare_process("cpu")
    import churn_trace
    import torch

    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "slots": churn_trace.SLOTS,
        "running": churn_trace.RUNNING,
        "tenants": churn_trace.TENANTS,
        "row_bytes": churn_trace.LAYERS * churn_trace.ROW * 2,
        "rows_per_pass": PASS_ROWS,
        "slots_as_each_step_lacks_them": compare_policies(top_up=False),
        "topped_up_in_blocks": compare_policies(top_up=True),
        "as_each_step_lacks_them_lazy_with_passes": compare_passes(top_up=False),
        "topped_up_lazy_with_passes": compare_passes(top_up=True),
        "job_as_each_step_lacks_them": one_job(top_up=False, long_run=64),
        "job_topped_up": one_job(top_up=True, long_run=64),
        "job_topped_up_long_run_1000": one_job(top_up=True, long_run=1000),
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
