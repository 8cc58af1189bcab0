"""The report of a running deployment, from a picture of one."""

import json
from pathlib import Path
from typing import Any

import pytest
from status_picture import LOAD, STEPS, picture, rank
from typer.testing import CliRunner

from overstory.orchestrator.cli import app
from overstory.orchestrator.report import (
    Figure,
    Report,
    ReportError,
    Section,
    make_report,
    read_benchmarks,
    render_report,
)
from overstory.orchestrator.report_model import MEANS
from overstory.orchestrator.spec import load_spec

ROOT = Path(__file__).parents[2]
MADE = {
    "date": "2026-11-29T23:00:00+00:00",
    "command": "overstory report",
    "processor": "EPYC",
    "cores": 2,
    "memory_gib": 23.5,
    "gpus": [],
    "load": [0, 0, 0],
    "versions": {"python": "3.11.7", "sglang": "0.5.17"},
}


def reported(
    shown: dict[str, Any],
    benchmarks: list[tuple[str, Any]] | None = None,
    made: dict[str, Any] | None = None,
) -> Any:
    spec = load_spec(ROOT / "clusters" / "rtx-pro-6000-8x" / "deployment.yaml").model_dump()
    record = {"name": "kimi", "endpoint": "http://h:8000", "spec": spec}
    return make_report(record, shown, made or MADE, benchmarks or [])


def notes_of(report: Any, title: str) -> str:
    (section,) = [section for section in report.sections if section.title == title]
    return "\n".join(section.notes)


def test_every_figure_has_a_source() -> None:
    report = reported(picture())
    figures = [figure for section in report.sections for figure in section.figures]
    assert len(figures) > 40
    assert [figure.name for figure in figures if not figure.source] == []
    titles = [section.title for section in report.sections]
    assert titles == [
        *("Goal and configuration", "What runs", "Measured", "Where the time goes"),
        *("KV and fragmentation", "Decisions in force", "Faults", "Next limit"),
    ]


def test_the_bottleneck_is_named() -> None:
    notes = notes_of(reported(picture()), "Where the time goes")
    assert "r1, tree-15: 80% of a step is verify: the target's forward" in notes


def test_on_a_known_gpu_the_model_says_how_verify_splits() -> None:
    shown = picture()
    shown["controller"]["replicas"][0]["ranks"] = [rank(0, steps_per_s=8.0)]
    made = {**MADE, "gpus": ["NVIDIA RTX PRO 6000 Blackwell Server Edition, 580.159.04"]}
    (section,) = (s for s in reported(shown, made=made).sections if s.title.startswith("Where"))
    split = {f.name.removeprefix("r1: "): f for f in section.figures if "model" in f.source}
    assert set(split) == set(MEANS.values())
    assert all(figure.value > 0 for figure in split.values())
    assert "2 requests of 250 tokens, 16 rows each" in split["MoE experts"].source
    longest = max(split, key=lambda name: split[name].value)
    assert f"by the model, {longest} takes most of a step" in "\n".join(section.notes)
    outside = next(f for f in section.figures if f.name == "r1: between the stages")
    assert outside.value == pytest.approx(1000 / 8.0 - 100.0)
    for nothing in ({"gpus": []}, {"gpus": ["NVIDIA T4, 580"]}):
        known = [f for s in reported(shown, made=MADE | nothing).sections for f in s.figures]
        assert not [figure for figure in known if "model (" in figure.source]


def test_measured_figures() -> None:
    found = {f.name: f.value for s in reported(picture()).sections for f in s.figures}
    assert found["r1, tree-15: tokens a step and request"] == 3.5
    assert found["r1: prefill"] == 2000.0
    assert found["r1, tree-15: verify"] == 80.0
    assert found["r1: KV pool in use"] == 0.75
    spec = load_spec(ROOT / "clusters" / "rtx-pro-6000-8x" / "deployment.yaml")
    assert found["engine.mem_fraction_static"] == spec.engine["mem_fraction_static"]


