"""What `overstory doctor` needs to know of one node, and how a process there finds it out.

Standard library and psutil only: packages of the node may be the wrong ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = {
    "overstory": ("overstory",),
    "ray": ("ray",),
    "sglang": ("sglang",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""Package -> the distributions that may hold it."""
ENVIRONMENT = (
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"),
    *("NCCL_IB_DISABLE", "CUDA_VISIBLE_DEVICES", "SGLANG_HOST_IP"),
)
_GPU_QUERY = (
    "name,memory.total,compute_cap,driver_version,pcie.link.width.current,pcie.link.width.max"
)
_SAMPLE_BYTES = 1 << 20
_NVCC = Path("/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class GpuSeen:
    """One GPU as `nvidia-smi` reports it. Memory in bytes, link widths in lanes (0 unknown)."""

    name: str
    memory: float
    capability: tuple[int, int]
    link_width: int = 0
    link_width_max: int = 0


@dataclass(frozen=True)
class Interface:
    """A network interface with its IPv4 and IPv6 addresses."""

    name: str
    addresses: tuple[str, ...]
    up: bool = True


@dataclass(frozen=True)
class ModelSeen:
    """A model folder: `digest` of its config and of names, sizes and ends of its weight files."""

    key: str
    path: str
    present: bool
    digest: str = ""
    weight_files: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class NodeFacts:
    """One node, looked at by a process on it. Bytes and seconds.

    Attributes:
        name, address: host name, and the address by which Ray knows it.
        head: whether Ray's head runs there.
        packages: version by name (`PACKAGES`), "" where not installed.
        peer: for each pair of GPUs on it whether they reach each other's memory ("OK" or why not).
        topology: for each pair how they are joined (PIX, PXB, PHB, NODE, SYS, NV4, ...).
        open_files, locked_memory: soft limits of this process, -1 for unlimited.
        clock_offset: of its clock against the caller's, and how uncertain that is.
        taken_ports: ports asked about that cannot be bound, with the reason.
        builds_kernels: whether a CUDA compiler is there.
        fault: why the node could not be looked at; everything else is empty then.
    """

    name: str
    address: str
    head: bool = False
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    driver: str = ""
    gpus: tuple[GpuSeen, ...] = ()
    peer: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 0.0
    memory: float = 0.0
    memory_free: float = 0.0
    shm: float = 0.0
    shm_free: float = 0.0
    open_files: int = -1
    locked_memory: int = -1
    interfaces: tuple[Interface, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    clock_offset: float = 0.0
    clock_uncertain: float = 0.0
    models: tuple[ModelSeen, ...] = ()
    taken_ports: Mapping[int, str] = field(default_factory=dict)
    builds_kernels: bool = False
    fault: str = ""


def package_versions() -> dict[str, str]:
    """Versions of `PACKAGES` in this environment; "" where a package is missing."""
    found = {}
    for name, distributions in PACKAGES.items():
        found[name] = ""
        for distribution in distributions:
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(distribution)
                break
    return found


def _smi(*arguments: str) -> str:
    """What `nvidia-smi` says; empty where there is none or it fails."""
    try:
        done = subprocess.run(
            ("nvidia-smi", *arguments), capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _whole(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def parse_gpus(csv: str) -> tuple[tuple[GpuSeen, ...], str]:
    """GPUs and driver out of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`."""
    gpus, driver = [], ""
    for line in csv.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 6:
            continue
        major, _, minor = cells[2].partition(".")
        driver = cells[3]
        gpus.append(
            GpuSeen(
                cells[0],
                _whole(cells[1]) * 2.0**20,
                (_whole(major), _whole(minor)),
                _whole(cells[4]),
                _whole(cells[5]),
            )
        )
    return tuple(gpus), driver


def parse_matrix(text: str) -> dict[str, str]:
    """Cells of an `nvidia-smi topo` matrix, "0-1" -> "PIX"; pairs once, the lower number first."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = re.sub(r"\x1b\[[0-9;]*m", "", line).split()
        if not cells or not re.fullmatch(r"GPU\d+", cells[0]) or "GPU1" in cells[1:2]:
            continue
        row = int(cells[0][3:])
        for column, cell in enumerate(cells[1:]):
            if row < column and not cell.startswith("GPU"):
                found[f"{row}-{column}"] = cell
    return found


def _only_gpus(matrix: Mapping[str, str], count: int) -> dict[str, str]:
    """Without the columns that follow the GPUs' (NICs, affinities)."""
    return {k: v for k, v in matrix.items() if int(k.split("-")[1]) < count}


def _shm() -> tuple[float, float]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return 0.0, 0.0
    return float(usage.total), float(usage.free)


def _interfaces() -> tuple[Interface, ...]:
    import psutil  # Ray brings it.

    up = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name,
            tuple(a.address.partition("%")[0] for a in addresses if a.family in families),
            up.get(name, False),
        )
        for name, addresses in psutil.net_if_addrs().items()
    )


def _memory() -> tuple[float, float]:
    import psutil

    seen = psutil.virtual_memory()
    return float(seen.total), float(seen.available)


def look_at_model(key: str, path: str) -> ModelSeen:
    """A model's folder. Reads its config and the first and last MiB of each weight file."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return ModelSeen(key, path, present=False)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        size = file.stat().st_size
        total += size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLE_BYTES))
            stream.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(stream.read(_SAMPLE_BYTES))
    return ModelSeen(key, path, True, digest.hexdigest()[:16], len(files), total)


def why_port_taken(port: int) -> str | None:
    """Why this node cannot listen at `port`; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def look_here(
    address: str, head: bool, models: Sequence[tuple[str, str]] = (), ports: Iterable[int] = ()
) -> NodeFacts:
    """Facts of the node that this process runs on, but for its clock.

    Args:
        address: by which the other nodes know it.
        head: whether Ray's head runs here.
        models: pairs of a setting's key and the folder it names.
        ports: ports that should be free.
    """
    gpus, driver = parse_gpus(_smi(f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader,nounits"))
    several = len(gpus) > 1
    memory, memory_free = _memory()
    shm, shm_free = _shm()
    taken = {port: reason for port in ports if (reason := why_port_taken(port)) is not None}
    return NodeFacts(
        name=socket.gethostname(),
        address=address,
        head=head,
        python=platform.python_version(),
        packages=package_versions(),
        driver=driver,
        gpus=gpus,
        peer=_only_gpus(parse_matrix(_smi("topo", "-p2p", "r")), len(gpus)) if several else {},
        topology=_only_gpus(parse_matrix(_smi("topo", "-m")), len(gpus)) if several else {},
        cpus=float(len(os.sched_getaffinity(0))),
        memory=memory,
        memory_free=memory_free,
        shm=shm,
        shm_free=shm_free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        interfaces=_interfaces(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        models=tuple(look_at_model(key, path) for key, path in models),
        taken_ports=taken,
        builds_kernels=shutil.which("nvcc") is not None
        or Path("/usr/local/cuda/bin/nvcc").exists(),
    )


def clock() -> float:
    """Seconds since the epoch by this node's clock."""
    return time.time()
