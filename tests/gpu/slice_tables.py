"""Tables of the rank slice's results, for docs/benchmarks. Pure but for the two files.

slice_tables.py ROWS.csv [PAGE.md]

Prints all tables, or puts them into the marked blocks of a page.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slice_config import PUBLISHED
from slice_page import filled, table_row
from slice_points import CHAIN_ROWS
from slice_policy import CHAIN_MEANS, judge
from slice_rows import WHERE, read
from slice_stages import STAGES

from overstory.orchestrator.capacity import (
    CHAIN_TOKENS,
    PARTS_S,
    Replica,
    StepTime,
    all_reduce,
    step_time,
)
from overstory.orchestrator.gpus import H200, RTX_PRO_6000, GpuFacts, Link
from overstory.orchestrator.model_facts import (
    DrafterFacts,
    TargetFacts,
    drafter_from_config,
    target_from_config,
)

RANKS = 8
LEVERS = ("moe_marlin", "moe_triton", "moe_fused")
EXPERTS, CHOSEN, LAYERS, MOE_LAYERS = 384, 8, 61, 60
ATTENTION_GOALS = {65536: 0.25, 200_000: 0.45}
"""Most that the verify attention is to be of a step of one request with 9 rows, by context."""
Point = Mapping[str, Any]


def merged(points: Iterable[Point]) -> list[dict[str, Any]]:
    """One point for each lever, number of layers, backend, batch, context and rows: the last timed
    there, as those are under equal conditions (see `slice_rows.points_of`), with its stages."""
    found = {(_lever(p), *(p[name] for name in ("layers", *WHERE))): dict(p) for p in points}
    return [found[key] for key in sorted(found)]


def _lever(point: Point) -> str:
    """The role, where it runs the experts in a way to be compared; else empty."""
    return str(point["role"]) if point["role"] in LEVERS else ""


def serving_us(point: Point) -> float:
    """Microseconds of a step when none is waited for, as a server runs them; alone if longer than
    was worth repeating."""
    return float(point["in_a_row_us"] or point["step_us"])


def exchanges_us(batch: int, rows: int) -> float:
    """Modelled microseconds of a step's all-reduces over eight RTX PRO 6000, two a layer."""
    replica = kimi_on(RTX_PRO_6000)
    size = 2.0 * batch * rows * replica.target.hidden_size
    return 2e6 * replica.target.num_layers * all_reduce(replica, size)


def goals(points: Iterable[Point]) -> list[str]:
    """The verify attention's part of a step of one request with 9 rows, beside its goal.

    The slice exchanges nothing; two columns add modelled exchanges. ``allowed``: what a layer's
    attention may take for the goal, the rest of the step as it is.
    """
    at = {p["context"]: p for p in points if (p["batch"], p["rows"]) == (1, 9) and p["stages_us"]}
    head = ("context", "step", "attention", "of the step", "goal", "us a layer", "allowed")
    more = ("with exchanges of 8 RTX PRO 6000", "of 8 H200 (both modelled)")
    lines = [table_row([*head, *more]), "|" + "---|" * (len(head) + len(more))]
    for context, goal in ATTENTION_GOALS.items():
        point = at[context]
        step, attention = serving_us(point), point["stages_us"]["attention"]
        allowed = goal / (1 - goal) * (step - attention) / LAYERS
        shares = [attention / whole for whole in (step + exchanges_us(1, 9), _with_nvlink(point))]
        cells = [_ms(step), _ms(attention), f"{attention / step:.1%}", f"{goal:.0%}"]
        cells += [f"{attention / LAYERS:.1f}", f"{allowed:.1f}"]
        lines.append(table_row([context, *cells, *(f"{share:.1%}" for share in shares)]))
    return lines


