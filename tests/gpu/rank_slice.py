"""One rank of Kimi-K2.6 at TP 8 on one GPU: what its decode steps cost. See rank_slice_session.sh.

    rank_slice.py ROLE OUT SECONDS [EARLIER_ROLE...]

Writes OUT/ROLE.json after each point. ROLE is one of ROLES; it starts when the earlier ones are
through (OUT/EARLIER_ROLE.done) and ends within SECONDS of its own start. RANK_SLICE_TOY=1 rehearses
on a CPU at toy sizes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import slice_engine as _engine_first  # sets the environment before SGLang is there
from slice_bench import StepBench, eager
from slice_config import published, rank_drafter, rank_target, toy, write_pair
from slice_points import Cell, grid, levers, slots
from slice_report import Report, wait_for

RANKS = 8
MOST_ROWS = 33
LONG_CONTEXT = 200_000
SHORT_LONG = 20_000
LONG_SLOTS = 3_800_000
"""Their last elements are beyond 2^31."""
TOY = os.environ.get("RANK_SLICE_TOY") == "1"
TOY_RANKS = 2


@dataclass(frozen=True)
class Role:
    """An engine and what is measured with it.

    Attributes:
        layers: None: all.
        kv_sets: see `slice_engine`.
        fields: further server arguments.
        cells: what is measured.
        own_draft: the drafter's attention is ours; else SGLang's Triton.
    """

    layers: int | None
    kv_sets: int
    fields: dict[str, Any]
    cells: tuple[Cell, ...]
    own_draft: bool = True


ROLES = {
    "slice": Role(None, 4, {}, tuple(grid())),
    "slice_old_draft": Role(None, 4, {}, tuple(grid()), own_draft=False),
    "slice_triton": Role(None, 4, {"moe_runner_backend": "triton"}, tuple(grid()), own_draft=False),
    "moe_triton": Role(4, 0, {"moe_runner_backend": "triton"}, tuple(levers())),
    "moe_fused": Role(4, 0, {"enforce_shared_experts_fusion": True}, tuple(levers())),
    "moe_marlin": Role(4, 0, {}, tuple(levers())),
    "long": Role(4, 0, {}, ()),
}


def cells_of(role: Role) -> list[Cell]:
    """The role's cells; at toy sizes with short contexts."""
    if not TOY:
        return list(role.cells)
    return [Cell(c.batch, 64 if c.context < 9000 else 160, c.rows, "overstory") for c in role.cells]


def build(name: str, out: Path) -> _engine_first.SliceEngine:
    """The engine of a role."""
    role = ROLES[name]
    target, drafter = toy() if TOY else (published("kimi-k2.6"), published("kimi-k2.6-dflash"))
    ranks = TOY_RANKS if TOY else RANKS
    own = rank_target(target, ranks, role.layers, quantised=not TOY)
    pair = write_pair(out / f"{name}-config", own, rank_drafter(drafter, own, ranks))
    cells = cells_of(role)
    tokens = slots(cells, MOST_ROWS) + 64 if cells else LONG_SLOTS
    fields: dict[str, Any] = {
        "context_length": 4096 if TOY else 202_752,
        "max_total_tokens": 16384 if TOY else tokens,
        "max_running_requests": 16,
        "port": 31000 + 97 * (sum(map(ord, name)) % 200),
    }
    kv_sets, noisy, scale = role.kv_sets, name != "long", 20.0 if name == "long" else 1.0
    if TOY:
        _engine_first.SliceEngine.device = "cpu"
        kv_sets = min(kv_sets, 2)
    else:
        fields |= {
            "cuda_graph_bs_decode": [1, 4, 16] if name != "long" else [1],
            "chunked_prefill_size": 8192,
        } | role.fields
    if not role.own_draft:
        _engine_first.leave_draft_attention()
    return _engine_first.SliceEngine(pair, MOST_ROWS, kv_sets, noisy, scale, **fields)


