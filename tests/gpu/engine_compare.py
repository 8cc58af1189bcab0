"""Reads what engine_runs.py wrote and says what is equal, where texts part, and how fast it was.

engine_compare.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Texts = list[list[int]]


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Role -> what it reported."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs; None if the texts are equal."""
    for i, pair in enumerate(zip(a, b, strict=False)):
        if pair[0] != pair[1]:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def parted(texts: Texts, other: Texts, gaps: list[list[float]] | None) -> str:
    """How many texts are equal; of the others the place and the gap of the top two there."""
    equal, apart = 0, []
    for i, (a, b) in enumerate(zip(texts, other, strict=False)):
        at = first_difference(a, b)
        if at is None:
            equal += 1
            continue
        known = gaps is not None and i < len(gaps) and at < len(gaps[i])
        gap = f"gap {gaps[i][at]:.4f}" if known and gaps is not None else "gap unknown"
        apart.append(f"text {i} from token {at} ({gap})")
    return f"{equal} of {len(texts)} equal" + "".join(f"\n      {line}" for line in apart)


def compare_texts(every: dict[str, dict[str, Any]], kind: str, reference: str) -> None:
    """Each policy of each role against the reference role's text, and against its own plain."""
    base = every.get(reference, {}).get(kind)
    gaps = every.get(reference, {}).get("gaps") if kind == "greedy" else None
    print(f"\n== {kind}: against {reference}, and each role against its own plain")
    for role, report in every.items():
        said = report.get(kind)
        if not said or role.startswith("fp32") != reference.startswith("fp32"):
            continue
        for policy, texts in said.items():
            if base is not None:
                print(f"  {role} {policy}: {parted(texts, next(iter(base.values())), gaps)}")
            if "plain" in said and policy != "plain":
                own = parted(texts, said["plain"], report.get("gaps"))
                print(f"  {role} {policy} against its plain: {own}")


def compare_roles(every: dict[str, dict[str, Any]], kind: str, a: str, b: str) -> None:
    """The same policies of two roles."""
    one, other = every.get(a, {}).get(kind), every.get(b, {}).get(kind)
    if not one or not other:
        return
    print(f"\n== {kind}: {a} against {b}")
    for policy in one:
        if policy in other:
            print(f"  {policy}: {parted(one[policy], other[policy], every[b].get('gaps'))}")


def partings(every: dict[str, dict[str, Any]]) -> None:
    """How close the draws were at which sampled texts part."""
    for role, report in every.items():
        rows = report.get("partings")
        if not rows:
            continue
        print(f"\n== {role}: where sampled texts part from plain's (probability)")
        for row in rows:
            spread = "unknown" if row["spread"] is None else f"{row['spread']:.4f}"
            print(
                f"  {row['policy']:8} text {row['text']} token {row['token']}: bound off u by "
                f"{row['shift']:.5f}, distributions of other forwards apart by {spread}"
            )


def nodes(every: dict[str, dict[str, Any]]) -> None:
    """Logits of tree nodes against their paths run alone."""
    for role, report in every.items():
        rows = report.get("nodes")
        if not rows:
            continue
        most, gap = (max(row[name] for row in rows) for name in ("difference", "gap"))
        deepest = max(row["depth"] for row in rows)
        print(
            f"\n== {role}: {len(rows)} nodes down to depth {deepest} against their paths alone: "
            f"log-probabilities apart by {most:.5f} at most; where the best token differs, the "
            f"best two are {gap:.5f} apart at most"
        )


def times(every: dict[str, dict[str, Any]]) -> None:
    """Tokens per second of every role and policy."""
    print("\n== tokens/s (median; runs), ms per forward, tokens per forward")
    for role, report in every.items():
        for row in report.get("times", []):
            runs = " ".join(f"{run:.0f}" for run in row["runs"])
            print(
                f"  {role:7} {row['policy']:8} conc {row['conc']} T {row['T']}: "
                f"{row['tokens_per_s']:8.0f} ({runs})  {row['ms_per_forward']:.3f} ms  "
                f"{row['tokens_per_forward']:.2f}"
            )
        for row in report.get("long_times", []):
            print(
                f"  {role:12} {row['policy']:8} 32k: {row['tokens_per_s']:8.1f} tokens/s  "
                f"{row['ms_per_forward']:.3f} ms"
            )


def main() -> None:
    """Prints everything."""
    every = load(Path(sys.argv[1]))
    for role, report in every.items():
        print(role, "start", report.get("start_seconds"), "errors", sorted(report["errors"]))
        for name, text in report["errors"].items():
            print(f"--- {role} {name}\n{text[-1500:]}")
    compare_texts(every, "greedy", "stock")
    compare_texts(every, "greedy", "fp32_stock")
    for kind in ("greedy", "sampled", "ruled"):
        compare_roles(every, kind, "ours", "eager")
        compare_roles(every, kind, "ours", "parts")
        compare_roles(every, kind, "ours", "triton")
    compare_texts(every, "sampled", "none")
    compare_texts(every, "ruled", "none")
    partings(every)
    nodes(every)
    times(every)
    for role, report in every.items():
        for step in ("steps", "steps_after"):
            if step in report:
                print(f"\n== {role} {step}: {json.dumps(report[step])}")


if __name__ == "__main__":
    main()