def steps(points: Sequence[Point]) -> list[str]:
    """The step and its stages of every point, milliseconds.

    ``rest`` is what a step in a row takes beyond its kernels, ``alone`` what a step takes more if
    it is waited for.
    """
    head = [*WHERE, "step", *STAGES, "rest", "alone", "attention of step"]
    lines = [table_row([*head, "exchange (modelled)"]), "|" + "---|" * (len(head) + 1)]
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
        lines.append(table_row([*cells, _ms(exchanges_us(point["batch"], point["rows"]))]))
    return lines


def of_few_layers(points: Iterable[Point]) -> list[str]:
    """What a layer takes in engines of few layers, and what a step of all is estimated to take.

    A step's layers are scaled, its other stages and pauses are taken as they are. The first layer
    has no experts.
    """
    head = ("batch", "context", "rows", "layers", "step", "attention, us a layer")
    head += ("experts, us a layer", "dense, us a layer", "step of 61 layers (estimated)")
    lines = [table_row([*head, "attention of it"]), "|" + "---|" * (len(head) + 1)]
    for point in points:
        each, whole = a_layer_us(point), of_all_layers_us(point)
        cells = [*(point[name] for name in WHERE[1:]), point["layers"], _ms(serving_us(point))]
        cells += [f"{us:.1f}" for us in each]
        lines.append(table_row([*cells, _ms(whole), f"{each[0] * LAYERS / whole:.0%}"]))
    return lines


def a_layer_us(point: Point) -> tuple[float, float, float]:
    """Microseconds of a layer's attention, experts and the rest of it. The first layer of an engine
    has no experts."""
    stages, layers = point["stages_us"], point["layers"]
    return (
        stages["attention"] / layers,
        stages["moe"] / (layers - 1),
        stages["dense"] / layers,
    )


def of_all_layers_us(point: Point) -> float:
    """What a step of few layers is estimated to take with all: see `of_few_layers`."""
    attention, experts, dense = a_layer_us(point)
    inside = sum(point["stages_us"][name] for name in ("attention", "moe", "dense"))
    scaled = (attention + dense) * LAYERS + experts * MOE_LAYERS
    return serving_us(point) - inside + scaled


def triton_of_few_layers(
    points: Iterable[Point], measured: Collection[tuple[Any, ...]]
) -> list[str]:
    """A layer's attention and the step of 61 layers, with SGLang's Triton attention and with ours,
    where both were timed with few layers.

    Args:
        points: of few layers.
        measured: `WHERE` of points of all layers: of these no step is estimated. Triton's are not
            captured, and where the host is the limit so is each further layer.
    """
    at = {tuple(p[name] for name in WHERE): p for p in points if p["stages_us"]}
    head = ("batch", "context", "rows", "Triton, us a layer", "ours", "times")
    head += ("step of 61 layers (estimated), Triton", "ours", "times")
    lines = [table_row(head), "|" + "---|" * len(head)]
    for key in sorted(key for key in at if key[0] == "triton" and ("overstory", *key[1:]) in at):
        theirs, ours = at[key], at["overstory", *key[1:]]
        layer = a_layer_us(theirs)[0], a_layer_us(ours)[0]
        step = of_all_layers_us(theirs), of_all_layers_us(ours)
        cells = [f"{layer[0]:.1f}", f"{layer[1]:.1f}", f"{layer[0] / layer[1]:.0f}"]
        estimate = [_ms(step[0]), _ms(step[1]), f"{step[0] / step[1]:.0f}"]
        lines.append(table_row([*key[1:], *cells, *([""] * 3 if key in measured else estimate)]))
    return lines


def levers(points: Iterable[Point]) -> list[str]:
    """Ways to run the experts: a layer's experts and the rest of it (shared expert among them), and
    a step of 4 layers. `moe_fused` has the shared expert among the experts."""
    at = {(_lever(p), p["batch"], p["rows"]): p for p in points if _lever(p) and p["stages_us"]}
    head = ["batch", "rows"]
    head += [f"{n}: experts, dense, us a layer; step, ms" for n in LEVERS]
    lines = [table_row(head), "|" + "---|" * len(head)]
    for batch, rows in sorted({key[1:] for key in at}):
        cells = []
        for point in (at.get((name, batch, rows)) for name in LEVERS):
            if point is None:
                cells.append("")
                continue
            _, experts_us, dense_us = a_layer_us(point)
            cells.append(f"{experts_us:.1f}, {dense_us:.1f}; {_ms(serving_us(point))}")
        lines.append(table_row([batch, rows, *cells]))
    return lines


