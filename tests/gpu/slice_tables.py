"""Tables of the rank slice's results, for docs/benchmarks. Pure but for the two files.

slice_tables.py ROWS.csv [PAGE.md]

Prints all tables, or puts them into the marked blocks of a page.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slice_config import PUBLISHED
from slice_policy import CHAIN_MEANS, judge
from slice_rows import WHERE, read
from slice_stages import STAGES

from overstory.orchestrator.capacity import Replica, all_reduce
from overstory.orchestrator.gpus import RTX_PRO_6000
from overstory.orchestrator.model_facts import target_from_config

RANKS = 8
EXPERTS, CHOSEN, MOE_LAYERS = 384, 8, 60
Point = Mapping[str, Any]


def merged(points: Iterable[Point]) -> list[dict[str, Any]]:
    """One point for each backend, batch, context and rows: the last timed there, as those are
    under equal conditions (see `slice_rows.points_of`), with its stages."""
    found = {tuple(p[name] for name in WHERE): dict(p) for p in points}
    return [found[key] for key in sorted(found)]


def serving_us(point: Point) -> float:
    """Microseconds of a step when none is waited for, as a server runs them; alone if longer than
    was worth repeating."""
    return float(point["in_a_row_us"] or point["step_us"])


def exchanges_us(batch: int, rows: int) -> float:
    """Modelled microseconds of a step's all-reduces over eight RTX PRO 6000, two a layer."""
    name = str(PUBLISHED / "kimi-k2.6.json")
    target = target_from_config(name, json.loads(Path(name).read_text())["config"])
    replica = Replica(target, None, RTX_PRO_6000, RANKS)
    size = 2.0 * batch * rows * target.hidden_size
    return 2e6 * target.num_layers * all_reduce(replica, size)


def steps(points: Sequence[Point]) -> list[str]:
    """The step and its stages of every point, milliseconds.

    ``rest`` is what a step in a row takes beyond its kernels, ``alone`` what a step takes more if
    it is waited for.
    """
    head = [*WHERE, "step", *STAGES, "rest", "alone", "attention of step"]
    lines = [_row([*head, "exchange (modelled)"]), "|" + "---|" * (len(head) + 1)]
    for point in points:
        stages, step = point["stages_us"], serving_us(point)
        cells: list[Any] = [point[name] for name in WHERE] + [_ms(step)]
        if stages:
            cells += [
                _ms(stages[name]) if stages[name] or name == "draft" else "" for name in STAGES
            ]
            cells += [_ms(step - sum(stages[name] for name in STAGES))]
        else:
            cells += [""] * (len(STAGES) + 1)
        cells += [_ms(point["step_us"] - step) if point["in_a_row_us"] else ""]
        cells += [f"{stages['attention'] / step:.0%}" if stages else ""]
        lines.append(_row([*cells, _ms(exchanges_us(point["batch"], point["rows"]))]))
    return lines


def bottlenecks(points: Sequence[Point]) -> list[str]:
    """The longest part of a step by context, for every batch and number of rows.

    Exchanges are modelled, so each cell also says their part of a step with them.
    """
    contexts = sorted({p["context"] for p in points})
    at = {(p["batch"], p["rows"], p["context"]): p for p in points if p["stages_us"]}
    lines = [_row(["batch", "rows", *contexts]), "|" + "---|" * (2 + len(contexts))]
    for batch, rows in sorted({key[:2] for key in at}):
        cells = [_longest(at.get((batch, rows, context))) for context in contexts]
        lines.append(_row([batch, rows, *cells]))
    return lines


def _longest(point: Point | None) -> str:
    if point is None:
        return ""
    exchange = exchanges_us(point["batch"], point["rows"])
    times = {name: point["stages_us"][name] for name in STAGES} | {"exchange (modelled)": exchange}
    whole = serving_us(point) + exchange
    name = max(times, key=lambda stage: times[stage])
    return f"{name} {times[name] / whole:.0%}, exchange {exchange / whole:.0%}"


def experts(points: Iterable[Point]) -> list[str]:
    """Time of an expert layer against rows, beside the experts that even routers touch."""
    by_rows: dict[int, list[float]] = {}
    for point in points:
        if point["stages_us"]:
            rows = point["batch"] * point["rows"]
            by_rows.setdefault(rows, []).append(point["stages_us"]["moe"] / MOE_LAYERS)
    head = ("rows in all", "experts touched (expected)", "us a layer (measured)", "us an expert")
    lines = [_row(head), "|" + "---|" * len(head)]
    for rows, layer in sorted(by_rows.items()):
        touched = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
        us = statistics.median(layer)
        lines.append(_row((rows, f"{touched:.0f}", f"{us:.1f}", f"{us / touched:.2f}")))
    return lines


def budgets(points: Sequence[Point]) -> list[str]:
    """The automatic budget against the best fixed one, in tokens per second.

    In each cell: the best fixed budget, what the automatic one reaches of it, and what it reaches
    if its cost table lacks this context and has to go between or beyond the others.
    """
    costs = [{**p, "step_us": serving_us(p)} for p in points]
    contexts = sorted({p["context"] for p in points})
    lines = [_row(["chain's tokens", "batch", *contexts]), "|" + "---|" * (2 + len(contexts))]
    for tokens in CHAIN_MEANS:
        blind = {
            (v.batch, v.context): v.ratio
            for context in contexts
            for v in judge(costs, tokens, without=frozenset({context}))
            if v.context == context
        }
        at = {(v.batch, v.context): v for v in judge(costs, tokens)}
        for batch in sorted({b for b, _ in at}):
            found = [(at.get((batch, c)), blind.get((batch, c))) for c in contexts]
            cells = [f"{v.best}: {v.ratio:.1%}, {other:.1%}" if v else "" for v, other in found]
            lines.append(_row([tokens, batch, *cells]))
    return lines


def against_triton(points: Iterable[Point]) -> list[str]:
    """Steps alone with SGLang's Triton attention and with ours, where both were timed."""
    at = {tuple(p[name] for name in WHERE): p for p in points}
    head = ("batch", "context", "rows", "Triton", "ours", "times", "attention alone, times")
    lines = [_row(head), "|" + "---|" * len(head)]
    for key in sorted(key for key in at if key[0] == "triton"):
        theirs, ours = at[key], at["overstory", *key[1:]]
        both = [p["stages_us"]["attention"] for p in (theirs, ours)]
        cells = [_ms(theirs["step_us"]), _ms(ours["step_us"])]
        ratio = theirs["step_us"] / ours["step_us"]
        lines.append(_row([*key[1:], *cells, f"{ratio:.0f}", f"{both[0] / both[1]:.0f}"]))
    return lines


TABLES = {
    "steps": steps,
    "bottlenecks": lambda points: bottlenecks([p for p in points if p["backend"] != "triton"]),
    "experts": lambda points: experts([p for p in points if p["backend"] != "triton"]),
    "triton": against_triton,
    "budgets": budgets,
}


def main() -> None:
    points = merged(read(Path(sys.argv[1])))
    if len(sys.argv) == 2:
        print("\n\n".join("\n".join([f"## {n}", "", *make(points)]) for n, make in TABLES.items()))
        return
    page = Path(sys.argv[2])
    page.write_text(fill(page.read_text(), points))


def fill(text: str, points: Sequence[Point]) -> str:
    """The page with every block between `<!-- table NAME -->` and `<!-- end -->` made anew."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return "\n".join([f"<!-- table {name} -->", *TABLES[name](points), "<!-- end -->"])

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


def _row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
