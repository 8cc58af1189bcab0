"""When a rank counts as standing still, and what it leaves when it ends."""

import subprocess
import sys

import pytest

from overstory.workers.death_note import (
    EXIT_WATCHDOG,
    LastWill,
    note_path,
    read_log_tail,
    read_note,
)
from overstory.workers.watchdog import StandstillClock, thread_stacks, watch


def test_standstill_counts_only_with_work_in_hand_and_no_progress():
    clock = StandstillClock(10.0)
    assert clock.stands_still_s(0.0, 1, active=True) is None
    assert clock.stands_still_s(10.0, 1, active=True) is None
    assert clock.stands_still_s(10.5, 1, active=True) == pytest.approx(10.5)
    assert clock.stands_still_s(11.0, 2, active=True) is None, "progress"
    assert clock.stands_still_s(21.5, 2, active=True) == pytest.approx(10.5)
    assert clock.stands_still_s(22.0, 2, active=False) is None
    assert clock.stands_still_s(32.0, 2, active=True) is None, "idle time does not count"
    assert clock.stands_still_s(32.1, 2, active=True) == pytest.approx(10.1)


class Raw:
    """As SGLang's WatchdogRaw."""

    watchdog_timeout = 0.05
    dump_info = None

    def __init__(self, soft):
        self.soft = soft

    def get_counter(self):
        return 3

    def is_active(self):
        return True


class Will:
    def __init__(self):
        self.executed = None

    def execute(self, cause, exit_code, detail=""):
        self.executed = (cause, exit_code, detail)


def test_a_rank_that_stands_still_ends_itself_with_cause_and_stacks():
    will = Will()
    watch(Raw(soft=False), will)
    cause, code, detail = will.executed
    assert code == EXIT_WATCHDOG
    assert "watchdog_timeout 0.05 s" in cause
    assert "test_watchdog.py" in detail


def test_a_soft_watchdog_only_says_so(capsys):
    will = Will()
    watch(Raw(soft=True), will)
    assert will.executed is None
    assert "watchdog" in capsys.readouterr().err


def test_a_state_that_cannot_be_described_does_not_stop_the_watchdog():
    class Broken(Raw):
        @staticmethod
        def dump_info():
            raise KeyError("live state changed")

    will = Will()
    watch(Broken(soft=False), will)
    assert "no state: KeyError" in will.executed[2]


def test_stacks_name_this_function():
    assert "test_stacks_name_this_function" in thread_stacks()


def test_the_first_cause_stands(tmp_path):
    will = LastWill(tmp_path, 1, lambda: ("serving", 42))
    first = will.write("first", 71, "detail")
    assert will.write("second", 70) == first
    note = read_note(will.path)
    assert (note.rank, note.cause, note.exit_code, note.phase, note.forwards) == (
        1,
        "first",
        71,
        "serving",
        42,
    )


def test_executing_a_will_ends_the_process_with_its_code(tmp_path):
    program = (
        "import sys, pathlib\n"
        "from overstory.workers.death_note import LastWill\n"
        "will = LastWill(pathlib.Path(sys.argv[1]), 3, lambda: ('serving', 7))\n"
        "try:\n"
        "    will.execute('a reason', 72, 'a detail')\n"
        "finally:\n"
        "    print('unwound')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 72
    assert "a reason" in done.stderr
    assert "a detail" in done.stderr
    assert "unwound" not in done.stdout
    (path,) = tmp_path.glob("overstory-rank-*.json")
    assert read_note(path).cause == "a reason"


def test_no_note_and_half_a_note_read_as_none(tmp_path):
    assert read_note(note_path(tmp_path, 1)) is None
    note_path(tmp_path, 2).write_text('{"rank": 1')
    assert read_note(note_path(tmp_path, 2)) is None


def test_a_log_tail_leaves_out_blank_lines_and_rays_own_marks(tmp_path):
    log = tmp_path / "worker.err"
    lines = "\n".join(f"line {number}" for number in range(50))
    log.write_text(f":job_id:01\n:actor_name:RankHost\n\n{lines}")
    assert read_log_tail(log, 3) == ["line 47", "line 48", "line 49"]
    assert read_log_tail(log, 100)[0] == "line 0"
    assert read_log_tail(tmp_path / "none") == []
