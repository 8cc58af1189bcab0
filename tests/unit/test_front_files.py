"""Files of front halves: those of dead processes go, those of living ones stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from overstory.orchestrator.front_files import make_front_folder, sweep_dead


def test_only_the_dead_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, memory = tmp_path / "tmp", tmp_path / "shm"
    folders.mkdir()
    memory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folders))
    living = make_front_folder()
    assert living.stat().st_mode & 0o077 == 0
    program = (
        "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
        "from overstory.orchestrator.front_files import make_front_folder\n"
        "print(make_front_folder().name)"
    )
    made = subprocess.run(
        [sys.executable, "-c", program, str(folders)], capture_output=True, text=True, check=True
    )
    dead = made.stdout.strip()
    assert (folders / dead).is_dir()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    elsewhere = f"overstory-ipc-{namespace + 1}-1-1-abc"
    for name in (dead, living.name, elsewhere):
        (memory / f"sglang_loads_{name}_0a.shm").write_text("x")
    (memory / "sglang_loads_other_0b.shm").write_text("x")
    (folders / "overstory-ipc-of-someone").mkdir()

    assert sorted(sweep_dead(folders, memory)) == [dead, f"sglang_loads_{dead}_0a.shm"]
    assert {path.name for path in folders.iterdir()} == {living.name, "overstory-ipc-of-someone"}
    assert {path.name for path in memory.iterdir()} == {
        f"sglang_loads_{living.name}_0a.shm",
        f"sglang_loads_{elsewhere}_0a.shm",
        "sglang_loads_other_0b.shm",
    }
    assert sweep_dead(folders, memory) == []
