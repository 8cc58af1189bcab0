"""The speeds in a session's results.json as CSV, as a picture, and as Markdown tables.

engine_table.py RESULTS CSV SVG [GPU VERSIONS COMMIT]

The last three are those of this machine and checkout if left out; a checkout without its history
has no commit, then OVERSTORY_COMMIT is taken.

Columns are those of `overstory bench --csv` as far as they exist here (nobody leaves early).
`ttft_ms` is the engine's own: nothing passes HTTP, and the prompt is in the prefix cache after the
first batch. `tokens_per_forward` is over all requests of a batch, those that have ended included:
where texts end one by one it is less than what a running one gains (`accepted_by_depth` is of
those). `apart` is the third quartile of ms per step over the first, batch by batch; the same
steps run in every greedy batch, so it says how far a row can be believed. `of_best` of `auto`: by
the least favourable mode of its engine, the median of the ratios of tokens/s of batches that ran in
the same round.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_plot import write_plot

from overstory.kernels.bench.results import COMMIT_VARIABLE
from overstory.orchestrator.bench_files import made_with
from overstory.orchestrator.host_facts import host_facts

LONG = 32768
BASE = "stock"
AUTO, FIRST = "auto", "auto-first"


def rows(results: dict[str, Any], **of_run: str) -> list[dict[str, Any]]:
    """One per engine, mode, concurrency, temperature and context."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for engine, report in sorted(results.items()):
        for run in (*report.get("bench", ()), *report.get("long", ())):
            mode = engine if run["policy"] == "None" else run["policy"]
            context = "100-480" if "conc" in run else str(LONG)
            key = (context, run.get("T", 0.0), run.get("conc", 1), engine, mode)
            cells.setdefault(key, []).append(run)
    every = [_row(key, runs) | of_run for key, runs in sorted(cells.items())]
    base = {_place(row): row["tokens_per_s"] for row in every if row["mode"] == BASE}
    shares = {key: _of_best(key, cells) for key in cells if key[-1] == AUTO}
    for row, key in zip(every, sorted(cells), strict=True):
        found = base.get(_place(row))
        row["speedup"] = round(row["tokens_per_s"] / found, 2) if found else None
        row["of_best"], row["best"] = shares.get(key, (None, None))
    return every


def _of_best(
    key: tuple[Any, ...], cells: dict[tuple[Any, ...], list[dict[str, Any]]]
) -> tuple[float | None, str | None]:
    """Least median of ratios of the automatic rule to a fixed mode, and that mode."""
    mine, found = _rounds(cells[key]), {}
    for other, runs in cells.items():
        if other[:-1] != key[:-1] or other[-1] in (AUTO, FIRST):
            continue
        theirs = _rounds(runs)
        ratios = [mine[at] / theirs[at] for at in mine.keys() & theirs.keys()]
        if ratios:
            found[other[-1]] = statistics.median(ratios)
    if not found:
        return None, None
    worst = min(found, key=lambda mode: found[mode])
    return round(found[worst], 3), worst


def _rounds(runs: Sequence[dict[str, Any]]) -> dict[tuple[int, int], float]:
    """(repeat, round) -> tokens/s of the batch that ran then."""
    return {
        (run["repeat"], number): tokens / seconds
        for run in runs
        for number, (tokens, seconds, _) in enumerate(run.get("batches", ()))
    }


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["load"], row["temperature"], row["concurrency"]


