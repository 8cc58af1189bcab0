"""Health by progress; GPU ordinals under Ray; processes named beyond doubt."""

import os
import subprocess
import sys

import pytest

from overstory.orchestrator.health import ProgressJudge
from overstory.orchestrator.local_process import LocalProcess
from overstory.workers.placement import cuda_ordinal
from overstory.workers.process_ids import process_start_ticks


def report(forwards, work, phase="serving"):
    return {"forwards": forwards, "phase": phase, "load": {"running": work, "waiting": 0}}


@pytest.fixture
def judge():
    return ProgressJudge(stall_s=60.0, silence_s=30.0, now_s=0.0)


@pytest.mark.parametrize(
    ("reports", "now", "state"),
    [
        ([(0, report(0, 0, "weights"))], 5, "starting"),
        ([(0, report(0, 0))], 5, "idle"),
        ([(0, report(5, 2))], 5, "busy"),
        ([(t, report(5, 2)) for t in range(0, 61, 10)], 60, "busy"),
        ([(t, report(5, 2)) for t in range(0, 71, 10)], 70, "stalled"),
        ([(t, report(5, 0)) for t in range(0, 301, 10)] + [(301, report(5, 1))], 305, "busy"),
        ([(t, report(t, 1)) for t in range(0, 301, 10)], 305, "busy"),
        ([(0, report(5, 2))], 31, "silent"),
        ([], 31, "silent"),
    ],
)
def test_health(judge, reports, now, state):
    for at, one in reports:
        judge.report(at, one)
    health = judge.judge(now)
    assert health.state == state
    assert health.good == (state in ("idle", "busy"))
    assert bool(health.reason) == (state in ("stalled", "silent"))


@pytest.mark.parametrize(
    ("assigned", "visible", "ordinal"),
    [
        ("3", None, 3),
        ("3", "", 3),
        ("3", "3", 0),
        ("6", "4,5,6,7", 2),
        ("GPU-b", "GPU-a, GPU-b", 1),
    ],
)
def test_the_cuda_ordinal_of_an_assigned_gpu(assigned, visible, ordinal):
    assert cuda_ordinal(assigned, visible) == ordinal


def test_a_hidden_gpu_is_refused():
    with pytest.raises(ValueError, match="hides it"):
        cuda_ordinal("3", "4,5")


def test_a_process_is_known_by_its_start_too():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_start_ticks(child.pid)
    host = os.uname().nodename
    process = LocalProcess(host, child.pid, started)
    assert process.alive()
    assert not LocalProcess(host, child.pid, started + 1).alive(), "another process of that pid"
    assert not LocalProcess("elsewhere", child.pid, started).alive()
    LocalProcess(host, child.pid, started + 1).kill()
    assert child.poll() is None
    process.kill()
    assert process.wait_gone(5.0)
    assert child.wait(5.0) == -9