class Measurement:
    """The cells of a role, one after the other, as far as time goes.

    Args:
        engine: of the role.
        report: gets each point when it is there.
        deadline: `time.monotonic` at which no further point begins.
    """

    def __init__(self, engine: Any, report: Report, deadline: float) -> None:
        self._engine, self._report, self._deadline = engine, report, deadline
        self._whole = report.content["role"].startswith("slice")
        self._points: list[dict[str, Any]] = []

    def run(self, scheduler: Any, cells: list[Cell]) -> None:
        """In the engine's loop, between two iterations."""
        del scheduler
        worker = self._engine.worker
        bench = StepBench(worker, on_cuda=not TOY)
        left_out: list[str] = []
        for number, cell in enumerate(cells):
            if self._left() < 4 + (cell.backend == "triton") * cell.context / 20_000:
                left_out.append(str(cell))
                self._report.put("left_out", left_out)
                continue
            self._report.attempt(
                f"{cell.backend}-{cell.batch}-{cell.context}",
                lambda cell=cell: self._cell(bench, worker, cell),
            )
            if number == 2 and self._whole:
                self._report.attempt("kernels", lambda: {} if TOY else bench.kernels(9))
                self._report.attempt("experts", lambda: self._experts(bench, cells))
        if self._whole:
            self._report.attempt("alike", lambda: self._alike(bench))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _cell(self, bench: StepBench, worker: Any, cell: Cell) -> str:
        begun = time.monotonic()
        bench.prepare(cell)
        if cell.backend == "triton":
            with eager(worker, worker.model_runner.attn_backend._others):
                self._points_of(bench, cell, longest_s=4.0, profiled=1)
        else:
            self._points_of(bench, cell, longest_s=2.0, profiled=2)
        return f"{time.monotonic() - begun:.1f} s"

    def _points_of(self, bench: StepBench, cell: Cell, longest_s: float, profiled: int) -> None:
        new = []
        for rows in cell.rows:
            if self._left() < 2:
                break
            point = cell._asdict() | {"rows": rows} | bench.point(rows, longest_s)
            new.append(point)
            self._points.append(point)
            self._report.put("points", self._points)
        if self._left() > 1 + 3e-6 * sum(p["step_us"] for p in new):
            found = bench.stages([p["rows"] for p in new], profiled)
            for point, stages in zip(new, found, strict=False):
                point["stages_us"] = stages
            self._report.put("points", self._points)

    def _experts(self, bench: StepBench, cells: list[Cell]) -> list[dict[str, Any]]:
        """Distinct experts against rows: independent rows, then rows that are much alike."""
        found = []
        short = min(cell.context for cell in cells)
        for alike in (0.0, 0.5, 0.9):
            self._engine.noise[0].alike(alike)
            for batch in (1, 4, 16):
                bench.prepare(Cell(batch, short, (), "overstory"))
                for rows in (1, 9, 17, 33):
                    one = {"batch": batch, "rows": rows, "alike": alike}
                    found.append(one | bench.experts(rows))
        self._engine.noise[0].alike(0.0)
        return found

    def _alike(self, bench: StepBench) -> list[dict[str, Any]]:
        """Steps of one and four requests whose rows are much alike."""
        found = []
        try:
            for alike in (0.5, 0.9):
                self._engine.noise[0].alike(alike)
                for batch in (1, 4):
                    if self._left() < 3:
                        return found
                    bench.prepare(Cell(batch, 64 if TOY else 1024, (), "overstory"))
                    rows = (9, 33)
                    stages = bench.stages(rows)
                    for i, n in enumerate(rows):
                        one = {"batch": batch, "rows": n, "alike": alike} | bench.point(n, 1.0)
                        found.append(one | ({"stages_us": stages[i]} if stages else {}))
        finally:
            self._engine.noise[0].alike(0.0)
        return found


def long_context(engine: Any, report: Report) -> None:
    """A long prompt by chunks, then decoding; then one text from near and from far slots."""
    report.attempt("long", lambda: _long_prompt(engine, 1500 if TOY else LONG_CONTEXT))
    report.attempt("far_slots", lambda: _far_slots(engine, 200 if TOY else SHORT_LONG))


def _prompt(length: int) -> list[int]:
    import random

    draw = random.Random(5)
    return [draw.randrange(5, 2000) for _ in range(length)]


def _memory() -> dict[str, float]:
    import torch

    if TOY:
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "used_gb": (total - free) / 1e9,
    }


