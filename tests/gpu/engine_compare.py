"""Reads what engine_runs.py wrote and says what is equal, where texts part, and how fast it was.

engine_compare.py RESULTS_JSON
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from engine_pairs import against, compared

Texts = list[list[int]]

STEP_KINDS = {
    "step_ms": "milliseconds, mean,",
    "median_ms": "milliseconds, median,",
    "step_tokens": "tokens",
}
"""Of `engine_pairs.measure`: what `auto`'s steps are compared to rivals' by, apart from each other.
What seldom comes between two steps is in the mean alone."""


def load(file: Path) -> dict[str, dict[str, Any]]:
    """Role -> what it reported."""
    return dict(json.loads(file.read_text()))


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
                gaps_here = report.get("ruled_gaps" if kind == "ruled" else "gaps")
                own = parted(texts, said["plain"], None if kind == "sampled" else gaps_here)
                print(f"  {role} {policy} against its plain: {own}")


def compare_graphs(every: dict[str, dict[str, Any]]) -> None:
    """Texts with CUDA graphs against those of the same engine without."""
    for role, report in every.items():
        off = report.get("greedy_without_graphs")
        if not off:
            continue
        print(f"\n== {role}: greedy with graphs against without")
        for policy, texts in report["greedy"].items():
            print(f"  {policy}: {parted(texts, off[policy], report.get('gaps'))}")


def compare_logprobs(every: dict[str, dict[str, Any]], reference: str, prefix: str) -> None:
    """Log-probabilities of the tokens as far as texts are equal: how far apart at most."""
    base = every.get(reference, {}).get("logprobs")
    if not base:
        return
    wanted = next(iter(base.values()))
    print(f"\n== log-probabilities against {reference}, as far as texts are equal")
    for role, report in every.items():
        if role == reference or role.startswith("fp32") != bool(prefix):
            continue
        for policy, texts in report.get("logprobs", {}).items():
            print(f"  {role} {policy}: {_apart(texts, wanted)}")


def _apart(texts: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str:
    most, count, gaps = 0.0, 0, []
    for one, other in zip(texts, wanted, strict=True):
        at = first_difference(one["ids"], other["ids"])
        equal = len(one["ids"]) if at is None else at
        for mine, theirs in zip(one["best"][:equal], other["best"][:equal], strict=True):
            shared = mine.keys() & theirs.keys()
            most = max([most, *(abs(mine[token] - theirs[token]) for token in shared)])
            count += len(shared)
        if at is not None:
            best = sorted(other["best"][at].values(), reverse=True)
            gaps.append(f"text parts at {at}, best two {best[0] - best[1]:.6f} apart")
    return f"{most:.3g} apart at most, of {count}" + "".join(f"; {gap}" for gap in gaps)


def kernel_logits(every: dict[str, dict[str, Any]]) -> None:
    """Our kernel's logits against those of Triton's backend in the same forward."""
    for role, report in every.items():
        rows = report.get("kernel_logits")
        if not rows:
            continue
        differences = sorted(row["difference"] for row in rows)
        flipped = [row["gap"] for row in rows if row["gap"] > 0]
        deepest, largest = (max(row[name] for row in rows) for name in ("depth", "logit"))
        print(
            f"\n== {role}: {len(rows)} rows of verify forwards, down to depth {deepest:.0f}, by "
            f"our kernel and by Triton: logits apart by {differences[-1]:.4f} at most, "
            f"{statistics.median(differences):.4f} in the median row (largest {largest:.1f}); "
            f"another best token in {len(flipped)} rows, best two {max(flipped, default=0.0):.4f} "
            "apart there at most"
        )


def partings(every: dict[str, dict[str, Any]]) -> None:
    """How close the draws were at which sampled texts part."""
    for role, report in every.items():
        rows = report.get("partings")
        if not rows:
            continue
        print(f"\n== {role}: where sampled texts part from plain's (probability)")
        for row in rows:
            spread = "unknown" if row["spread"] is None else f"{row['spread']:.4f}"
            edge = ""
            if row.get("edge") is not None:
                edge = (
                    f"; top-p's edge is {row['edge']:.5f} away, with one token more or less there "
                    f"the bound would be off by {row['edge_shift']:.5f}"
                )
            print(
                f"  {row['policy']:8} text {row['text']} token {row['token']}: bound off u by "
                f"{row['shift']:.5f}, distributions of other forwards apart by {spread}{edge}"
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


def speeds(every: dict[str, dict[str, Any]]) -> None:
    """Tokens per second: the median and the runs; against the best that is not `auto`."""
    cells: dict[tuple[int, float], dict[str, list[dict[str, Any]]]] = {}
    for role, report in every.items():
        for row in report.get("bench", []):
            name = role if row["policy"] == "None" else row["policy"]
            cells.setdefault((row["conc"], row["T"]), {}).setdefault(name, []).append(row)
    print("\n== tokens/s: median (runs), ms per forward, tokens per forward, of the best but auto")
    for (conc, temperature), names in sorted(cells.items(), key=lambda item: item[0][::-1]):
        rates = {n: statistics.median(r["tokens_per_s"] for r in rows) for n, rows in names.items()}
        best = max((rate for name, rate in rates.items() if "auto" not in name), default=1.0)
        print(f"  {conc} requests, T {temperature}")
        for name, rows in names.items():
            runs = " ".join(f"{row['tokens_per_s']:.0f}" for row in rows)
            ms, each = (
                statistics.median(row[key] for row in rows)
                for key in ("ms_per_forward", "tokens_per_forward")
            )
            print(
                f"    {name:8} {rates[name]:8.0f} ({runs})  {ms:.3f} ms  {each:.2f}  "
                f"{rates[name] / best:.3f}"
            )
    noise = [row for report in every.values() for row in report.get("bench", []) if "noise" in row]
    if noise:
        sums = {name: sum(row["noise"][name] for row in noise) for name in noise[0]["noise"]}
        print("  in all: " + ", ".join(f"{name} {value:.1f}" for name, value in sums.items()))
    for role, report in every.items():
        for row in report.get("long", []):
            print(
                f"  {role:12} {row['policy']:8} 32k: {row['tokens_per_s']:8.1f} tokens/s  "
                f"{row['ms_per_forward']:.3f} ms"
            )


def host_times(every: dict[str, dict[str, Any]]) -> None:
    """What a step takes, and how much of it the device works; leases on against off."""
    for role, report in every.items():
        found = report.get("profile")
        if found:
            print(
                f"\n== {role}: step {found['step_ms']:.3f} ms, device {found['device_ms']:.3f}, "
                f"host {found['host_ms']:.3f}, launches {found['launches']:.0f}"
            )
        for rows in (report.get("leases", []), report.get("lease_parts", [])):
            if len(rows) > 1:
                lease_costs(role, rows)


def lease_costs(role: str, rows: list[dict[str, float]]) -> None:
    """Leases on against off, and what they add to a step; texts beside each other are compared."""
    for kind in (name for name in rows[0] if name != "free" and not name.endswith("_us")):
        print(f"== {role}: {kind} against free {compared([r[kind] / r['free'] for r in rows])}")
        wall, own = (
            statistics.median(row[f"{kind}_{what}"] - row[f"free_{what}"] for row in rows)
            for what in ("us", "own_us")
        )
        free, own_free = (
            statistics.median(r[f"free_{what}"] for r in rows) for what in ("us", "own_us")
        )
        print(
            f"   {wall:+.1f} us of the wall to a step of {free:.0f}, {own:+.1f} of the loop's "
            f"thread to {own_free:.0f}"
        )


def pairs(every: dict[str, dict[str, Any]]) -> None:
    """`auto` against the best fixed policies, round by round."""
    for role, report in every.items():
        for row in report.get("pairs", []):
            rivals = against(row)
            told = "; ".join(f"{name} {ratio}" for name, ratio in rivals.items())
            least = min((ratio.median for ratio in rivals.values()), default=math.nan)
            print(
                f"\n== {role}: auto at {row['requests']} requests, T {row['T']}: "
                f"{least:.3f} of the best; over {told or 'too few rounds'}"
            )
            if "steps_alone" in row:
                alone = against(row, "steps_alone")
                told = "; ".join(f"{name} {ratio}" for name, ratio in alone.items())
                print(f"   without what prefills take: {told}")
                print(f"   {_windows(row)}")
            if "evened" in row:
                evened = against(row, "evened")
                told = "; ".join(f"{name} {ratio}" for name, ratio in evened.items())
                print(f"   with as many prefills for all: {told}")
            if "step_ms" in row:
                for kind, what in STEP_KINDS.items():
                    told = "; ".join(f"{name} {r}" for name, r in against(row, kind).items())
                    print(f"   {what} of a step: {told}")
            if "ran" in row:
                steps = ", ".join(f"{n} {ms:.3f}" for n, ms in row["ms_per_step"].items())
                print(f"   ms per step: {steps}; auto's steps: {row['ran']}")
            for rule, own in row.get("own", {}).items():
                print(f"   {_own_work(rule, own)}")
            for part, spent in row.get("spent", {}).items():
                print(f"   {part}: {spent['calls']} of {spent['mean_us']:.0f} us")
            if "rule" in row:
                told = ", ".join(
                    f"{name} {one['tokens']:.2f} in {one['us']} us (off {one['off']:.3f}, "
                    f"{one['compared']} compared)"
                    for name, one in row["rule"].get("options", {}).items()
                )
                print(f"   believed at {row['rule'].get('batch')} requests: {told}")
                print(f"   noise {row['rule'].get('noise')}, {row['machine']}")


def _own_work(rule: str, own: dict[str, Any]) -> str:
    """Of `engine_pairs.OwnWork`."""
    changes, visits = (", ".join(f"{us:.0f}" for us in own[f"{n}_us"]) for n in ("change", "visit"))
    return (
        f"the chooser's own work, {rule}: {own['mean_us']:.1f} us of a step (median "
        f"{own['median_us']:.1f}; {own['steps']} steps); {own['changes']} changes of what runs, us "
        f"of the first steps {changes or 'unknown'}, of a visit's {visits or 'unknown'}"
    )


def _windows(row: dict[str, Any]) -> str:
    """What windows held: means of `auto`'s, and tokens/s by which rivals were chosen."""
    steps, prefills, share, running = (
        row[name]["auto"] for name in ("steps", "prefills", "prefill_share", "running")
    )
    tried = ", ".join(f"{name} {rate:.0f}" for name, rate in row["fixed"].items())
    return (
        f"windows of {row['window']['tokens']} tokens, requests of {row['window']['new']}: "
        f"{steps:.0f} steps of {running:.2f} requests and {prefills:.1f} prefills "
        f"({share:.1%} of the time); tokens/s at first: {tried}"
    )


