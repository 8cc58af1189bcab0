"""What machine and versions a measurement was made with."""

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("overstory", "ray", "sglang", "torch", "transformers", "triton")
_HERE = Path(__file__).resolve().parent


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _commit() -> str | None:
    """Of the checkout that this module is in, with `-dirty` if tracked files differ from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=_HERE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def host_facts() -> dict[str, Any]:
    """`date` (UTC), `command`, `processor`, `cores`, `memory_gib`, `gpus`, `load` (1, 5 and 15
    minutes), `versions`, `commit` (None outside a checkout)."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpus": _gpus(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": _versions(),
        "commit": _commit(),
    }
