"""The live view and the report of a running deployment, from a picture of one."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from overstory.orchestrator.cli import app
from overstory.orchestrator.report import (
    ReportError,
    make_report,
    read_benchmarks,
    render_report,
)
from overstory.orchestrator.report_model import MEANS
from overstory.orchestrator.spec import load_spec
from overstory.orchestrator.status_live import (
    bar,
    draw_tree,
    faults,
    fitted_view,
    live_view,
    pool_map,
)
from overstory.orchestrator.step_figures import current_figures, policy_figures

ROOT = Path(__file__).parents[2]
STEPS: dict[str, Any] = {
    "verify": {
        "tree-15": {
            "forwards": 100,
            "requests": 200,
            "rows": 3200,
            "tokens": 700,
            "offered_by_depth": [200, 180, 100],
            "accepted_by_depth": [160, 90, 8],
            "stage_ns": {"verify": 8_000_000_000, "draft": 1_000_000_000, "accept": 1_000_000_000},
        },
        "plain": {
            "forwards": 3,
            "requests": 3,
            "rows": 3,
            "tokens": 3,
            "offered_by_depth": [],
            "accepted_by_depth": [],
            "stage_ns": {},
        },
    },
    "prefill": {"forwards": 2, "requests": 2, "tokens": 4000, "ns": 2_000_000_000},
}
LOAD = {"running": 2, "waiting": 1, "free_slots": 250, "cached_slots": 250, "max_slots": 1000}
SEEN = {
    "requests": 2,
    "rows": 500,
    "runs": 20,
    "worst_runs": 12,
    "contiguous_share": 0.96,
    "cached_breaks": 1,
    "free": 250,
    "free_runs": 9,
    "largest_free_run": 120,
    "age_s": 4.0,
}


def rank(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "pid": 100 + number,
        "health": "working",
        "health_reason": "",
        "forwards": 103,
        "policy": "tree-15",
        "load": LOAD,
        "steps": STEPS,
        "steps_per_s": 9.5,
        "tokens_per_s": 61.5,
        "tokens_per_forward": 3.5,
        **changes,
    }


def picture(**changes: Any) -> dict[str, Any]:
    slot = {"name": "r1", "state": "HEALTHY", "reason": "", "failed_lives": 0}
    replica = {"name": "r1", "phase": "leased", "reason": "", "digests_equal_up_to": 101}
    return {
        "name": "kimi",
        "endpoint": "http://h:8000",
        "model": "kimi-k2.6",
        "ready": True,
        "reason": "",
        "serve": {"status": "RUNNING", "message": "", "replicas": {"Replica": {"RUNNING": 1}}},
        "gateway": {"running": 2, "queued": 3, "max_concurrent": 32},
        "controller": {
            "policy": "tree-15",
            "lease_steps": 64,
            "uptime_s": 90.0,
            "health": [slot],
            "replicas": [{**replica, "fragmentation": SEEN, "ranks": [rank(0), rank(1)]}],
        },
        **changes,
    }


def screen(shown: dict[str, Any]) -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live_view(shown))
    return console.export_text()


# ---------------------------------------------------------------------------------- figures


def test_figures_of_a_policy() -> None:
    first, second = policy_figures(STEPS)
    assert (first.policy, second.policy) == ("tree-15", "plain")
    assert first.tokens_per_forward == 3.5
    assert first.rows_per_forward == 32
    assert first.accepted == (0.8, 0.45, 0.04)
    assert first.stage_ms["verify"] == 80.0
    assert first.slowest == "verify"
    assert second.slowest is None


def test_where_a_rule_chooses_the_most_used_policy_is_shown() -> None:
    shown = current_figures(STEPS, "auto")
    assert shown is not None
    assert shown.policy == "tree-15"
    assert current_figures(STEPS, "plain") == policy_figures(STEPS)[1]
    assert current_figures(None, "plain") is None


# ---------------------------------------------------------------------------------- live view


def test_bars() -> None:
    assert bar(0.5, width=4) == "██··"
    assert bar(0.25, 0.75, width=4) == "█▒▒·"
    assert bar(2.0, width=4) == "████"
    assert bar(0.0, width=4) == "····"


def test_pool_map_has_requests_cache_and_free() -> None:
    assert (pool_map(LOAD).count("█"), pool_map(LOAD).count("▒")) == (30, 15)
    assert set(pool_map({})) == {"█"}


def test_tree_by_depth() -> None:
    assert draw_tree(policy_figures(STEPS)[0]) == "■──●──○──·"


def test_everything_is_on_the_screen() -> None:
    text = screen(picture())
    for part in (
        "kimi  kimi-k2.6 at http://h:8000  ready",
        "gateway: 2 of 32 sequences running, 3 requests queued",
        "controller: policy tree-15, leases of 64 steps",
        "replica r1: leased",
        "queue  2 running, 1 waiting",
        "80%",
        "■──●──○──·",
        "requests 500",
        "free 250  of 1000 slots",
        "4 s ago: 2 requests, 500 rows in 20 runs",
        "digests of all ranks equal up to forward 101",
    ):
        assert part in text, part
    assert text.count("61.5") == 2
    assert "last faults" not in text


def test_what_the_automatic_policy_chose_is_shown() -> None:
    auto = {"choice": "tree-15", "why": "best", "greedy": {"seen": 3, "tokens": {"tree-15": 3.4}}}
    chosen = picture()
    ranks = [rank(0, policy="auto<=15", auto=auto)]
    chosen["controller"]["replicas"][0]["ranks"] = ranks
    assert "chosen: tree-15 (best); tokens per step expected: 3.40 greedy" in screen(chosen)
    found = {f.name: f.value for s in reported(chosen).sections for f in s.figures}
    assert found["r1: chosen by costs and acceptance"].startswith("tree-15 (best)")


def test_faults_are_on_the_screen() -> None:
    broken = picture(ready=False, reason="no replica")
    broken["controller"]["health"] = [
        {"name": "r0", "state": "RETIRED", "reason": "rank 1 died\nmore", "failed_lives": 3}
    ]
    broken["controller"]["replicas"][0].update(phase="condemned", reason="digests differ")
    text = screen(broken)
    assert "not ready: no replica" in text
    assert "last faults" in text
    assert faults(broken) == ["r0: RETIRED: rank 1 died", "r1: condemned: digests differ"]


def _left(picture: dict[str, Any], as_told: bool) -> dict[str, Any]:
    """The picture with a replica that has gone, asked for or not."""
    gone = {"name": "r0", "phase": "lost", "reason": "rank-0 is gone", "digests_equal_up_to": 3}
    picture["controller"]["replicas"].insert(0, {**gone, "ranks": []})
    slot = {"name": "r0", "state": "RETIRED", "reason": "it was told to end", "failed_lives": 0}
    picture["controller"]["health"].append({**slot, "as_told": as_told})
    return picture


def test_a_replica_that_left_as_told_is_no_fault() -> None:
    assert "r0" not in screen(_left(picture(), True))
    report = reported(_left(picture(), True))
    assert notes_of(report, "Faults") == "None known."
    assert faults(_left(picture(), False)) == [
        "r0: RETIRED: it was told to end",
        "r0: lost: rank-0 is gone",
    ]


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 18), (200, 60), (40, 20)])
def test_faults_and_every_replica_are_on_any_screen(width: int, height: int, replicas: int) -> None:
    shown = picture(ready=False, reason="no replica")
    one = shown["controller"]["replicas"][0] | {"ranks": [rank(number) for number in range(8)]}
    shown["controller"]["replicas"] = [one | {"name": f"r{number}"} for number in range(replicas)]
    shown["controller"]["health"][0] |= {"state": "SUSPECT", "reason": "no progress"}
    console = Console(width=width, height=height, file=open("/dev/null", "w"))  # noqa: SIM115
    lines = console.render_lines(fitted_view(shown, console))
    assert len(lines) <= height
    text = "\n".join("".join(part.text for part in line).rstrip() for line in lines)
    assert "r1: SUSPECT: no progress" in text
    assert [name for name in range(replicas) if f"replica r{name}: leased" not in text] == []


def test_there_is_as_much_detail_as_the_screen_has_lines_for() -> None:
    def lines(height: int) -> str:
        console = Console(width=80, height=height, file=open("/dev/null", "w"))  # noqa: SIM115
        rows = console.render_lines(fitted_view(picture(), console))
        return "\n".join("".join(part.text for part in row) for row in rows)

    assert "digests of all ranks" in lines(24)
    assert "accepted by depth, %: 80 45 4" in lines(16)
    assert "and 1 more rank" in lines(16)
    assert "replica r1: leased  tree-15  61.5 tokens/s  2 running, 1 waiting  KV 75%" in lines(8)


def test_nothing_answers() -> None:
    silent = picture(serve=None, controller=None, gateway=None)
    assert "no controller answers" in screen(silent)
    assert faults(silent)[-1] == "Serve does not know this deployment"


def test_a_rank_without_a_report_yet() -> None:
    early = picture()
    early["controller"]["replicas"][0]["ranks"] = [rank(0, load=None, steps=None)]
    text = screen(early)
    assert "no drafts verified yet" in text
    assert "KV pool not reported yet" in text


# ---------------------------------------------------------------------------------- report

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
