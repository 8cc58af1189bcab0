"""CPU share and memory of every process of a deployment that serves nothing, by role.

Deploy first (`make demo`), on an otherwise quiet machine. Looked at are the processes under the Ray
head that Overstory started:
`.venv/bin/python tests/cluster/measure_deployment.py --json docs/benchmarks/idle_deployment.json`
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil
import ray

LOOK_S = 60.0
HEAD = "overstory.orchestrator.ray_head"
ROLES = {
    "RankHost": "ranks",
    ":Gateway": "gateway",
    ":Replica": "replica front half",
    "ProxyActor": "Serve proxy",
    "ServeController": "Serve controller",
    "_ControllerActor": "lease controller",
    "raylet": "raylet",
    "gcs_server": "GCS",
}
OTHERS = "Ray's agents and monitors"


def role(process: psutil.Process) -> str:
    """Role of one process by its title."""
    title = " ".join(process.cmdline()) or process.name()
    return next((name for key, name in ROLES.items() if key in title), OTHERS)


def head_process() -> psutil.Process:
    """The head that Overstory started; raises RuntimeError where there is none."""
    for process in psutil.process_iter():
        if HEAD in process.cmdline():
            return process
    raise RuntimeError(f"no process runs {HEAD}; deploy first: make demo")


def look(head: psutil.Process, seconds: float) -> dict[str, float]:
    """Percent of one core that each role under `head` used over `seconds`."""
    before = _cpu_s(head)
    begun = time.monotonic()
    time.sleep(seconds)
    after, took = _cpu_s(head), time.monotonic() - begun
    shares: dict[str, float] = collections.defaultdict(float)
    for (pid, name), used in after.items():
        shares[name] += 100 * (used - before.get((pid, name), used)) / took
    return {name: round(share, 2) for name, share in sorted(shares.items())}


def memory_mb(head: psutil.Process) -> dict[str, dict[str, Any]]:
    """By role: `own`, MB that each process has for itself (USS); `share`, their PSS together."""
    found: dict[str, dict[str, Any]] = {}
    for process in (head, *head.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            row = found.setdefault(role(process), {"own": [], "share": 0})
            row["own"].append(round(full.uss / 1e6))
            row["share"] += round(full.pss / 1e6)
    return dict(sorted(found.items()))


def _cpu_s(head: psutil.Process) -> dict[tuple[int, str], float]:
    found = {}
    for process in (head, *head.children(recursive=True)):
        try:
            found[process.pid, role(process)] = sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return found


def main() -> None:
    """Looks once and writes what it saw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    head = head_process()
    shares, memory = look(head, LOOK_S), memory_mb(head)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "ray": ray.__version__,
        "seconds": LOOK_S,
        "percent_of_a_core": shares,
        "percent_of_a_core_total": round(sum(shares.values()), 2),
        "memory_mb": memory,
        "memory_mb_total": sum(row["share"] for row in memory.values()),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