def test_limits_are_told_where_they_are_near() -> None:
    assert "Requests wait at the gateway" in notes_of(reported(picture()), "Next limit")
    full = picture(gateway=None)
    full_load = {**LOAD, "free_slots": 20, "cached_slots": 30}
    full["controller"]["replicas"][0]["ranks"] = [rank(0, load=full_load)]
    assert "the KV pool is next" in notes_of(reported(full), "Next limit")
    poor = picture(gateway=None)
    counted = {**STEPS["verify"]["tree-15"], "tokens": 220}
    steps = {"verify": {"tree-15": counted}, "prefill": {}}
    poor["controller"]["replicas"][0]["ranks"] = [rank(0, steps=steps)]
    assert "drafts are hardly accepted (1.10" in notes_of(reported(poor), "Next limit")
    idle = picture(gateway=None)
    idle["controller"]["replicas"] = []
    assert notes_of(reported(idle), "Next limit") == "Nothing is near its limit."


def _found(report: Any) -> dict[str, Any]:
    return {figure.name: figure for section in report.sections for figure in section.figures}


def test_decisions_come_with_their_reasons() -> None:
    found = _found(reported(picture()))
    assert (found["tree policy"].value, found["tree policy"].source) == (
        "tree-15",
        "controller's status, read for this report",
    )
    assert found["memory for weights and KV"].source == "set in the deployment"
    local = load_spec(ROOT / "clusters" / "local" / "deployment.yaml").model_dump()
    shown = make_report({"name": "k", "endpoint": "e", "spec": local}, picture(), MADE)
    memory = _found(shown)["memory for weights and KV"]
    assert memory.value == "SGLang's default"
    assert "the deployment sets none" in memory.source


def test_a_report_of_what_hardly_answers() -> None:
    report = reported(picture(controller=None, gateway=None, serve=None))
    assert _found(report)["tree policy"].value == "as each rank started"
    assert "no controller answers" in str([f.value for f in _found(report).values()])
    early = picture()
    early["controller"]["replicas"].append(
        {"name": "r2", "phase": "found", "reason": "", "digests_equal_up_to": 0, "ranks": [rank(0)]}
    )
    early["controller"]["replicas"].append(
        {"name": "r3", "phase": "leased", "reason": "", "digests_equal_up_to": 0, "ranks": []}
    )
    names = set(_found(reported(early)))
    assert {"replica r2", "replica r3"} <= names
    assert not [name for name in names if name.startswith(("r2", "r3"))], "no figures of its steps"


def test_what_runs_now() -> None:
    idle = picture()
    idle["controller"]["replicas"][0]["ranks"] = [rank(0), rank(1, tokens_per_s=0.0)]
    found = _found(reported(idle))
    assert found["rank 0 of r1, now"].value == 61.5
    assert "rank 1 of r1, now" not in found
    assert found["r1, tree-15: accepted by depth"].value == [0.8, 0.45, 0.04]
    assert "r1, plain: accepted by depth" not in found
    assert found["r1: between the stages"].value == pytest.approx(1000 / 9.5 - 100, abs=0.001)
    for missing in ({"steps_per_s": 0.0}, {"load": {**LOAD, "running": 0}}, {"steps": None}):
        idle["controller"]["replicas"][0]["ranks"] = [rank(0, **missing)]
        assert "r1: between the stages" not in _found(reported(idle))


@pytest.mark.parametrize(("tokens", "told"), [(298, True), (302, False)])
def test_drafts_pay_from_one_and_a_half_tokens_a_step(tokens: int, told: bool) -> None:
    few = picture()
    counts = STEPS["verify"]["tree-15"] | {"tokens": tokens}
    few["controller"]["replicas"][0]["ranks"] = [rank(0, steps={"verify": {"tree-15": counts}})]
    assert ("drafts are hardly accepted" in notes_of(reported(few), "Next limit")) is told


def test_a_section_as_markdown() -> None:
    section = Section("KV", (Figure("slots", 9, "status", "rows"),), ("Full.",))
    alone = Section("Faults", (), ("None known.",))
    text = render_report(Report("kimi", MADE, (section, alone)))
    assert text.endswith(
        """
## KV

| what | value | source |
|---|---|---|
| slots | 9 rows | status |

- Full.

## Faults

- None known."""
    )


