"""Tables of the rank slice's results, for docs/benchmarks. Pure but for the two files.

slice_tables.py SLICE_JSON > TABLES.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slice_config import PUBLISHED
from slice_policy import CHAIN_MEANS, judge
from slice_stages import STAGES

from overstory.orchestrator.capacity import Replica, all_reduce
from overstory.orchestrator.gpus import RTX_PRO_6000
from overstory.orchestrator.model_facts import target_from_config

RANKS = 8
Point = Mapping[str, Any]


def merged(points: Iterable[Point]) -> list[dict[str, Any]]:
    """One point for each backend, batch, context and rows: the shortest median of those timed
    there, with the stages of the last that was profiled."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for point in points:
        key = tuple(point[name] for name in ("backend", "batch", "context", "rows"))
        one = found.setdefault(key, dict(point))
        one["step_us"] = min(one["step_us"], point["step_us"])
        one |= {"stages_us": point["stages_us"]} if point.get("stages_us") else {}
    return [found[key] for key in sorted(found)]


def exchanges_us(batch: int, rows: int) -> float:
    """Modelled microseconds of a step's all-reduces over eight RTX PRO 6000, two a layer."""
    name = str(PUBLISHED / "kimi-k2.6.json")
    target = target_from_config(name, json.loads(Path(name).read_text())["config"])
    replica = Replica(target, None, RTX_PRO_6000, RANKS)
    size = 2.0 * batch * rows * target.hidden_size
    return 2e6 * target.num_layers * all_reduce(replica, size)


def steps(points: Sequence[Point]) -> list[str]:
    """The step and its stages of every point, milliseconds.

    ``host`` is what the step takes beyond its kernels' first start to their last end.
    """
    columns = (*STAGES, "pauses")
    head = ["backend", "batch", "context", "rows", "step", *columns, "host", "attention of step"]
    lines = [_row([*head, "exchange (modelled)"]), "|" + "---|" * (len(head) + 1)]
    for point in points:
        stages, step = point.get("stages_us"), point["step_us"]
        cells: list[Any] = [point[name] for name in head[:4]] + [_ms(step)]
        if stages:
            cells += [_ms(stages[name]) for name in columns]
            cells += [_ms(max(0.0, step - stages["span"])), f"{stages['attention'] / step:.0%}"]
        else:
            cells += [""] * (len(columns) + 2)
        lines.append(_row([*cells, _ms(exchanges_us(point["batch"], point["rows"]))]))
    return lines


def experts(found: Iterable[Point]) -> list[str]:
    """Distinct experts of a layer (of 384) against rows, by how alike rows are."""
    lines = [_row(("batch", "rows", "alike", "mean", "least", "most")), "|" + "---|" * 6]
    for one in found:
        values = [one[name] for name in ("batch", "rows", "alike")]
        lines.append(_row([*values, f"{one['mean']:.1f}", one["least"], one["most"]]))
    return lines


def budgets(points: Sequence[Point]) -> list[str]:
    """The automatic budget against the best fixed one."""
    head = ("chain's tokens", "batch", "context", "best", "chosen", "tokens/s of the best's")
    lines = [_row(head), "|" + "---|" * len(head)]
    for tokens in CHAIN_MEANS:
        for v in judge(points, tokens):
            cells = (tokens, v.batch, v.context, v.best, v.chosen, f"{v.ratio:.1%}")
            lines.append(_row(cells))
    return lines


def main() -> None:
    roles = json.loads(Path(sys.argv[1]).read_text())
    for name, role in roles.items():
        points = merged(role.get("points", []))
        print(
            f"## {name}: {role.get('start_s')} s to start, left out: {role.get('left_out', [])}\n"
        )
        for part in (
            steps(points) if points else [],
            experts(role.get("experts", [])) if role.get("experts") else [],
            budgets(points) if points and name.startswith("slice") else [],
        ):
            print("\n".join([*part, ""]))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