def bottlenecks(points: Sequence[Point]) -> list[str]:
    """The longest part of a step by context, for every batch and number of rows.

    Exchanges are modelled, so each cell also says their part of a step with them.
    """
    contexts = sorted({p["context"] for p in points})
    at = {(p["batch"], p["rows"], p["context"]): p for p in points if p["stages_us"]}
    lines = [table_row(["batch", "rows", *contexts]), "|" + "---|" * (2 + len(contexts))]
    for batch, rows in sorted({key[:2] for key in at}):
        cells = [_longest(at.get((batch, rows, context))) for context in contexts]
        lines.append(table_row([batch, rows, *cells]))
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
    lines = [table_row(head), "|" + "---|" * len(head)]
    for rows, layer in sorted(by_rows.items()):
        touched = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** rows)
        us = statistics.median(layer)
        lines.append(table_row((rows, f"{touched:.0f}", f"{us:.1f}", f"{us / touched:.2f}")))
    return lines


def budgets(points: Sequence[Point]) -> list[str]:
    """The automatic budget against the best fixed one, in tokens per second.

    In each cell: the best fixed budget, what the automatic one reaches of it, and what it reaches
    if its cost table lacks this context and has to go between or beyond the others.
    """
    costs = [{**p, "step_us": serving_us(p)} for p in points]
    contexts = sorted({p["context"] for p in points})
    lines = [table_row(["chain's tokens", "batch", *contexts]), "|" + "---|" * (2 + len(contexts))]
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
            lines.append(table_row([tokens, batch, *cells]))
    return lines


def against_triton(points: Iterable[Point]) -> list[str]:
    """Steps with SGLang's Triton attention and with ours, where both were timed."""
    at = {tuple(p[name] for name in WHERE): p for p in points}
    head = ("batch", "context", "rows", "Triton", "ours", "times", "attention alone, times")
    lines = [table_row(head), "|" + "---|" * len(head)]
    for key in sorted(key for key in at if key[0] == "triton"):
        theirs, ours = at[key], at["overstory", *key[1:]]
        both = [p["stages_us"]["attention"] for p in (theirs, ours)]
        step = serving_us(theirs), serving_us(ours)
        cells, ratio = [_ms(step[0]), _ms(step[1])], step[0] / step[1]
        lines.append(table_row([*key[1:], *cells, f"{ratio:.0f}", f"{both[0] / both[1]:.0f}"]))
    return lines


_STAGE_OF_MODEL = {"attention": "attention", "experts": "moe", "dense": "dense", "draft": "draft"}


@functools.cache
def _facts() -> tuple[TargetFacts, DrafterFacts]:
    target, drafter = (
        json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
        for name in ("kimi-k2.6", "kimi-k2.6-dflash")
    )
    return target_from_config("kimi", target), drafter_from_config("dflash", drafter)


def kimi_on(gpu: GpuFacts) -> Replica:
    """A replica of the slice's model and drafter."""
    return Replica(*_facts(), gpu, RANKS)


def model_step(point: Point) -> StepTime:
    """The capacity model of a rank that exchanges nothing, as the slice did not."""
    silent = replace(H200, inside=Link(0.0, math.inf, "none"))
    replica = replace(kimi_on(silent), one_graph=True)
    return step_time(replica, point["batch"], point["rows"], point["context"])


