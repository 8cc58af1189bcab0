"""What nodes offer: plain data, and this machine's own numbers without Ray."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total",
    "--format=csv,noheader,nounits",
)


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
    """Memory in bytes of each NVIDIA GPU that this process may use; empty where there is none.

    CUDA_VISIBLE_DEVICES counts: Ray refuses to start with more GPUs than it names.
    """
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return visible_gpus(
        [(index, uuid, float(mib) * 2**20) for index, uuid, mib in rows],
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def visible_gpus(gpus: list[tuple[str, str, float]], visible: str | None) -> list[float]:
    """Memory of the GPUs that CUDA shows a process, in its order.

    Args:
        gpus: of the machine: index, UUID, memory.
        visible: CUDA_VISIBLE_DEVICES, indices or beginnings of UUIDs; None shows all. As CUDA does,
            what follows a name that there is not is left out.
    """
    if visible is None:
        return [memory for _, _, memory in gpus]
    shown: list[float] = []
    for name in (part.strip() for part in visible.split(",")):
        found = [m for i, uuid, m in gpus if name == i or (len(name) > 4 and uuid.startswith(name))]
        if len(found) != 1:
            break
        shown += found
    return shown


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
