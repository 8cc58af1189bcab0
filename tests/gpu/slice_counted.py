"""What the rank slice found beside timed points, as text for its page. Pure but for the files.

slice_counted.py SESSION_FOLDER                           prints it
slice_counted.py keep [OLDER.json...] COMMIT=SESSION_FOLDER... > FILE.json
slice_counted.py FILE.json PAGE.md                        fills the page's marked blocks

Experts counted against rows, the automatic policy and the long prompt, of sessions of
`rank_slice_session.sh`, also of one that was cut.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slice_page import filled, table_row
from slice_rows import results

from overstory.orchestrator.experts import distinct_experts

EXPERTS, CHOSEN = 384, 8
KEPT = ("experts", "auto", "parts", "long", "chunks", "decode", "far_slots")
"""Of what a role writes."""


def touched(counts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Mean number of experts that a layer's rows chose, counted, beside what even routers would.

    A column for each share of the rows' states that was common to all of them.
    """
    at = {(c["batch"], c["rows"], c["alike"]): c for c in counts}
    shares = sorted({key[2] for key in at})
    head = ["batch", "rows of each", "even routers"]
    head += [f"counted, {share:.0%} alike (least to most of a layer)" for share in shares]
    lines = [table_row(head), "|" + "---|" * len(head)]
    for batch, rows in sorted({key[:2] for key in at}):
        cells = [f"{distinct_experts(EXPERTS, CHOSEN, batch * rows):.0f}"]
        for found in (at.get((batch, rows, share)) for share in shares):
            cells.append(
                f"{found['mean']:.0f} ({found['least']} to {found['most']})" if found else ""
            )
        lines.append(table_row([batch, rows, *cells]))
    return lines


def long_prompt(role: Mapping[str, Any]) -> list[str]:
    """Seconds and memory of a long prompt's chunks and of the steps after it, as far as it came."""
    lines = []
    for what in ("chunks", "decode"):
        found: Sequence[Mapping[str, float]] = role.get(what, [])
        if not found:
            continue
        seconds = [f["seconds"] for f in found]
        said = f"{what}: {len(found)}, {sum(seconds):.2f} s in all, each {min(seconds):.3f} to "
        said += f"{max(seconds):.3f} s, median {statistics.median(seconds):.3f}"
        if "allocated_gb" in found[0]:
            held = [f["allocated_gb"] for f in found]
            said += f"; allocated {held[0]:.2f} GB after the first, {held[-1]:.2f} after the last"
            said += f", peak {found[-1]['peak_gb']:.2f}"
        lines.append(said)
    if done := role.get("long"):
        lines.append(f"prompt of {done['tokens']} tokens: to its end")
    if far := role.get("far_slots"):
        near, last = far["highest_slot"]
        lines.append(
            f"one text from slots up to {near} and up to {last} "
            f"(element {far['highest_element'][1]}): {'equal' if far['equal'] else 'NOT equal'}, "
            f"log-probabilities apart by at most {far['logprobs_apart']:.4g}, "
            f"{far['distinct_tokens']} distinct tokens"
        )
    return lines or ["nothing"]


def automatic(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The automatic policy against the best fixed one, tokens a second, and what it took.

    Args:
        found: of `slice_auto.AutoBench.cell`, with the ``commit``; of several for a point the last
            counts.
    """
    where = ("drafter", "batch", "context")
    at = {tuple(row[name] for name in where): row for row in found}
    head = ("drafter (simulated)", "batch", "context", "best fixed", "tokens/s", "auto", "of it")
    lines = [table_row([*head, "steps timed under auto", "commit"]), "|" + "---|" * (len(head) + 2)]
    for place, row in sorted(at.items()):
        best, auto = row["rates"][row["best"]], row["rates"]["auto"]
        took = ", ".join(f"{name} {count}" for name, count in row["used"].items())
        cells = (*place, row["best"], f"{best:.0f}", f"{auto:.0f}", f"{auto / best:.1%}", took)
        lines.append(table_row([*cells, row.get("commit", "")]))
    return lines


def both_ways(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Milliseconds of a step as one graph and in parts, as a server launches them and each waited
    for."""
    at = {(point["batch"], point["context"], point["rows"]): point for point in found}
    head = ("batch", "context", "rows", "one graph", "in parts", "alone: one graph", "in parts")
    lines = [table_row(head), "|" + "---|" * len(head)]
    for place, point in sorted(at.items()):
        ways = point["whole"], point["in_parts"]
        times = [way.get("in_a_row_us", way["step_us"]) for way in ways]
        times += [way["step_us"] for way in ways]
        lines.append(table_row([*place, *(f"{us / 1000:.2f}" for us in times)]))
    return lines


def kept(words: Iterable[str]) -> dict[str, Any]:
    """What is stored of sessions: `KEPT` of each role, in the order of the words.

    Args:
        words: COMMIT=SESSION_FOLDER, or a file that an earlier call wrote.
    """
    roles: list[dict[str, Any]] = []
    for word in words:
        commit, separator, folder = word.partition("=")
        if not separator:
            roles += json.loads(Path(word).read_text())["roles"]
            continue
        for name, role in results(Path(folder)).items():
            if found := {key: role[key] for key in KEPT if key in role}:
                roles.append({"role": name, "commit": commit, "layers": role["layers"]} | found)
    return {"roles": roles}


def _blocks(stored: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lines of each block of a page, by its name."""
    roles = stored["roles"]
    long = next(role for role in reversed(roles) if "long" in role)
    return {
        "touched": touched([count for role in roles for count in role.get("experts", [])]),
        "automatic": automatic(
            row | {"commit": role["commit"]} for role in roles for row in role.get("auto", [])
        ),
        "parts": both_ways(point for role in roles for point in role.get("parts", [])),
        "long": [f"- {line}" for line in long_prompt(long)],
    }


def fill(text: str, stored: Mapping[str, Any]) -> str:
    """The page with every block between `<!-- counted NAME -->` and `<!-- end -->` made anew."""
    return filled(text, "counted", _blocks(stored).__getitem__)


def main() -> None:
    first, *others = sys.argv[1:]
    if first == "keep":
        print(json.dumps(kept(others), separators=(",", ":")))
        return
    if others:
        page = Path(others[0])
        page.write_text(fill(page.read_text(), json.loads(Path(first).read_text())))
        return
    for name, role in results(Path(first)).items():
        if counts := role.get("experts"):
            print(f"## {name}: experts touched\n", *touched(counts), "", sep="\n")
        if auto := role.get("auto"):
            print(f"## {name}: the automatic policy\n", *automatic(auto), "", sep="\n")
        if parts := role.get("parts"):
            print(f"## {name}: one graph and in parts\n", *both_ways(parts), "", sep="\n")
        if name == "long":
            print(f"## {name}\n", *long_prompt(role), "", sep="\n")


if __name__ == "__main__":
    main()
