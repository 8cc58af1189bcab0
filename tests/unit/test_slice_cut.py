"""A role that is cut in the middle and started again measures each thing once."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import rank_slice
from slice_points import Cell
from slice_report import Report
from slice_roles import AUTO, COUNTED, ROLES, Role, is_complete

CELLS = (
    Cell(1, 1024, (9,), "overstory", profiled=False),
    Cell(1, 1024, (9, 1), "overstory"),
    Cell(4, 1024, (9,), "triton"),
)


class CutError(BaseException):
    """The process is killed: nothing catches it."""


class Bench:
    """Stands for the engine's steps; dies at its ``lives``-th measurement."""

    done: ClassVar[Counter[Any]] = Counter()
    lives = 10**6

    def __init__(self, worker: Any, on_cuda: bool) -> None:
        self.timer, self._cell = self, CELLS[0]

    def prepare(self, cell: Cell) -> None:
        self._cell = cell

    def _measure(self, what: Any) -> None:
        if Bench.lives == 0:
            raise CutError
        Bench.lives -= 1
        Bench.done[what] += 1

    def point(self, rows: int, longest_s: float) -> dict[str, Any]:
        self._measure((self._cell, rows))
        return {"step_us": 1000.0}

    def stages(self, rows: Any, steps: int, keep: Path) -> list[dict[str, float]]:
        self._measure((self._cell, "stages", tuple(rows)))
        keep.touch()
        return [{"attention": 1.0} for _ in rows]

    def experts(self, rows: int) -> dict[str, float]:
        self._measure(("experts", self._cell.batch, rows, NOISE[-1]))
        return {"mean": 1.0}

    def cell(self, batch: int, context: int, drafts: str, seconds: float) -> dict[str, Any]:
        self._measure(("auto", drafts, batch, context))
        return {"batch": batch, "context": context, "of_best": 1.0}


NOISE: list[float] = [0.0]
AUTO_S = 245
"""Seconds of a session of all points of the automatic policy."""


def engine() -> Any:
    config = SimpleNamespace(num_hidden_layers=4)
    runner = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(size=10**7),
        model_config=config,
        attn_backend=SimpleNamespace(_others=None),
        decode_cuda_graph_runner=None,
    )
    worker = SimpleNamespace(
        model_runner=runner,
        limits=SimpleNamespace(block_size=8),
        chooser=SimpleNamespace(options=None),
        _step_graphs=None,
        _tiers=None,
    )
    return SimpleNamespace(worker=worker, noise=[SimpleNamespace(alike=NOISE.append)])


def run(out: Path) -> Report:
    report = Report("few", out)
    made = rank_slice.Measurement(engine(), report, time.monotonic() + 600, out)
    made.run(None, list(CELLS))
    return report


@pytest.mark.parametrize("lives", [0, 1, 2, 3, 5, 20, 45, 60])
def test_each_thing_is_measured_once(
    lives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = Role(4, 0, {}, CELLS, counts=True, auto=("fits", "fits badly"))
    monkeypatch.setitem(ROLES, "few", role)
    monkeypatch.setattr(rank_slice, "StepBench", Bench)
    monkeypatch.setattr(rank_slice, "AutoBench", lambda worker, timer, on_cuda: timer)
    monkeypatch.setattr(rank_slice, "Drafts", lambda options, depth, sure: sure)
    monkeypatch.setattr(rank_slice, "start", lambda worker, seconds, table: "table")
    Bench.done.clear()
    Bench.lives = lives
    with pytest.raises(CutError):
        run(tmp_path)
    Bench.lives = 10**6
    report = run(tmp_path)
    assert report.content["errors"] == {}
    assert is_complete(role, report.content, CELLS)
    assert set(Bench.done.values()) == {1}
    assert len(Bench.done) == 4 + 2 + len(COUNTED) + 2 * len(AUTO)
    assert len(report.content["points"]) == 4
    assert [p["run"] for p in report.content["points"]] == sorted(
        p["run"] for p in report.content["points"]
    )
    before = dict(report.content)
    again = run(tmp_path)
    assert set(Bench.done.values()) == {1}, "nothing is left for a third run"
    assert again.content["points"] == before["points"]


TOOK_S = {
    (1, 65536): 6.0,
    (1, 1024): 3.0,
    (1, 200_000): 5.0,
    (1, 8192): 3.0,
    (4, 1024): 5.0,
    (16, 1024): 12.0,
    (4, 8192): 5.0,
    (16, 8192): 9.0,
    (4, 65536): 7.0,
    (16, 65536): 17.0,
}
"""Seconds that an H200 took for a point."""
STARTED_S, TABLE_TOOK_S = 49.0, 21.0
"""From a role's start until its engine is there; for the cost table."""


def short_session(
    name: str, seconds: float, out: Path, monkeypatch: pytest.MonkeyPatch, room: int = 1_049_169
) -> tuple[dict[str, Any], float]:
    """What a role of so many seconds measures at an H200's pace, and when it ends."""
    now = [STARTED_S]

    class Timed(Bench):
        def cell(self, batch: int, context: int, drafts: str, seconds: float) -> dict[str, Any]:
            now[0] += TOOK_S[batch, context]
            return super().cell(batch, context, drafts, seconds)

        def point(self, rows: int, longest_s: float) -> dict[str, Any]:
            now[0] += 0.4
            return super().point(rows, longest_s)

    def start(worker: Any, seconds: float, table: Any) -> str:
        now[0] += TABLE_TOOK_S * (table is None)
        return "table"

    monkeypatch.setattr(rank_slice, "StepBench", Timed)
    monkeypatch.setattr(rank_slice, "AutoBench", lambda worker, timer, on_cuda: timer)
    monkeypatch.setattr(rank_slice, "Drafts", lambda options, depth, sure: sure)
    monkeypatch.setattr(rank_slice, "start", start)
    monkeypatch.setattr(rank_slice, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = engine()
    made.worker.model_runner.token_to_kv_pool.size = room
    report = Report(name, out)
    role = ROLES[name]
    rank_slice.Measurement(made, report, seconds, out).run(None, list(role.cells))
    assert report.content["errors"] == {}
    return report.content, now[0]


def points_of(content: dict[str, Any]) -> set[tuple[int, int]]:
    return {(row["batch"], row["context"]) for row in content.get("auto", [])}


def test_a_short_session_has_the_points_that_its_role_is_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 115 s had timed other things anew, and left out what nothing had measured."""
    content, ended = short_session("auto_badly", 135 - 8, tmp_path, monkeypatch)
    assert points_of(content) >= {(4, 65536), (16, 65536)}
    assert ended <= 135 - 8
    assert "parts" not in content


def test_a_session_has_all_points_of_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds that a run of both drafters is given."""
    content, ended = short_session("auto", AUTO_S - 8, tmp_path, monkeypatch)
    assert len(content["auto"]) == 2 * len(AUTO)
    assert "left_out" not in content
    assert ended <= AUTO_S - 8


def test_what_is_left_out_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, _ = short_session("auto_badly", STARTED_S + 42, tmp_path / "time", monkeypatch)
    assert points_of(content) == {(16, 1024)}
    assert content["left_out"][0] == "auto: fits badly 16 65536: may take 18.0 s, 9.0 s are left"
    assert len(content["left_out"]) == 9
    content, _ = short_session("auto_badly", 600, tmp_path / "room", monkeypatch, room=600_000)
    assert content["left_out"] == ["auto: fits badly 16 65536: takes 1049105 KV slots of 600000"]
    assert len(points_of(content)) == 9