def test_what_the_automatic_policy_chose_is_reported() -> None:
    auto = {"choice": "tree-15", "why": "best", "greedy": {"seen": 3, "tokens": {"tree-15": 3.4}}}
    chosen = picture()
    ranks = [rank(0, policy="auto<=15", auto=auto)]
    chosen["controller"]["replicas"][0]["ranks"] = ranks
    found = {f.name: f.value for s in reported(chosen).sections for f in s.figures}
    assert found["r1: chosen by costs and acceptance"].startswith("tree-15 (best)")


def test_faults_are_listed() -> None:
    assert notes_of(reported(picture()), "Faults") == "None known."
    broken = picture(serve=None)
    assert _found(reported(broken))["fault 1"].value == "Serve does not know this deployment"
    assert notes_of(reported(broken), "Faults") == ""


def test_benchmarks_come_with_date_and_versions() -> None:
    path = ROOT / "docs" / "benchmarks" / "bench_tp2_cpu.json"
    ((_, result),) = read_benchmarks([path])
    report = reported(picture(), [(str(path), result)])
    rows = [f for s in report.sections for f in s.figures if f.name.startswith("benchmark ")]
    assert len(rows) == len(json.loads(path.read_text())["rows"])
    loads = {"rows": [{**json.loads(path.read_text())["rows"][0], "load": "64 tokens"}]}
    (row,) = (f for f in reported(picture(), [("b", result | loads)]).sections[2].figures[-1:])
    assert row.name.endswith("T=0.0, 64 tokens")
    assert "2026-11-29" in rows[0].source
    assert "sglang 0.5.17" in rows[0].source
    assert "overstory-tiny" in rows[0].source  # Not the model of this deployment: it is seen.
    assert "overstory bench --json FILE" in notes_of(reported(picture()), "Measured")
    assert notes_of(report, "Measured") == ""
    cut = result | {"stopped": "stopped after 3 of 12 measurements"}
    assert notes_of(reported(picture(), [("b", cut)]), "Measured") == f"b: {cut['stopped']}."


@pytest.mark.parametrize(("every_s", "said"), [(0.0, "never (control."), (90.0, "every 90 s")])
def test_how_often_it_looks_at_fragments(every_s: float, said: str) -> None:
    spec = load_spec(
        ROOT / "clusters" / "rtx-pro-6000-8x" / "deployment.yaml",
        (f"control.defrag_every_s={every_s}",),
    ).model_dump()
    made = make_report({"name": "k", "endpoint": "e", "spec": spec}, picture(), MADE)
    found = {f.name: f.value for section in made.sections for f in section.figures}
    assert found["looks at fragmentation by itself"].startswith(said)


def test_markdown_and_json(tmp_path: Path) -> None:
    report = reported(picture())
    text = render_report(report)
    assert text.startswith("# Status report of kimi\n")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "what" not in line]
    assert all(line.count(" | ") == 2 for line in rows)
    assert json.loads(json.dumps(report.to_dict()))["deployment"] == "kimi"


ROWS = '[{"mode": "", "concurrency": 1, "temperature": 0, "tokens_per_s": 1}]'
HOST = '"host": {"versions": {}, "date": "", "processor": ""}'


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "[]",
        f'{{"rows": 3, {HOST}}}',
        f'{{"rows": [], {HOST}}}',
        f'{{"rows": [{{"mode": "plain"}}], {HOST}}}',
        f'{{"rows": {ROWS}, "host": 1}}',
        f'{{"rows": {ROWS}, {HOST}, "deployment": 1}}',
    ],
)
def test_a_file_that_is_no_benchmark_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "b.json"
    file.write_text(content)
    with pytest.raises(ReportError, match="--bench: "):
        read_benchmarks([file])


def test_report_without_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSTORY_STATE", str(tmp_path / "state.json"))
    done = CliRunner().invoke(app, ["report"])
    assert done.exit_code == 1
    assert "no deployment was made on this machine by this user" in done.output
