"""`overstory report`: what is deployed, what was measured, where time goes and what limits it next.

Pure but for `gather_report`. Every figure carries its source; a figure without one cannot be made.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overstory.orchestrator.auto_text import auto_line
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.report_model import modelled_step, stage_milliseconds
from overstory.orchestrator.status_live import faults
from overstory.orchestrator.step_figures import PolicyFigures, policy_figures

POOL_NEARLY_FULL = 0.85
FEW_ACCEPTED = 1.5
"""Tokens a drafted step yields below which drafting hardly pays."""
LONG_STAGE = 0.4
"""Share of a step above which a stage is called the bottleneck."""

_STAGE_MEANS = {
    "draft": "the drafter's forward",
    "build": "candidates and trees out of the draft",
    "verify": "the target's forward over the trees (attention, experts, exchange)",
    "accept": "sampling at the nodes and walking the trees",
    "commit": "moving accepted rows and the drafter's KV",
}


class ReportError(UserFault):
    """A benchmark file that cannot be read."""


@dataclass(frozen=True)
class Figure:
    """One fact. `source` says where it was read."""

    name: str
    value: Any
    source: str
    unit: str = ""


@dataclass(frozen=True)
class Section:
    """Some figures under one heading, with what they mean in words."""

    title: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """The whole report; `made` is the date and what it was made with."""

    deployment: str
    made: Mapping[str, Any]
    sections: tuple[Section, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`."""
        return asdict(self)


_SPEC = "deployment file as deployed"
_STATUS = "controller's status, read for this report"
_SERVE = "Ray Serve's status, read for this report"
_COUNTERS = "rank 0's counters since it started"


def _configuration(spec: Mapping[str, Any], endpoint: str) -> Section:
    engine, gateway = spec["engine"], spec["gateway"]
    rows = [
        Figure("endpoint", endpoint, _SPEC),
        Figure("model", spec["model"], _SPEC),
        Figure("drafter", spec["drafter"] or "none", _SPEC),
        Figure("replicas", spec["replicas"], _SPEC),
        Figure("ranks of a replica", engine.get("tp_size", 1), _SPEC),
        Figure("device", spec["resources"]["device"], _SPEC),
        Figure("largest tree", spec["tree"]["budget"], _SPEC, "nodes"),
        Figure("requests at a time, each replica", gateway["max_concurrent_requests"], _SPEC),
        Figure("requests waiting at most", gateway["max_queued_requests"], _SPEC),
    ]
    rows += [Figure(f"engine.{key}", value, _SPEC) for key, value in sorted(engine.items())]
    return Section("Goal and configuration", tuple(rows))


def _running(picture: Mapping[str, Any]) -> Section:
    rows = [Figure("ready", picture["ready"], "the endpoint's /ready")]
    for name, states in ((picture["serve"] or {}).get("replicas") or {}).items():
        counted = ", ".join(f"{n} {state}" for state, n in states.items() if n)
        rows.append(Figure(f"{name} processes", counted or "none", _SERVE))
    controller = picture["controller"] or {}
    for replica in controller.get("replicas", ()):
        rows.append(Figure(f"replica {replica['name']}", replica["phase"], _STATUS))
        for rank in replica["ranks"]:
            what = f"rank {rank['rank']} of {replica['name']}"
            rows.append(Figure(f"{what}, batches launched", rank["forwards"], _STATUS))
            if rank.get("tokens_per_s"):
                rows.append(Figure(f"{what}, now", rank["tokens_per_s"], _STATUS, "tokens/s"))
    gateway = picture.get("gateway")
    if gateway:
        source = "gateway's snapshot, read for this report"
        rows.append(Figure("sequences running", gateway["running"], source))
        rows.append(Figure("requests queued", gateway["queued"], source))
    return Section("What runs", tuple(rows))


