"""What else went on while something was timed, and Python's collector kept out of it."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path


def machine_seconds() -> tuple[float, float]:
    """CPU seconds of the whole machine: in use, and taken by its host for others (steal)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[:8])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


@contextlib.contextmanager
def quiet_and_watched(found: dict[str, float]) -> Iterator[None]:
    """No collection meanwhile. Into ``found``: `wall_s`, and CPU seconds of this process
    (`own_cpu_s`), of all others (`other_cpu_s`) and of the machine's host (`steal_s`)."""
    gc.collect()
    gc.freeze()
    gc.disable()
    wall, own, (busy, steal) = time.perf_counter(), time.process_time(), machine_seconds()
    try:
        yield
    finally:
        mine = time.process_time() - own
        busy_after, steal_after = machine_seconds()
        found |= {
            "wall_s": time.perf_counter() - wall,
            "own_cpu_s": mine,
            "other_cpu_s": busy_after - busy - mine,
            "steal_s": steal_after - steal,
        }
        gc.enable()
