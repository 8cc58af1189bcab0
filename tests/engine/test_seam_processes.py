"""A stock SGLang engine at TP 2: the seam is active in every process that SGLang starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENGINE = Path(__file__).parent / "stock_engine.py"
DEADLINE_S = 400


def _run(pair: tuple[str, str], tp: int, reports: Path) -> dict[str, object]:
    """Runs the stock engine in a process of its own; returns what it printed last."""
    reports.mkdir()
    done = subprocess.run(
        [sys.executable, str(ENGINE), pair[0], pair[1], str(tp)],
        env={**os.environ, "OVERSTORY_SEAM_REPORT_DIR": str(reports)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def _reports(folder: Path, stage: str) -> dict[int, dict[str, object]]:
    notes = [json.loads(path.read_text()) for path in folder.glob(f"{stage}-*.json")]
    return {note["pid"]: note for note in notes}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_process_of_a_stock_engine_has_the_seam(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    two = _run(pair, 2, tmp_path / "tp2")
    children = set(two["children"])  # type: ignore[call-overload]
    assert len(children) >= 3, "two schedulers and a detokenizer"
    assert children <= set(_reports(tmp_path / "tp2", "sitecustomize"))
    plugins = _reports(tmp_path / "tp2", "plugin")
    assert set(two["schedulers"]) | {two["pid"]} <= set(plugins)  # type: ignore[call-overload]
    for note in plugins.values():
        assert note["failures"] == {}
    serving = _reports(tmp_path / "tp2", "serving")
    assert set(two["schedulers"]) == set(serving)  # type: ignore[call-overload]
    for note in serving.values():
        stands = note["stands"]
        assert isinstance(stands, dict)
        assert stands["attention backend torch_native"]
        assert all(stands.values()), stands
    one = _run(pair, 1, tmp_path / "tp1")
    assert two["ids"] == one["ids"]