def against_model(points: Iterable[Point]) -> list[str]:
    """Measured milliseconds of a step, those of the capacity model, and their ratio."""
    points = list(points)
    contexts = sorted({p["context"] for p in points})
    at = {(p["batch"], p["rows"], p["context"]): p for p in points}
    lines = [table_row(["batch", "rows", *contexts]), "|" + "---|" * (2 + len(contexts))]
    for batch, rows in sorted({key[:2] for key in at}):
        cells = []
        for point in (at.get((batch, rows, context)) for context in contexts):
            if point is None:
                cells.append("")
                continue
            said, us = 1e6 * model_step(point).total, serving_us(point)
            cells.append(f"{_ms(us)}, {_ms(said)}: {said / us:.2f}")
        lines.append(table_row([batch, rows, *cells]))
    return lines


def stages_against_model(points: Iterable[Point]) -> list[str]:
    """The model's seconds of each stage over the measured ones, over all points."""
    profiled = [p for p in points if p["stages_us"]]
    lines = [table_row(("stage", "least", "median", "most")), "|" + "---|" * 4]
    for name, stage in _STAGE_OF_MODEL.items():
        ratios = [
            1e6 * getattr(model_step(p), name) / p["stages_us"][stage]
            for p in profiled
            if p["stages_us"][stage]
        ]
        values = (min(ratios), statistics.median(ratios), max(ratios))
        lines.append(table_row([name, *(f"{value:.2f}" for value in values)]))
    return lines


def eight_h200(points: Iterable[Point]) -> list[str]:
    """Tokens/s of one replica on eight H200: measured steps, what they take more in parts, modelled
    exchanges, and a chain's tokens as published."""
    at = {(p["batch"], p["rows"], p["context"]): p for p in points}
    contexts = sorted({key[2] for key in at})
    ways = (("plain", 1, 1.0), ("chain", CHAIN_ROWS, CHAIN_TOKENS))
    lines = [table_row(["batch", "draft", *contexts]), "|" + "---|" * (2 + len(contexts))]
    for batch in sorted({key[0] for key in at}):
        for name, rows, tokens in ways:
            found = [at.get((batch, rows, context)) for context in contexts]
            steps_us = [_with_nvlink(p) + 1e6 * PARTS_S if p else None for p in found]
            cells = [f"{1e6 * batch * tokens / us:.0f}" if us else "" for us in steps_us]
            lines.append(table_row([batch, name, *cells]))
    return lines


def _with_nvlink(point: Point) -> float:
    size = 2.0 * point["batch"] * point["rows"]
    replica = kimi_on(H200)
    exchange = all_reduce(replica, size * replica.target.hidden_size)
    return serving_us(point) + 2e6 * replica.target.num_layers * exchange


def whole(points: Iterable[Point]) -> list[Point]:
    """Those of all layers."""
    return [p for p in points if p["layers"] == LAYERS]


def _few(points: Iterable[Point]) -> list[Point]:
    """Those of few layers, levers apart."""
    return [p for p in points if p["layers"] != LAYERS and not _lever(p)]


def _ours(points: Iterable[Point]) -> list[Point]:
    return [p for p in whole(points) if p["backend"] == "overstory"]


TABLES = {
    "goals": lambda points: goals(_ours(points)),
    "model": lambda points: against_model(_ours(points)),
    "stages_of_model": lambda points: stages_against_model(_ours(points)),
    "eight_h200": lambda points: eight_h200(_ours(points)),
    "steps": lambda points: steps(whole(points)),
    "few": lambda points: of_few_layers(p for p in _few(points) if p["backend"] == "overstory"),
    "triton_few": lambda points: triton_of_few_layers(
        _few(points), {tuple(p[name] for name in WHERE) for p in whole(points)}
    ),
    "levers": levers,
    "bottlenecks": lambda points: bottlenecks(_ours(points)),
    "experts": lambda points: experts(_ours(points)),
    "triton": lambda points: against_triton(whole(points)),
    "budgets": lambda points: budgets(whole(points)),
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
    return filled(text, "table", lambda name: TABLES[name](points))


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


if __name__ == "__main__":
    main()
