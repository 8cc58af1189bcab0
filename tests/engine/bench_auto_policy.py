"""The automatic policy against every fixed one, in one engine. Results: docs/benchmarks/.

Modes take turns over the same prompts, unit by unit, and each unit begins with another mode, so
that what else the machine does falls on all alike; modes are compared within units. Only its own
steps teach the automatic policy; what learning costs at the start is a row of its own.

    .venv/bin/python tests/engine/bench_auto_policy.py --json docs/benchmarks/auto_policy_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import prepare_process
from overstory.workers.tiny.paths import resolve_model

if TYPE_CHECKING:
    from harness import EngineHarness

ROWS = 32
BASE = "plain"


def main() -> None:
    arguments = _arguments()
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    os.environ[POLICY_ENV] = "auto"
    prepare_process("cpu", arguments.threads)
    from harness import EngineHarness

    from overstory.orchestrator.bench_load import load_prompts
    from overstory.orchestrator.host_facts import host_facts

    engine = EngineHarness(
        resolve_model("overstory-tiny"),
        speculative_algorithm="DDTREE",
        speculative_draft_model_path=resolve_model("overstory-tiny-drafter"),
        speculative_num_draft_tokens=ROWS,
        random_seed=1,
        max_total_tokens=16384,
        max_running_requests=8,
    )
    prompts = load_prompts(arguments.prompts, True)
    host = host_facts()
    learning = _learn(engine, prompts, arguments)
    samples = _measure(engine, prompts, arguments)
    rows = _rows(samples, arguments.modes)
    _print(rows, arguments.modes)
    if arguments.json:
        asked = engine.scheduler.draft_worker.chooser
        result = {
            "host": host,
            "settings": {name: str(value) for name, value in vars(arguments).items()},
            "cost_table": json.loads(asked._auto.table.to_json()),
            "policy": asked.report(),
            "learning": learning,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)  # nothing here is worth SGLang's slow shutdown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--units", type=int, default=8, help="of each concurrency and temperature")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--concurrency", type=_numbers, default=[1, 4, 8])
    parser.add_argument("--temperature", type=_decimals, default=[0.0, 1.0])
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default=["plain", "chain", "tree-4", "tree-8", "tree-15", "tree-31", "auto"],
    )
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _decimals(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _learn(
    engine: EngineHarness, prompts: Sequence[Any], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The automatic policy's first tokens of each kind, one request at a time."""
    _run(engine, BASE, prompts, 0.0, len(prompts), 4)  # fills the prefix cache
    return [
        _run(engine, "auto", [prompt], temperature, 1, arguments.tokens)
        for temperature in arguments.temperature
        for prompt in prompts[:4]
    ]