def _row(key: tuple[Any, ...], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    context, temperature, concurrency, engine, mode = key
    batches = [batch for run in runs for batch in run.get("batches", ())] or [
        [run["tokens_per_s"], 1.0, 1e3 / run["ms_per_forward"]] for run in runs
    ]
    tokens, seconds, forwards = (sum(column) for column in zip(*batches, strict=True))
    times = sorted(1e3 * took / steps for _, took, steps in batches)
    low, high = (times[round(q * (len(times) - 1))] for q in (0.25, 0.75))
    choices, offered, accepted = _counts(runs)
    return {
        "engine": engine,
        "mode": mode,
        "concurrency": concurrency,
        "temperature": temperature,
        "load": f"{context} tokens of context",
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_forward": round(tokens / forwards / concurrency, 3),
        "ms_per_step": round(statistics.median(times), 3),
        "least_ms_per_step": round(times[0], 3),
        "apart": round(high / low, 2),
        "batches": len(batches),
        "seconds": round(seconds, 2),
        "ttft_ms": _median(runs, "ttft_ms"),
        "ttft_p95_ms": _median(runs, "ttft_p95_ms"),
        "accepted_by_depth": " ".join(
            f"{a / offered[0]:.4f}" for a in accepted if offered and offered[0]
        ),
        "tokens_per_s_rounds": " ".join(f"{run['tokens_per_s']:.0f}" for run in runs),
        "requests": concurrency * len(batches),
        "tokens": round(tokens),
        "forwards": round(forwards),
        "choices": " ".join(f"{name}={count}" for name, count in choices.items()),
    }


def _median(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    known = [run[key] for run in runs if key in run]
    return round(statistics.median(known), 2) if known else None


def _counts(runs: Sequence[dict[str, Any]]) -> tuple[dict[str, int], list[int], list[int]]:
    """Forwards by policy; request steps that offered and reached each depth."""
    choices: dict[str, int] = {}
    sums = [0] * 14
    for run in runs:
        for name, counts in run.get("ran", {}).items():
            choices[name] = choices.get(name, 0) + counts[0]
            if name != "plain":
                sums = [a + b for a, b in zip(sums, counts[1:], strict=False)]
    return choices, sums[0::2], sums[1::2]


def tables(every: list[dict[str, Any]]) -> Iterator[str]:
    """By temperature: a line for each mode, tokens/s by concurrency, and in brackets `apart`; then
    what share of the best mode `auto` got."""
    for temperature in dict.fromkeys(row["temperature"] for row in every):
        some = [row for row in every if row["temperature"] == temperature]
        sizes = sorted({row["concurrency"] for row in some})
        yield f"T = {temperature:g}\n"
        yield "| mode | " + " | ".join(map(str, sizes)) + " |"
        yield "|---" * (1 + len(sizes)) + "|"
        for mode in dict.fromkeys(row["mode"] for row in some):
            cells = {row["concurrency"]: row for row in some if row["mode"] == mode}
            yield f"| {mode} | " + " | ".join(_cell(cells.get(size)) for size in sizes) + " |"
        own = {row["concurrency"]: row for row in some if row["mode"] == AUTO}
        if own:
            cells = (f"{own[n]['of_best']} ({own[n]['best']})" if n in own else "" for n in sizes)
            yield "| auto of the best | " + " | ".join(cells) + " |"
        yield ""


def accepted(results: dict[str, Any]) -> Iterator[str]:
    """By temperature: a line for each mode that drafts, the share of drafts whose accepted path
    reached depth 1, 2, ..., of all concurrencies together."""
    runs: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for report in results.values():
        for run in report.get("bench", ()):
            drafted = any(name != "plain" for name in run.get("ran", ()))
            if drafted and run["policy"] != FIRST:
                runs.setdefault((run["T"], run["policy"]), []).append(run)
    for temperature in sorted({at for at, _ in runs}):
        shares = {}
        for (at, mode), some in sorted(runs.items()):
            _, offered, reached = _counts(some)
            if at == temperature and offered[0]:
                shares[mode] = [count / offered[0] for count in reached]
        depths = max((len(of_mode) for of_mode in shares.values()), default=0)
        yield f"Accepted by depth, T = {temperature:g}\n"
        yield "| mode | " + " | ".join(map(str, range(1, depths + 1))) + " |"
        yield "|---" * (1 + depths) + "|"
        for mode, of_mode in shares.items():
            yield f"| {mode} | " + " | ".join(f"{share:.2f}" for share in of_mode) + " |"
        yield ""


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['tokens_per_s']:,.0f} ({row['apart']:.1f})" if row else ""


def _of_run(given: Sequence[str]) -> dict[str, str]:
    if given:
        return dict(zip(("gpu", "versions", "commit"), given, strict=True))
    found = made_with(host_facts())
    return found | {"commit": found["commit"] or os.environ.get(COMMIT_VARIABLE, "")}


def main() -> None:
    """Writes CSV and picture, prints the tables."""
    source, target, picture, *given = sys.argv[1:]
    results = json.loads(Path(source).read_text())
    of_run = _of_run(given)
    every = rows(results, **of_run)
    if not every:  # of no role that times speeds
        return
    with Path(target).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(every[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)
    short = [row for row in every if not row["load"].startswith(str(LONG))]
    write_plot([row for row in short if row["mode"] != FIRST], of_run["gpu"], Path(picture))
    print("\n".join((*tables(short), *accepted(results))))
    for row in every:
        if row not in short:
            columns = (row[name] for name in ("engine", "mode", "tokens_per_s", "ms_per_step"))
            print("| " + " | ".join(map(str, columns)) + " |")


if __name__ == "__main__":
    main()
