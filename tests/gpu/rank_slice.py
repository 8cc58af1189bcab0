"""One rank of Kimi-K2.6 at TP 8 on one GPU: what its decode steps cost. See rank_slice_session.sh.

    rank_slice.py ROLE OUT SECONDS [EARLIER_ROLE...]

Writes OUT/ROLE.json after each point, and goes on with one that is there. ROLE is one of
`slice_roles.ROLES`; it starts when the earlier ones are through (OUT/EARLIER_ROLE.done) and ends
within SECONDS of its own start. RANK_SLICE_TOY=1 rehearses on a CPU at toy sizes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import slice_engine as _engine_first  # sets the environment before SGLang is there
import slice_prefill
from slice_auto import SURE, AutoBench, Drafts, start
from slice_bench import StepBench, eager, in_parts
from slice_config import published, rank_drafter, rank_target, toy, write_pair
from slice_points import Cell, slots
from slice_prefill import FULL, PrefillBench, compared
from slice_report import Report, wait_for
from slice_resume import cells_left, counts_left, rows_left, stages_left
from slice_roles import (
    COUNTED,
    ROLES,
    SIMILAR,
    Role,
    auto_left,
    auto_needed_s,
    is_complete,
    largest,
    needed_s,
    not_built,
    why_not,
)

from overstory.workers.policy import MEASURE_SECONDS

RANKS = 8
MOST_ROWS = 33
LONG_CONTEXT = 200_000
SHORT_LONG = 20_000
TABLE_S = MEASURE_SECONDS
"""Seconds of the automatic policy's cost table, as an engine that starts has them: in 8 it was
without its longest context, and the rule ran a budget for long that was 2% worse."""
LONG_SLOTS = 3_800_000
"""Their last elements are beyond 2^31."""
TOY = os.environ.get("RANK_SLICE_TOY") == "1"
TOY_RANKS = 2


def cells_of(role: Role) -> list[Cell]:
    """The role's cells; at toy sizes with short contexts and without profiles."""
    if not TOY:
        return list(role.cells)
    return [
        c._replace(context=64 if c.context < 9000 else 160, backend="overstory", profiled=False)
        for c in role.cells
    ]


def build(name: str, out: Path) -> _engine_first.SliceEngine:
    """The engine of a role."""
    role = ROLES[name]
    target, drafter = toy() if TOY else (published("kimi-k2.6"), published("kimi-k2.6-dflash"))
    ranks = TOY_RANKS if TOY else RANKS
    own = rank_target(target, ranks, role.layers, quantised=not TOY)
    pair = write_pair(out / f"{name}-config", own, rank_drafter(drafter, own, ranks))
    cells = largest(role)
    tokens = slots(cells, MOST_ROWS) + 64 if cells else LONG_SLOTS
    fields: dict[str, Any] = {
        "context_length": 4096 if TOY else 202_752,
        "max_total_tokens": 16384 if TOY else tokens,
        "max_running_requests": 16,
        "port": 31000 + 97 * (sum(map(ord, name)) % 200),
    }
    kv_sets, noisy, scale = role.kv_sets, not role.results, 20.0 if role.results else 1.0
    if TOY:
        _engine_first.SliceEngine.device = "cpu"
        kv_sets = min(kv_sets, 2)
    else:
        fields |= {
            "cuda_graph_bs_decode": [1] if role.results else [1, 4, 16],
            "chunked_prefill_size": 8192,
        } | role.fields
    if not role.own_draft:
        _engine_first.leave_draft_attention()
    return _engine_first.SliceEngine(pair, MOST_ROWS, kv_sets, noisy, scale, **fields)


WHERE = ("batch", "context", "backend", "profiled")