def _measure(
    engine: EngineHarness, prompts: Sequence[Any], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    modes = arguments.modes
    samples = []
    for temperature in arguments.temperature:
        for concurrency in arguments.concurrency:
            for unit in range(arguments.units):
                first = unit * concurrency
                chosen = prompts[first % len(prompts) :] + prompts[: first % len(prompts)]
                turn = unit % len(modes)
                for mode in modes[turn:] + modes[:turn]:
                    sample = _run(engine, mode, chosen, temperature, concurrency, arguments.tokens)
                    samples.append(sample | {"unit": unit})
                    print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    return samples


def _run(
    engine: EngineHarness,
    mode: str,
    prompts: Sequence[Any],
    temperature: float,
    concurrency: int,
    tokens: int,
) -> dict[str, Any]:
    """`concurrency` requests all the time under one mode: where one ends the next prompt begins.

    Ends with `1.5 * tokens` for each stream. A batch that empties at the end would count against
    whatever makes requests end at different times.
    """
    from overstory.workers import tree_policy
    from overstory.workers.step_stats import STATS
    from overstory.workers.tree_policy import parse_policy

    params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    before = _forwards(STATS.snapshot())
    tree_policy.set_current(parse_policy(mode))
    rids: list[str] = []
    made = 0
    with _taught_by(engine, mode):
        begun, cpu = time.perf_counter(), time.process_time()
        while made < 1.5 * tokens * concurrency:
            running = sum(not engine.outputs[rid].done for rid in rids)
            for _ in range(concurrency - running):
                number = len(rids) % len(prompts)
                seeded = params | {"sampling_seed": len(rids)}
                rids.append(engine.submit(prompts[number], seeded))
            engine.step()
            made = sum(len(engine.outputs[rid].ids) for rid in rids)
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    after = _forwards(STATS.snapshot())
    tree_policy.set_current(parse_policy(BASE))
    for rid in rids:
        if not engine.outputs[rid].done:
            engine.abort(rid)
    engine.run(rids)
    return {
        "mode": mode,
        "concurrency": concurrency,
        "temperature": temperature,
        "tokens": made,
        "wall_s": round(wall, 4),
        "cpu_s": round(cpu, 4),
        "choices": {n: c - before.get(n, 0) for n, c in after.items() if c > before.get(n, 0)},
    }


@contextmanager
def _taught_by(engine: EngineHarness, mode: str) -> Iterator[None]:
    """Fixed modes do not teach the automatic policy."""
    auto = engine.scheduler.draft_worker.chooser._auto
    steering = auto.steering
    if not mode.startswith("auto"):
        auto.steering = None
    try:
        yield
    finally:
        auto.steering = steering


def _forwards(snapshot: dict[str, Any]) -> dict[str, int]:
    return {name: row["forwards"] for name, row in snapshot["verify"].items()}


def _rows(samples: Sequence[dict[str, Any]], modes: Sequence[str]) -> list[dict[str, Any]]:
    """One row for each mode, concurrency and temperature.

    `of_plain` is the median over the units of the mode's tokens/s over plain's, `of_best` the same
    against the fixed mode whose `of_plain` is largest; both by wall time and by the process's CPU
    time.
    """
    cells: dict[tuple[float, int], dict[str, list[dict[str, Any]]]] = {}
    for sample in samples:
        cell = cells.setdefault((sample["temperature"], sample["concurrency"]), {})
        cell.setdefault(sample["mode"], []).append(sample)
    return [_row(cell, mode, modes) for cell in cells.values() for mode in modes]


def _row(cell: dict[str, list[dict[str, Any]]], mode: str, modes: Sequence[str]) -> dict[str, Any]:
    samples = cell[mode]
    choices: dict[str, int] = {}
    for sample in samples:
        for name, count in sample["choices"].items():
            choices[name] = choices.get(name, 0) + count
    tokens = sum(sample["tokens"] for sample in samples)
    row = {name: samples[0][name] for name in ("mode", "concurrency", "temperature")}
    row |= {"tokens_per_s": round(tokens / sum(sample["wall_s"] for sample in samples), 1)}
    for clock in ("wall_s", "cpu_s"):
        fixed = [other for other in modes if not other.startswith("auto")]
        best = max(fixed, key=lambda other: _ratio(cell, BASE, other, clock))
        row |= {
            f"of_plain_{clock}": round(_ratio(cell, BASE, mode, clock), 3),
            f"of_best_{clock}": round(_ratio(cell, best, mode, clock), 3),
            f"best_{clock}": best,
        }
    return row | {"choices": choices}


def _ratio(cell: dict[str, list[dict[str, Any]]], one: str, other: str, clock: str) -> float:
    """How many times as fast `other` is as `one`: median over the units."""
    pairs = zip(cell[one], cell[other], strict=True)
    return median(b["tokens"] / b[clock] / (a["tokens"] / a[clock]) for a, b in pairs)


def _print(rows: Sequence[dict[str, Any]], modes: Sequence[str]) -> None:
    for clock in ("wall_s", "cpu_s"):
        print(f"times plain, by {clock}")
        print("temp conc " + " ".join(f"{mode:>7}" for mode in modes) + "  auto/best  chose")
        for start in range(0, len(rows), len(modes)):
            cell = rows[start : start + len(modes)]
            head = f"{cell[0]['temperature']:4g} {cell[0]['concurrency']:4d} "
            head += " ".join(f"{row[f'of_plain_{clock}']:7.2f}" for row in cell)
            for row in cell:
                if row["mode"].startswith("auto"):
                    print(f"{head}  {row[f'of_best_{clock}']:9.3f}  {row['choices']}")


if __name__ == "__main__":
    main()
