"""What ended a process, from what it left."""

from pathlib import Path

import pytest

from overstory.orchestrator.death_cause import Ending, ending_of
from overstory.orchestrator.engine_errors import RankDeath
from overstory.workers.process_ids import kernel_memory_kills

EOF = "Worker exit type: SYSTEM_ERROR Worker exit detail: connection error code 2. End of file."
FAULT = ["decoding", "Fatal Python error: Segmentation fault", 'File "x.py", line 3']


@pytest.mark.parametrize(
    ("note", "log", "ray_says", "kills", "signal", "memory"),
    [
        ("RuntimeError: shapes differ", [], "", 0, None, False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", [], "", 0, None, True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", [], "", 0, None, True),
        ("MemoryError: ", [], "", 0, None, True),
        (None, [], EOF, 0, "SIGKILL", False),
        (None, [], EOF, 2, "SIGKILL", True),
        (None, FAULT, EOF, 0, "SIGSEGV", False),
        (None, FAULT, EOF, 2, "SIGSEGV", False),
        (None, ["!!!!!!! Segfault encountered !!!!!!!", "  File x"], EOF, 0, "SIGSEGV", False),
        (None, ["*** SIGBUS received at time=17 on cpu 1 ***"], EOF, 0, "SIGBUS", False),
        (None, ["Fatal Python error: Aborted"], EOF, 0, "SIGABRT", False),
        (None, ["Fatal Python error: none_dealloc: deallocating None"], EOF, 0, "SIGKILL", False),
        (None, [], "Worker exit detail: Worker exits by SIGTERM.", 0, "SIGTERM", False),
        (None, [], "Task was killed due to the node running low on memory.", 0, "SIGKILL", True),
    ],
)
def test_what_is_concluded(
    note: str | None, log: list[str], ray_says: str, kills: int, signal: str | None, memory: bool
) -> None:
    ending = ending_of(note, log, ray_says, kills)
    assert (ending.signal, ending.out_of_memory) == (signal, memory)
    assert bool(ending.words) == (note is None)


def test_a_death_says_its_signal_and_memory() -> None:
    death = RankDeath(rank=1, cause="killed", signal="SIGKILL", out_of_memory=True, forwards=3)
    assert str(death) == (
        "rank 1 died (exit code unknown, SIGKILL, out of memory, phase unknown, forward 3): killed"
    )
    assert "exit code 71, phase" in str(RankDeath(rank=0, cause="x", exit_code=71))
    assert Ending() == ending_of("x", [], "", 9)


def test_the_kernel_s_count(tmp_path: Path) -> None:
    file = tmp_path / "vmstat"
    assert kernel_memory_kills(file) == 0
    file.write_text("pgfault 3\noom_kill 7\noom_kill_other 9\n")
    assert kernel_memory_kills(file) == 7
