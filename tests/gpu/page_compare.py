"""Reads what page_engines.py wrote: texts of larger pages against those of single slots, speeds.

page_compare.py FOLDER PAGE...
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from engine_compare import parted


def main() -> None:
    folder, pages = Path(sys.argv[1]), sys.argv[2:]
    every: dict[str, dict[str, Any]] = {}
    for page in pages:
        file = folder / f"{page}.json"
        every[page] = json.loads(file.read_text()) if file.exists() else {}
        one = every[page]
        print(
            f"page {page}: {one.get('allocator')}, started in {one.get('start_seconds')} s, "
            f"all in {one.get('seconds')} s; {one.get('taken_away')}"
        )
        for name, text in one.get("errors", {}).items():
            print(f"  ERROR in {name}:\n{text}")
        for policy, found in one.get("again", {}).items():
            print(
                f"  {policy} again: cached {found['cached']} of {found['asked']}, "
                f"{sum(found['goes_on'])} of {len(found['goes_on'])} go on as the text does"
            )
    base = every[pages[0]].get("greedy", {})
    for page in pages:
        for policy, texts in every[page].get("greedy", {}).items():
            if page != pages[0] and policy in base:
                print(
                    f"page {page} {policy} against page {pages[0]}: "
                    f"{parted(texts, base[policy], None)}"
                )
            if policy != "plain":
                plain = every[page]["greedy"]["plain"]
                print(f"page {page} {policy} against its plain: {parted(texts, plain, None)}")
    _speeds(every)


def _speeds(every: dict[str, dict[str, Any]]) -> None:
    print("tokens/s: median (least to most) of the rounds")
    cells = {(r["conc"], r["policy"]) for one in every.values() for r in one.get("times", ())}
    for conc, policy in sorted(cells):
        parts = []
        for page, one in every.items():
            rates = [
                row["tokens_per_s"]
                for row in one.get("times", ())
                if (row["conc"], row["policy"]) == (conc, policy)
            ]
            if rates:
                parts.append(
                    f"page {page}: {statistics.median(rates):.0f} "
                    f"({min(rates):.0f} to {max(rates):.0f})"
                )
        print(f"  {conc} requests, {policy}: " + "; ".join(parts))


if __name__ == "__main__":
    main()
