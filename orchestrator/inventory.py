"""What nodes offer: plain data, and this machine's own numbers without Ray."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class NodeInventory:
    """One node. Memory in bytes; a `gpu_memory` of 0 is unknown."""

    name: str
    cpus: float
    gpus: float
    memory: float
    gpu_memory: float = 0.0
    node_id: str = ""


def _memory_limit() -> float:
    """Bytes this process may use: the machine's memory, or its control group's limit."""
    machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return machine
    return machine if limit == "max" else min(machine, float(limit))


def local_gpu_memory() -> list[float]:
    """Memory of each NVIDIA GPU of this machine in bytes; empty where there is none."""
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [float(line) * 2**20 for line in done.stdout.split()]


def local_inventory() -> NodeInventory:
    """This machine."""
    gpus = local_gpu_memory()
    return NodeInventory(
        name=os.uname().nodename,
        cpus=float(len(os.sched_getaffinity(0))),
        gpus=float(len(gpus)),
        memory=_memory_limit(),
        gpu_memory=min(gpus, default=0.0),
    )
