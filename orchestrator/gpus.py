"""GPUs that plans and estimates know: sizes, rates and links, each with its source. Pure."""

from dataclasses import dataclass, field, replace
from typing import Any

from overstory.orchestrator.errors import UserFault

MIB = 2**20


class UnknownGpu(UserFault, ValueError):
    """A GPU name that is not in the table."""


@dataclass(frozen=True)
class Link:
    """How GPUs exchange: an all-reduce of n ranks costs `latency + 2 (n-1)/n bytes / rate`.

    Attributes:
        latency_s: of the smallest all-reduce of 8 ranks, inside of a CUDA graph.
        rate: bytes per second and GPU of a large one ("bus bandwidth").
        source: where both come from.
    """

    latency_s: float
    rate: float
    source: str


@dataclass(frozen=True)
class GpuFacts:
    """One kind of GPU. Bytes, bytes per second, floating point operations per second.

    Attributes:
        name: as `--gpu` takes it.
        match: part of the name that `nvidia-smi` reports, lower case.
        capability: compute capability that kernels are built for.
        memory: as `nvidia-smi` reports it.
        dram: bandwidth that a well-written kernel reaches.
        flops: bfloat16 rate that a large matrix product reaches.
        sms: streaming multiprocessors.
        clock: of them under load, in Hz.
        inside: link between GPUs of one node.
        between: link between GPUs of several nodes.
        sources: of everything else, by attribute.
    """

    name: str
    match: str
    capability: tuple[int, int]
    memory: float
    dram: float
    flops: float
    sms: int
    clock: float
    inside: Link
    between: Link
    sources: dict[str, str] = field(default_factory=dict)


_RTX6KPRO = (
    "github.com/local-inference-lab/rtx6kpro at e2c2b957, "
    "hardware/wrx90-cpayne-8gpu-root-topology-comparison.md: NCCL all-reduce of 8 RTX PRO 6000 "
    "over PCIe 5 x16 switches, measured by its authors: 17 to 25 us from 4 to 256 KiB, 80 us at "
    "1 MiB, 182 us at 4 MiB, 46 GB/s at 1 GiB"
)
_ETHERNET = "assumed: RDMA over two 200 Gb/s ports for 8 GPUs, 3 us a hop; no measurement behind it"

RTX_PRO_6000 = GpuFacts(
    name="rtx-pro-6000",
    match="rtx pro 6000",
    capability=(12, 0),
    memory=97887 * MIB,
    dram=1.55e12,
    flops=400e12,
    sms=188,
    clock=2.4e9,
    inside=Link(18e-6, 46e9, _RTX6KPRO),
    between=Link(45e-6, 6.25e9, _ETHERNET),
    sources={
        "memory": "nvidia-smi's 97887 MiB, in many public logs",
        "dram": "1.792 TB/s by data sheet; 86 to 87% reached by published GEMV kernels on GDDR7",
        "flops": "503.8 TFLOP/s by data sheet; cuBLAS 368 to 417 measured by others",
        "clock": "2.617 GHz boost by data sheet; 2.4 under load assumed",
    },
)
H200 = GpuFacts(
    name="h200",
    match="h200",
    capability=(9, 0),
    memory=143771 * MIB,
    dram=4.2e12,
    flops=620e12,
    sms=132,
    clock=1.98e9,
    inside=Link(9e-6, 360e9, "assumed: NVLink 4, 80% of 450 GB/s a direction; no measurement here"),
    between=Link(25e-6, 40e9, "assumed: one 400 Gb/s port for each GPU; no measurement here"),
    sources={
        "memory": "nvidia-smi's 143771 MiB, in many public logs",
        "dram": "4.8 TB/s by data sheet; a kernel copies 4.2 (docs/benchmarks/kernels_h200.md)",
        "flops": "989 TFLOP/s by data sheet; 62 to 65% of it with mma.sync, measured by others",
        "clock": "1.98 GHz in 8 of 10 samples under the rank slice's steps, 1.86 at least",
    },
)

KNOWN = {gpu.name: gpu for gpu in (RTX_PRO_6000, H200)}


def gpu_named(name: str) -> GpuFacts:
    """The GPU called `name`.

    Raises:
        UnknownGpu: it is not in the table.
    """
    try:
        return KNOWN[name]
    except KeyError:
        known = ", ".join(sorted(KNOWN))
        raise UnknownGpu(
            f"--gpu: got {name!r}, known are {known}; give the nearest of them and its numbers by "
            "the options, or --gpu-gib alone for a plan"
        ) from None


def recognise(reported: str) -> GpuFacts | None:
    """The GPU that `nvidia-smi` reports under this name; None if it is not in the table."""
    lower = reported.lower()
    return next((gpu for gpu in KNOWN.values() if gpu.match in lower), None)


def another(base: GpuFacts, **numbers: Any) -> GpuFacts:
    """`base` with other numbers: attributes of `GpuFacts`, and `latency_s` or `rate` of the link
    inside of a node. None leaves a number as it is; a changed GPU's name says that it is one."""
    given = {name: value for name, value in numbers.items() if value is not None}
    if not given:
        return base
    link = {name: given.pop(name) for name in ("latency_s", "rate") if name in given}
    inside = replace(base.inside, **link, source="given") if link else base.inside
    sources = base.sources | dict.fromkeys(given, "given")
    changed = replace(base, **given, inside=inside, sources=sources)
    return replace(changed, name=f"{base.name}, changed")