def _clocked(into: list[dict[str, float]]) -> Callable[[], None]:
    """Notes the seconds since the last call, and the memory."""
    last = [time.perf_counter()]

    def note() -> None:
        now = time.perf_counter()
        into.append({"seconds": round(now - last[0], 4)} | _memory())
        last[0] = now

    return note


def _long_prompt(engine: Any, length: int) -> dict[str, Any]:
    from overstory.workers import tree_policy
    from overstory.workers.tree_policy import TreePolicy

    tree_policy.set_current(TreePolicy.parse("tree-8"))
    asked = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    rid = engine.submit(_prompt(length), asked)
    chunks: list[dict[str, float]] = []
    decode: list[dict[str, float]] = []
    _step_until(engine, rid, lambda output: bool(output.ids), _clocked(chunks))
    _step_until(engine, rid, lambda output: output.done, _clocked(decode))
    engine.step(3)
    return {"tokens": length, "chunks": chunks, "decode": decode, "after": _memory()}


def _step_until(engine: Any, rid: str, met: Callable[[Any], bool], act: Callable[[], None]) -> None:
    """Steps until the request's output is so; ``act`` runs after each.

    Raises:
        RuntimeError: the request was refused, or nothing came of it.
    """
    for _ in range(2000):
        if met(engine.outputs[rid]):
            return
        if engine.outputs[rid].refused is not None:
            raise RuntimeError(f"refused: {engine.outputs[rid].refused}")
        engine.step()
        act()
    free = engine.scheduler.token_to_kv_pool_allocator.available_size()
    raise RuntimeError(f"{len(engine.outputs[rid].ids)} tokens after 2000 steps, {free} slots free")


def _far_slots(engine: Any, length: int) -> dict[str, Any]:
    """One greedy text from the first slots of the pool, one from the last."""
    texts, places = [], []
    pool = engine.scheduler.token_to_kv_pool_allocator
    for far in (False, True):
        engine.flush_cache()
        held = pool.alloc(pool.available_size() - length - 4096) if far else None
        prompt = _prompt(length)
        rid = engine.submit(prompt, {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True})
        _step_until(engine, rid, lambda output: bool(output.ids), lambda: None)
        table = engine.scheduler.req_to_token_pool.req_to_token
        places.append(int(table.max()))
        _step_until(engine, rid, lambda output: output.done, lambda: None)
        engine.step(3)
        texts.append(engine.outputs[rid].ids)
        if held is not None:
            pool.free(held)
    width = engine.worker.model_runner.token_to_kv_pool.kv_buffer[0].shape[-1]
    return {
        "equal": texts[0] == texts[1],
        "highest_slot": places,
        "highest_element": [place * width for place in places],
        "distinct_tokens": len(set(texts[0])),
    }


def _measured(results: Path) -> bool:
    return results.exists() and bool(json.loads(results.read_text()).get("points"))


def load_sglang() -> None:
    """As an engine does, in the order that the plugin needs."""
    from overstory.workers.environment import prepare_process

    prepare_process("cpu" if TOY else "cuda")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.managers.scheduler  # noqa: F401


def main() -> None:
    name, out, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    deadline = time.monotonic() + seconds
    report = Report(name, out)
    begun = time.monotonic()
    load_sglang()  # takes long: while the earlier ones run
    wait_for(out, sys.argv[4:])
    report.put("waited_s", time.monotonic() - begun)
    others = [out / f"{other}.json" for other in ROLES if other.startswith("slice")]
    if name.startswith("slice_") and any(map(_measured, others)):
        report.put("left_out", ["all: another role has measured"])
        os._exit(0)
    if deadline - time.monotonic() < 20:
        report.put("left_out", ["all: no time"])
        os._exit(3)
    try:
        begun = time.monotonic()
        engine = build(name, out)
        report.put("start_s", time.monotonic() - begun)
        report.put("memory", _memory())
        if name == "long":
            long_context(engine, report)
        else:
            measurement = Measurement(engine, report, deadline)
            report.attempt(
                "measured",
                lambda: engine.at_boundary(measurement.run, cells_of(ROLES[name])) and "all",
            )
    except BaseException:
        report.failed("run")
    report.put("memory_after", _memory())
    (out / f"{name}.done").touch()
    os._exit(0)


if __name__ == "__main__":
    main()
