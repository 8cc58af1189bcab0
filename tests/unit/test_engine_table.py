"""The table of a GPU session's speeds: its columns, ratios and acceptance."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import engine_table

from overstory.orchestrator.bench_files import csv_text
from overstory.orchestrator.bench_rows import Answer, Sample, summarise

_OF_RUN = ["NVIDIA H200", "python 3.12.3; sglang 0.5.17", "c16b465"]
_NEW_TOKENS = 40


def _run(mode: str, requests: int, step_ms: float, **more: Any) -> dict[str, Any]:
    """Two batches of one repeat, 10 forwards each."""
    seconds = step_ms / 100
    tokens = requests * _NEW_TOKENS
    return {
        "policy": mode,
        "conc": requests,
        "T": 0.0,
        "repeat": 1,
        "tokens_per_s": tokens / seconds,
        "ms_per_forward": step_ms,
        "tokens_per_forward": tokens / 10,
        "batches": [[tokens, seconds, 10], [tokens, seconds, 10]],
        "ttft_ms": 5.0,
        "ttft_p95_ms": 6.0,
        "ran": {},
    } | more


def _ran(forwards: int, *by_depth: int) -> list[int]:
    """As `engine_bench._by_depth`: forwards, then offered and accepted of seven depths in turn."""
    return [forwards, *by_depth, *[0] * (14 - len(by_depth))]


@pytest.fixture
def results() -> dict[str, Any]:
    drafted = {"ran": {"tree-15": _ran(20, 20, 15, 20, 5)}}
    both = {"ran": {"tree-15": _ran(10, 10, 10), "plain": _ran(10)}}
    return {
        "stock": {"bench": [_run("None", n, 2.0) for n in (1, 8)]},
        "ours": {
            "bench": [
                *(_run("plain", n, 1.0, ran={"plain": _ran(20)}) for n in (1, 8)),
                *(_run("tree-15", n, 0.5, **drafted) for n in (1, 8)),
                *(_run("auto", n, 0.625, **both) for n in (1, 8)),
                _run("auto-first", 1, 0.5, ran={"tree-15": _ran(20, 20, 0)}),
            ]
        },
    }


def _lines(
    results: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, *of_run: str
) -> list[dict[str, str]]:
    source, target = folder / "results.json", folder / "speeds.csv"
    source.write_text(json.dumps(results))
    given = ["engine_table.py", source, target, folder / "speeds.svg", *of_run]
    monkeypatch.setattr(sys, "argv", list(map(str, given)))
    engine_table.main()
    return list(csv.DictReader(target.open())) if target.exists() else []


def test_columns_are_those_of_the_bench_command(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = {"forwards": 4, "requests": 4, "tokens": 8, "accepted_by_depth": [3, 1]}
    sample = Sample("plain", 1, 0.0, 1.0, (Answer(0.1, 50),), counters, "")
    host = {"gpus": [], "versions": {}, "commit": None}
    wanted = csv_text(summarise([sample]), host).splitlines()[0].split(",")
    line = _lines(results, tmp_path, monkeypatch, *_OF_RUN)[0]
    assert set(wanted) - set(line) == {"left"}
    assert [line[name] for name in ("gpu", "versions", "commit")] == _OF_RUN
    assert (tmp_path / "speeds.svg").read_text().startswith("<svg")


def test_what_a_row_says(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _lines(results, tmp_path, monkeypatch, *_OF_RUN)
    found = {(line["mode"], line["concurrency"]): line for line in lines}
    tree = found["tree-15", "8"]
    assert (tree["requests"], tree["tokens"], tree["forwards"]) == ("16", "640", "20")
    assert (tree["tokens_per_s"], tree["tokens_per_forward"]) == ("64000.0", "4.0")
    assert (tree["ms_per_step"], tree["speedup"]) == ("0.5", "4.0")
    assert tree["accepted_by_depth"].split()[:3] == ["0.7500", "0.2500", "0.0000"]
    assert (found["auto", "1"]["of_best"], found["auto", "1"]["best"]) == ("0.8", "tree-15")


def test_acceptance_is_told_by_depth_and_mode(
    results: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _lines(results, tmp_path, monkeypatch, *_OF_RUN)
    told = capsys.readouterr().out.partition("Accepted by depth, T = 0")[2].splitlines()
    assert [line for line in told if line.startswith("| ")] == [
        "| mode | 1 | 2 | 3 | 4 | 5 | 6 | 7 |",
        "| auto | 1.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 |",
        "| tree-15 | 0.75 | 0.25 | 0.00 | 0.00 | 0.00 | 0.00 | 0.00 |",
    ]


def test_a_session_that_timed_no_speeds_has_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not _lines({"pairs": {"pairs": []}}, tmp_path, monkeypatch, *_OF_RUN)
    assert not capsys.readouterr().out


def test_a_checkout_without_history_is_named_by_who_starts_the_session(
    results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = {"gpus": ["NVIDIA H200, 580"], "versions": {"torch": "2.11.0"}, "commit": None}
    monkeypatch.setattr(engine_table, "host_facts", lambda: host)
    monkeypatch.setenv("OVERSTORY_COMMIT", "abc1234")
    line = _lines(results, tmp_path, monkeypatch)[0]
    assert (line["gpu"], line["versions"]) == ("NVIDIA H200, 580", "torch 2.11.0")
    assert line["commit"] == "abc1234"