def _first_ranks(picture: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and rank 0 of each replica under lease."""
    for replica in (picture["controller"] or {}).get("replicas", ()):
        if replica["phase"] == "leased" and replica["ranks"]:
            yield replica["name"], replica["ranks"][0]


def _measured(picture: Mapping[str, Any], benchmarks: Sequence[tuple[str, Any]]) -> Section:
    rows = []
    for name, rank in _first_ranks(picture):
        for figures in policy_figures(rank.get("steps")):
            if not figures.forwards:
                continue
            what = f"{name}, {figures.policy}"
            per = round(figures.tokens_per_forward, 3)
            rows.append(Figure(f"{what}: verify forwards", figures.forwards, _COUNTERS))
            rows.append(Figure(f"{what}: tokens a step and request", per, _COUNTERS))
            if figures.accepted:
                shares = [round(share, 3) for share in figures.accepted]
                rows.append(Figure(f"{what}: accepted by depth", shares, _COUNTERS))
        prefill = (rank.get("steps") or {}).get("prefill") or {}
        if prefill.get("ns"):
            rate = round(prefill["tokens"] / (prefill["ns"] / 1e9), 1)
            rows.append(Figure(f"{name}: prefill", rate, _COUNTERS, "tokens/s"))
    for path, result in benchmarks:
        host = result["host"]
        versions = ", ".join(f"{k} {v}" for k, v in host["versions"].items())
        model = result["deployment"]["served_model_name"]
        source = f"{path}: {model}, {host['date']}, {host['processor']}, {versions}"
        for row in result["rows"]:
            at = f"benchmark {row['mode']}, {row['concurrency']} at a time, T={row['temperature']}"
            at += f", {row['load']}" if row.get("load") else ""
            rows.append(Figure(at, row["tokens_per_s"], source, "tokens/s"))
    notes = [f"{path}: {r['stopped']}." for path, r in benchmarks if r.get("stopped")]
    if not benchmarks:
        notes.append(
            "No benchmark was given: `overstory bench --json FILE`, then `overstory report --bench "
            "FILE`."
        )
    return Section("Measured", tuple(rows), tuple(notes))


def _bottleneck(name: str, figures: PolicyFigures) -> str:
    stages, slowest = figures.stage_ms, figures.slowest
    assert slowest is not None
    share = stages[slowest] / sum(stages.values())
    means = _STAGE_MEANS.get(slowest, slowest)
    if share < LONG_STAGE:
        return f"{name}, {figures.policy}: no stage leads; {slowest} is {100 * share:.0f}%."
    return f"{name}, {figures.policy}: {100 * share:.0f}% of a step is {slowest}: {means}."


def _time(spec: Mapping[str, Any], picture: Mapping[str, Any], gpus: Sequence[str]) -> Section:
    rows, notes = [], []
    for name, rank in _first_ranks(picture):
        for figures in policy_figures(rank.get("steps")):
            for stage, ms in sorted(figures.stage_ms.items(), key=lambda pair: -pair[1]):
                what = f"{name}, {figures.policy}: {stage}"
                rows.append(Figure(what, round(ms, 3), _COUNTERS, "ms a step"))
            if figures.stage_ms:
                notes.append(_bottleneck(name, figures))
        if outside := _outside(rank):
            rows.append(Figure(f"{name}: between the stages", *outside))
        modelled = modelled_step(spec, rank, gpus)
        if modelled is None:
            continue
        step, point = modelled
        source = f"capacity model (docs/capacity.md), not measured: {point}"
        stages = stage_milliseconds(step)
        rows += [Figure(f"{name}: {what}", round(ms, 3), source, "ms") for what, ms in stages]
        notes.append(f"{name}: by the model, {stages[0][0]} takes most of a step.")
    return Section("Where the time goes", tuple(rows), tuple(notes))


def _outside(rank: Mapping[str, Any]) -> tuple[float, str, str] | None:
    """Milliseconds of a batch that no stage accounts for, with source and unit; None while nothing
    runs."""
    rate, load = rank.get("steps_per_s") or 0.0, rank.get("load") or {}
    figures = next(iter(policy_figures(rank.get("steps"))), None)
    if not rate or not load.get("running") or figures is None or not figures.stage_ms:
        return None
    left = 1000 / rate - sum(figures.stage_ms.values())
    source = f"{rate:g} batches/s between two reports, less the stages: host, prefill, waiting"
    return round(max(0.0, left), 3), source, "ms a step"


def _memory(picture: Mapping[str, Any]) -> Section:
    rows = []
    for name, rank in _first_ranks(picture):
        load = rank.get("load") or {}
        for key, what in (
            ("max_slots", "KV slots"),
            ("free_slots", "free slots"),
            ("cached_slots", "slots that only the prefix cache holds"),
        ):
            if key in load:
                rows.append(Figure(f"{name}: {what}", load[key], _STATUS))
    for replica in (picture["controller"] or {}).get("replicas", ()):
        seen = replica.get("fragmentation")
        if seen:
            source = f"slot picture {seen['age_s']:.0f} s before this report"
            share = round(seen["contiguous_share"], 4)
            rows.append(Figure(f"{replica['name']}: contiguous share of KV", share, source))
            run = seen["largest_free_run"]
            rows.append(Figure(f"{replica['name']}: largest free run", run, source))
    return Section("KV and fragmentation", tuple(rows))


def _decisions(spec: Mapping[str, Any], picture: Mapping[str, Any]) -> Section:
    controller = picture["controller"] or {}
    engine, control = spec["engine"], spec["control"]
    policy = controller.get("policy") or "as each rank started"
    fraction = engine.get("mem_fraction_static")
    why = "set in the deployment" if fraction else "SGLang's own rule: the deployment sets none"
    rows = [
        Figure("tree policy", policy, _STATUS),
        Figure("memory for weights and KV", fraction or "SGLang's default", why),
        Figure("steps of a lease", control["lease_steps"], _SPEC),
        _looks_at_fragments(control["defrag_every_s"]),
    ]
    notes = [
        f"Ranks: {spec['replicas']} x {engine.get('tp_size', 1)}; a replica stays on one node "
        "where one can hold it.",
    ]
    for name, rank in _first_ranks(picture):
        if chosen := auto_line(rank.get("auto")):
            rows.append(Figure(f"{name}: chosen by costs and acceptance", chosen, _COUNTERS))
    return Section("Decisions in force", tuple(rows), tuple(notes))


def _looks_at_fragments(every_s: float) -> Figure:
    what = "looks at fragmentation by itself"
    if not every_s:
        return Figure(what, "never (control.defrag_every_s: 0)", _SPEC)
    return Figure(what, f"every {every_s:g} s", _SPEC)


def _faults(picture: Mapping[str, Any]) -> Section:
    found = faults(picture)
    rows = [Figure(f"fault {number}", line, _STATUS) for number, line in enumerate(found, 1)]
    return Section("Faults", tuple(rows), () if found else ("None known.",))


def _limits(spec: Mapping[str, Any], picture: Mapping[str, Any]) -> Section:
    rows, notes = [], []
    for name, rank in _first_ranks(picture):
        load = rank.get("load") or {}
        if load.get("max_slots"):
            held = 1 - load["free_slots"] / load["max_slots"]
            rows.append(Figure(f"{name}: KV pool in use", round(held, 3), _STATUS))
            if held - load.get("cached_slots", 0) / load["max_slots"] > POOL_NEARLY_FULL:
                notes.append(
                    f"{name}: the KV pool is next: raise engine.mem_fraction_static or "
                    "engine.tp_size, or add a replica (`overstory plan` says what fits)."
                )
        for figures in policy_figures(rank.get("steps"))[:1]:
            if figures.offered and figures.tokens_per_forward < FEW_ACCEPTED:
                notes.append(
                    f"{name}: drafts are hardly accepted ({figures.tokens_per_forward:.2f} tokens "
                    "a step): see that the drafter is this model's, or use plain decoding."
                )
            if figures.stage_ms:
                notes.append(f"{name}: the step's {figures.slowest} stage is the one to shorten.")
    gateway = picture.get("gateway")
    if gateway and gateway["queued"]:
        notes.append(
            "Requests wait at the gateway: raise gateway.max_concurrent_requests if the KV pool "
            "has room, else scale out (`overstory scale`)."
        )
    if not notes:
        notes.append("Nothing is near its limit.")
    return Section("Next limit", tuple(rows), tuple(notes))


def make_report(
    record: Mapping[str, Any],
    picture: Mapping[str, Any],
    made: Mapping[str, Any],
    benchmarks: Sequence[tuple[str, Any]] = (),
) -> Report:
    """The report.

    Args:
        record: `DeploymentRecord` as a dict: `name`, `endpoint`, `spec`.
        picture: `status.gather`.
        made: `host_facts`.
        benchmarks: paths and contents of files that `overstory bench --json` wrote.
    """
    spec = record["spec"]
    sections = (
        _configuration(spec, record["endpoint"]),
        _running(picture),
        _measured(picture, benchmarks),
        _time(spec, picture, made.get("gpus") or ()),
        _memory(picture),
        _decisions(spec, picture),
        _faults(picture),
        _limits(spec, picture),
    )
    return Report(record["name"], made, sections)


def read_benchmarks(paths: Sequence[Path]) -> list[tuple[str, Any]]:
    """Contents of benchmark files.

    Raises:
        ReportError: one is not what `overstory bench --json` writes.
    """
    found = []
    for path in paths:
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ReportError(f"--bench: {path} cannot be read ({error})") from error
        if not _is_benchmark(result):
            raise ReportError(
                f"--bench: {path} is not a file of `overstory bench --json`; make one so"
            )
        found.append((str(path), result))
    return found


_HOST = frozenset({"versions", "date", "processor"})
_ROW = frozenset({"mode", "concurrency", "temperature", "tokens_per_s"})


def _is_benchmark(result: Any) -> bool:
    """Whether it has all that the report takes out of it."""
    try:
        rows, host = result["rows"], result["host"]
        str(result["deployment"]["served_model_name"])
        return set(host) >= _HOST and bool(rows) and all(set(row) >= _ROW for row in rows)
    except (KeyError, TypeError):
        return False


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def render_report(report: Report) -> str:
    """Markdown, without a trailing newline."""
    made = report.made
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    lines = [
        f"# Status report of {report.deployment}",
        "",
        f"{made['date']}, from a machine with {made['cores']} cores ({made['processor']}); "
        f"{versions}.",
    ]
    for section in report.sections:
        lines += ["", f"## {section.title}", ""]
        if section.figures:
            lines += ["| what | value | source |", "|---|---|---|"]
        for row in section.figures:
            unit = f" {row.unit}" if row.unit else ""
            lines.append(f"| {_cell(row.name)} | {_cell(row.value)}{unit} | {_cell(row.source)} |")
        if section.figures and section.notes:
            lines.append("")
        lines += [f"- {note}" for note in section.notes]
    return "\n".join(lines)