def stages(every: dict[str, dict[str, Any]]) -> None:
    """Of each policy's step: milliseconds on the device, idle before the next, and of its parts."""
    for role, report in every.items():
        for name, row in report.get("stages", {}).items():
            print(f"== {role} {name}: {json.dumps(row)}")


def main() -> None:
    """Prints everything."""
    every = load(Path(sys.argv[1]))
    for role, report in every.items():
        print(role, "start", report.get("start_seconds"), "errors", sorted(report["errors"]))
        for name, text in report["errors"].items():
            print(f"--- {role} {name}\n{text[-1500:]}")
    compare_texts(every, "greedy", "stock")
    compare_texts(every, "greedy", "fp32_stock")
    compare_graphs(every)
    compare_texts(every, "greedy_spine", "none")
    compare_logprobs(every, "stock", "")
    compare_logprobs(every, "fp32_stock", "fp32")
    kernel_logits(every)
    compare_texts(every, "sampled", "none")
    compare_texts(every, "ruled", "none")
    partings(every)
    nodes(every)
    speeds(every)
    pairs(every)
    stages(every)
    host_times(every)
    for role, report in every.items():
        for step in ("steps", "steps_after"):
            if step in report:
                print(f"\n== {role} {step}: {json.dumps(report[step])}")


if __name__ == "__main__":
    main()
