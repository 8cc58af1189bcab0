"""How long a relocation pass keeps a rank from stepping: rows of a large model on a GPU.

The allocator, prefix cache, slot rows and passes are the real ones, under a trace of many tenants;
there is no model. Random moves, by the CUDA kernel and by torch's indexing in turn; after each pass
the KV of every running request must be what it was.

    PYTHONPATH=tests/engine python tests/gpu/defrag_pause.py --json docs/benchmarks/defrag_h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

ROWS = (64, 256, 1024, 4096)
WARM_STEPS = 300
STEPS_BETWEEN = 2
WAYS = {"kernel": "auto", "torch": "reference"}


def contents(trace: Any) -> dict[str, Any]:
    """KV of each running request, [layers, rows, row]."""
    import torch

    from overstory.workers.defrag.relocate import pool_buffers

    table = trace.req_to_token_pool.req_to_token
    return {
        r.rid: torch.stack(
            [b[table[r.req_pool_idx, : r.kv_committed_len].long()] for b in pool_buffers(trace)]
        )
        for r in trace.running
    }


def checked_pass(trace: Any, plan: Any, way: str) -> Any:
    """One pass; fails if any request's KV has changed."""
    import torch

    from overstory.workers.defrag.relocate import relocate

    os.environ["OVERSTORY_KERNELS"] = WAYS[way]
    before = contents(trace)
    done = relocate(trace, plan)
    after = contents(trace)
    assert before.keys() == after.keys()
    assert all(torch.equal(kv, after[rid]) for rid, kv in before.items()), "KV has changed"
    return done


def random_plan(trace: Any, draw: random.Random, rows: int) -> Any:
    """So many held rows to slots anywhere: the worst that a pass of so many may be."""
    from overstory.orchestrator.defrag_plan import Plan, measure
    from overstory.workers.defrag.relocate import take_picture

    picture = take_picture(trace)
    held = sorted({int(slot) for s in picture.sequences for slot in s.slots})
    sources = draw.sample(held, rows)
    seen = measure(picture)
    targets = draw.sample(range(1, picture.size + 1), rows)
    return Plan(1, picture.size, tuple(sources), tuple(targets), seen, seen)


def measure_passes(trace: Any, rounds: int) -> list[dict[str, Any]]:
    """Every size and way in turn, so that both meet the same pool."""
    draw = random.Random(3)
    done: dict[tuple[int, str], list[Any]] = {(r, w): [] for r in ROWS for w in WAYS}
    for number in range(rounds + 1):
        for rows, way in done:
            trace.step()
            one = checked_pass(trace, random_plan(trace, draw, rows), way)
            if number:  # The first one loads kernels and takes memory.
                done[rows, way].append(one)
            for _ in range(STEPS_BETWEEN):
                trace.step()
    return [
        {
            "planned": rows,
            "way": way,
            "rows": round(statistics.mean(one.rows for one in some)),
            "pause_ms": round(statistics.median(one.pause_ms for one in some), 3),
            "pause_ms_worst": round(max(one.pause_ms for one in some), 3),
            "copy_ms": round(statistics.median(one.copy_ms for one in some), 3),
        }
        for (rows, way), some in done.items()
    ]


def measure_pictures(trace: Any, rounds: int) -> dict[str, float]:
    """What a look costs, which comes before each pass at a boundary of its own."""
    from overstory.workers.defrag.audit import audit
    from overstory.workers.defrag.relocate import take_picture

    audits, pictures = [], []
    for _ in range(rounds):
        trace.step()
        begun = time.perf_counter()
        audit(trace, look_for_unknown=False)
        audits.append((time.perf_counter() - begun) * 1e3)
        take_picture(trace)
        pictures.append((time.perf_counter() - begun) * 1e3 - audits[-1])
    return {
        "audit_ms": round(statistics.median(audits), 3),
        "picture_ms": round(statistics.median(pictures), 3),
    }


def main() -> None:
    """One pool, all passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    from overstory.workers.environment import prepare_process

    prepare_process(given.device)
    import churn_trace
    import torch

    from overstory.kernels.ops.choice import library_for
    from overstory.orchestrator.host_facts import host_facts

    device = torch.device(given.device)
    shape = (churn_trace.SLOTS + 1, 1, churn_trace.ROW)
    generator = torch.Generator(device).manual_seed(1)
    buffers = [
        torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
        for _ in range(given.layers)
    ]
    trace = churn_trace.ChurnTrace(1, "lazy", True, buffers, given.device)
    for _ in range(WARM_STEPS):
        trace.step()
    result = {
        "host": host_facts(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "kernel": library_for("kv_relocate", device) is not None,
        "slots": churn_trace.SLOTS,
        "layers": given.layers,
        "row_bytes": given.layers * churn_trace.ROW * 2,
        "running": len(trace.running),
        "rounds": given.rounds,
        "passes": measure_passes(trace, given.rounds),
        "look": measure_pictures(trace, given.rounds),
    }
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
