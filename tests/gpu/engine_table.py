"""The speeds in a session's results.json as CSV, and as a Markdown table with ratios.

engine_table.py RESULTS COMMIT VERSIONS GPU CSV
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = (
    "engine",
    "policy",
    "concurrency",
    "temperature",
    "context",
    "tokens_per_s",
    "runs",
    "ms_per_forward",
    "tokens_per_forward",
    "gpu",
    "versions",
    "commit",
)
LONG = 32768


def rows(results: dict[str, Any], **of_run: str) -> Iterator[dict[str, Any]]:
    """One per engine, policy, concurrency and temperature."""
    for engine, report in sorted(results.items()):
        for row in (*report.get("times", ()), *report.get("long_times", ())):
            long = "conc" not in row
            yield {
                "engine": engine,
                "policy": "" if row["policy"] == "None" else row["policy"],
                "concurrency": row.get("conc", 1),
                "temperature": row.get("T", 0.0),
                "context": LONG if long else "100-480",
                "tokens_per_s": f"{row['tokens_per_s']:.1f}",
                "runs": " ".join(f"{run:.0f}" for run in row.get("runs", ())),
                "ms_per_forward": f"{row['ms_per_forward']:.3f}",
                "tokens_per_forward": f"{row['tokens_per_forward']:.2f}",
            } | of_run


def table(every: list[dict[str, Any]]) -> Iterator[str]:
    """Tokens/s, and in brackets how many times those of SGLang's plain decoding."""
    places = [(1, 0.0), (1, 1.0), (8, 0.0), (8, 1.0)]
    yield "| engine | policy | " + " | ".join(f"{c} at a time, T = {t:g}" for c, t in places) + " |"
    yield "|---" * (2 + len(places)) + "|"
    short = [row for row in every if row["context"] != LONG]
    found = {
        (row["engine"], row["policy"], row["concurrency"], row["temperature"]): row for row in short
    }
    for engine, policy in dict.fromkeys((row["engine"], row["policy"]) for row in short):
        cells = []
        for place in places:
            row, stock = found.get((engine, policy, *place)), found.get(("stock", "", *place))
            if row is None:
                cells.append("")
                continue
            rate = float(row["tokens_per_s"])
            ratio = f" ({rate / float(stock['tokens_per_s']):.2f}x)" if stock else ""
            cells.append(f"{rate:,.0f}{ratio}; {row['ms_per_forward']} ms")
        yield f"| {engine} | {policy} | " + " | ".join(cells) + " |"


def main() -> None:
    """Writes the CSV, prints the table."""
    source, commit, versions, gpu, target = sys.argv[1:]
    results = json.loads(Path(source).read_text())
    every = list(rows(results, gpu=gpu, versions=versions, commit=commit))
    with Path(target).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)
    print("\n".join(table(every)))
    for row in every:
        if row["context"] == LONG:
            print(
                f"| {row['engine']} | {row['policy']} | {row['tokens_per_s']} | "
                f"{row['ms_per_forward']} |"
            )


if __name__ == "__main__":
    main()