class Measurement:
    """The cells of a role, one after the other, as far as time goes.

    Args:
        engine: of the role.
        report: gets each point when it is there.
        deadline: `time.monotonic` at which no further point begins.
        out: for the launches of each profile.
    """

    def __init__(self, engine: Any, report: Report, deadline: float, out: Path) -> None:
        self._engine, self._report, self._deadline = engine, report, deadline
        role = report.content["role"]
        self._out = out
        self._profiles = len(list(out.glob(f"launches-{role}-*")))
        self._left_out: list[str] = []
        self._role = ROLES[role]
        self._points: list[dict[str, Any]] = report.content.get("points", [])

    def run(self, scheduler: Any, cells: list[Cell]) -> None:
        """In the engine's loop, between two iterations."""
        del scheduler
        worker = self._engine.worker
        bench = StepBench(worker, on_cuda=not TOY)
        # Another backend's steps take long: what is counted comes before.
        kinds = [cell.backend for cell in cells]
        ours = kinds.index("triton") if "triton" in kinds and self._role.counts else len(kinds)
        self._cells(bench, worker, cells[:ours])
        if self._role.counts:
            self._report.attempt("experts", lambda: self._experts(bench, cells))
            if self._role.layers is None:
                self._report.attempt("alike", lambda: self._alike(bench))
        self._cells(bench, worker, cells[ours:])
        if self._role.parts:
            self._report.attempt("parts", lambda: self._parts(bench, worker))
        if self._role.auto:
            self._report.attempt("auto", lambda: self._auto(worker, bench))

    def _parts(self, bench: StepBench, worker: Any) -> list[dict[str, Any]]:
        """Points timed as one graph and in parts, one right after the other."""
        found: list[dict[str, Any]] = self._report.content.get("parts", [])
        for cell in cells_left(self._role.parts, found):
            at = cell._replace(context=min(cell.context, 160)) if TOY else cell
            bench.prepare(at)
            for rows in rows_left(cell, found):
                if self._leaves_out(f"parts: {cell} {rows} rows", at, needed_s(cell, 61)):
                    continue
                one = {"whole": bench.point(rows, 1.0)}
                with in_parts(worker):
                    one["in_parts"] = bench.point(rows, 1.0)
                found.append(cell._asdict() | {"rows": rows} | one)
                self._report.put("parts", found)
        return found

    def _auto(self, worker: Any, bench: StepBench) -> list[dict[str, Any]]:
        """The automatic policy against each fixed one, with simulated acceptance."""
        found: list[dict[str, Any]] = self._report.content.get("auto", [])
        runs: dict[str, tuple[AutoBench, Drafts]] = {}
        learnt: set[tuple[str, int]] = set()
        table = None
        for kind, batch, context in auto_left(self._role, found):
            at = context if not TOY else min(context, 160)
            one = Cell(batch, at, (), "overstory")
            takes = auto_needed_s(batch, context, (kind, batch) in learnt)
            takes += TABLE_S if table is None else 0
            if self._leaves_out(f"auto: {kind} {batch} {context}", one, takes):
                continue
            learnt.add((kind, batch))
            if kind not in runs:  # what was learnt of one drafter is no good for another
                table = start(worker, 1.0 if TOY else TABLE_S, table)
                depth = worker.limits.block_size - 1
                drafts = Drafts(worker.chooser.options, depth, SURE[kind])
                runs[kind] = AutoBench(worker, bench.timer, on_cuda=not TOY), drafts
            bench.prepare(one)
            auto, drafts = runs[kind]
            made = auto.cell(batch, at, drafts, 1.0 if TOY else 7.0)
            found.append({"drafter": kind} | made | {"context": context})
            self._report.put("auto", found)
        return found

    def _cells(self, bench: StepBench, worker: Any, cells: list[Cell]) -> None:
        layers = int(worker.model_runner.model_config.num_hidden_layers)
        for number, cell in enumerate(cells_left(cells, self._points)):
            if self._leaves_out(str(cell), cell, needed_s(cell, layers)):
                continue
            self._report.attempt(
                f"{cell.backend}-{cell.batch}-{cell.context}-{number}",
                lambda cell=cell: self._cell(bench, worker, cell),
            )

    def _leaves_out(self, what: str, cell: Cell, takes_s: float) -> bool:
        """Whether ``what`` is not measured; the report then says why."""
        room = int(self._engine.worker.model_runner.token_to_kv_pool.size)
        why = why_not(takes_s, self._left(), slots([cell], MOST_ROWS), room)
        if why is None:
            return False
        self._left_out.append(f"{what}: {why}")
        self._report.put("left_out", self._left_out)
        return True

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
        run = {"run": self._report.content["runs"]}
        for rows in rows_left(cell, self._points):
            if self._left() < 2:
                return
            point = cell._asdict() | {"rows": rows} | bench.point(rows, longest_s) | run
            self._points.append(point)
            self._report.put("points", self._points)
        if not stages_left(cell, self._points):
            return
        again = [p for p in self._points if all(p[n] == getattr(cell, n) for n in WHERE)]
        if self._left() > 2 + 3e-6 * sum(p["step_us"] for p in again):
            self._profiles += 1
            role = self._report.content["role"]
            where = f"{cell.backend}-{cell.batch}-{cell.context}"
            name = f"launches-{role}-{self._profiles}-{where}.json.gz"
            found = bench.stages([p["rows"] for p in again], profiled, self._out / name)
            for point, stages in zip(again, found, strict=False):
                point["stages_us"] = stages
            self._report.put("points", self._points)

    def _experts(self, bench: StepBench, cells: list[Cell]) -> list[dict[str, Any]]:
        """Distinct experts against rows: independent rows, then rows that are much alike."""
        found: list[dict[str, Any]] = self._report.content.get("experts", [])
        short = min(cell.context for cell in cells)
        for alike, batch, rows in self._of_rows_alike(COUNTED, found, 5):
            bench.prepare(Cell(batch, short, (), "overstory"))
            found.append({"batch": batch, "rows": rows, "alike": alike} | bench.experts(rows))
            self._report.put("experts", found)
        return found

    def _alike(self, bench: StepBench) -> list[dict[str, Any]]:
        """Steps of one and four requests whose rows are much alike."""
        found: list[dict[str, Any]] = self._report.content.get("alike", [])
        for alike, batch, rows in self._of_rows_alike(SIMILAR, found, 3):
            bench.prepare(Cell(batch, 64 if TOY else 1024, (), "overstory"))
            one = {"batch": batch, "rows": rows, "alike": alike} | bench.point(rows, 1.0)
            stages = bench.stages([rows])
            found.append(one | ({"stages_us": stages[0]} if stages else {}))
            self._report.put("alike", found)
        return found

    def _of_rows_alike(
        self, wanted: Sequence[tuple[float, int, int]], found: Sequence[Any], least_s: float
    ) -> Iterator[tuple[float, int, int]]:
        """What is left of ``wanted``, with the rows' noise made so; none begins in the last
        ``least_s`` seconds."""
        now = 0.0
        try:
            for alike, batch, rows in counts_left(wanted, found):
                if self._left() < least_s:
                    return
                if alike != now:
                    self._engine.noise[0].alike(alike)
                    now = alike
                yield alike, batch, rows
        finally:
            self._engine.noise[0].alike(0.0)


def long_context(engine: Any, report: Report) -> None:
    """A long prompt by chunks, and decoding; then one text from near and from far slots."""
    if "long" not in report.content:  # chunks and steps are kept as they come
        report.attempt("long", lambda: _long_prompt(engine, report, 1500 if TOY else LONG_CONTEXT))
        engine.flush_cache()
    if "far_slots" not in report.content:
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


def _clocked(report: Report, name: str) -> Callable[[], None]:
    """Notes the seconds since the last call, and the memory, under ``name``."""
    last = [time.perf_counter()]
    found: list[dict[str, float]] = []

    def note() -> None:
        found.append({"seconds": round(time.perf_counter() - last[0], 4)} | _memory())
        report.put(name, found)
        last[0] = time.perf_counter()

    return note


def _long_prompt(engine: Any, report: Report, length: int) -> dict[str, Any]:
    from overstory.workers import tree_policy
    from overstory.workers.tree_policy import TreePolicy

    tree_policy.set_current(TreePolicy.parse("tree-8"))
    asked = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
    rid = engine.submit(_prompt(length), asked)
    _step_until(engine, rid, lambda output: bool(output.ids), _clocked(report, "chunks"))
    _step_until(engine, rid, lambda output: output.done, _clocked(report, "decode"))
    engine.step(3)
    return {"tokens": length, "after": _memory()}


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
    """One greedy text from the first slots of the pool, one from the last: tokens, and the
    log-probabilities of each, since a model of random weights may say one token for ever."""
    texts, places, chances = [], [], []
    pool = engine.scheduler.token_to_kv_pool_allocator
    for far in (False, True):
        engine.flush_cache()
        held = pool.alloc(pool.available_size() - length - 4096) if far else None
        prompt = _prompt(length)
        asked = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
        rid = engine.submit(prompt, asked, return_logprob=True)
        _step_until(engine, rid, lambda output: bool(output.ids), lambda: None)
        table = engine.scheduler.req_to_token_pool.req_to_token
        places.append(int(table.max()))
        _step_until(engine, rid, lambda output: output.done, lambda: None)
        engine.step(3)
        texts.append(engine.outputs[rid].ids)
        chances.append(engine.outputs[rid].logprobs)
        if held is not None:
            pool.free(held)
    width = engine.worker.model_runner.token_to_kv_pool.kv_buffer[0].shape[-1]
    return {
        "equal": texts[0] == texts[1],
        "logprobs_apart": max(abs(a - b) for a, b in zip(*chances, strict=True)),
        "logprobs": chances[0][:8],
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
    _engine_first.leave_other_models()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def started(name: str, out: Path, report: Report) -> Any:
    """The role's engine."""
    begun = time.monotonic()
    engine = build(name, out)
    report.put("start_s", time.monotonic() - begun)
    config = engine.worker.model_runner.model_config
    report.attempt("layers", lambda: config.num_hidden_layers)
    report.put("memory", _memory())
    report.put("whole_steps_failed", engine.not_captured)
    report.put("graphs", engine.graphs)
    report.put("compiled", engine.compiled)
    return engine


def main() -> None:
    name, out, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    earlier, role = sys.argv[4:], ROLES[sys.argv[1]]
    deadline = time.monotonic() + seconds
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", force=True)
    report = Report(name, out)
    begun = time.monotonic()
    load_sglang()  # takes long: while the earlier ones run
    report.put("loaded_s", time.monotonic() - begun)
    try:
        engine = None
        if is_complete(role, report.content, cells_of(role)):
            report.put("left_out", ["nothing: an earlier run has measured all"])
            os._exit(0)
        wait_for(out, [other for other in earlier if other == "modules"])
        if not TOY and (why := not_built(out, role)):
            report.put("left_out", [why])
            (out / f"{name}.done").touch()
            os._exit(4)
        if role.early:  # after the first of them: what its captures take is weighed
            wait_for(out, [other for other in earlier if other == "kernels"])
            before = [other for other in earlier if other in ROLES and ROLES[other].early]
            wait_for(out, before[:1], ("built", "done"))
            engine = started(name, out, report)
            (out / f"{name}.built").touch()
            after = [word for word in os.environ.get("RANK_SLICE_BUILT", "").split(",") if word]
            wait_for(out, after, ("built", "done"))
        wait_for(out, earlier)
        report.put("waited_s", time.monotonic() - begun)
        others = [out / f"{other}.json" for other in ROLES if other.startswith("slice")]
        if name.startswith("slice_") and any(map(_measured, others)):
            report.put("left_out", ["all: another role has measured"])
            os._exit(0)
        if deadline - time.monotonic() < (5 if engine else 20):
            report.put("left_out", ["all: no time"])
            os._exit(3)
        engine = engine or started(name, out, report)
        if name == "long":
            long_context(engine, report)
        elif name == "prefill":
            bench = PrefillBench(engine, lambda: deadline - time.monotonic(), report)
            report.attempt("measured", lambda: bench.run(slice_prefill.TOY if TOY else FULL))
            report.put("prefills_compared", compared(report.content.get("prefills", [])))
        else:
            measurement = Measurement(engine, report, deadline, out)
            report.attempt(
                "measured",
                lambda: engine.at_boundary(measurement.run, cells_of(role)) and "all",
            )
    except BaseException:
        report.failed("run")
    report.put("memory_after", _memory())
    (out / f"{name}.done").touch()
    os._exit(0)


if __name__ == "__main__":
    main()
