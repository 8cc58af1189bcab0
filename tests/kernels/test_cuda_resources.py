"""What nvcc makes of the CUDA sources, for both GPUs they are for: no GPU needed.

The first run after a change of the sources compiles them, as a first use does; later runs read the
cache.
"""

import re
from pathlib import Path

import pytest

from overstory.kernels import build
from overstory.kernels.compilers import find_nvcc, version_of
from overstory.kernels.errors import NoCompilerError
from overstory.kernels.ptxas_report import KernelResources, read_report

ARCHITECTURES = ("sm_120", "sm_90")
SHARED_LIMIT = 101_376
"""Bytes of a block on sm_120; what a launch asks for is checked by the simulator."""
NOT_ON_BOTH = re.compile(
    r"\b(wgmma|tcgen05|setmaxnreg|ld\.global\.\S*v8|tile::gather4|multimem|\.multicast::cluster)\b"
)
"""Instructions that one of the two GPUs lacks (or has in its `a` variant only)."""


def _no_nvcc() -> str:
    """Why the limits cannot be checked here; empty if they can."""
    try:
        version = version_of(find_nvcc())
    except NoCompilerError as error:
        return str(error)
    return "" if "release 13." in version else f"the limits are those of nvcc 13, not of {version}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def entries(request: pytest.FixtureRequest) -> dict[str, Path]:
    """Cache entries of the objects, by source."""
    if reason := _no_nvcc():
        pytest.skip(reason)
    target = build.cuda_target(request.param)
    build.build_library(target)  # in parallel, and the link is tested on the way
    return {source.stem: build.build_object(target, source) for source in build.sources()}


def _kernels(entries: dict[str, Path]) -> list[KernelResources]:
    reports = [(entry / build.REPORT).read_text() for entry in entries.values()]
    return [kernel for report in reports for kernel in read_report(report)]


def test_every_source_holds_kernels(entries: dict[str, Path]) -> None:
    for source, entry in entries.items():
        assert read_report((entry / build.REPORT).read_text()), source


def test_nothing_spills(entries: dict[str, Path]) -> None:
    spilled = {k.name: k.spill_bytes for k in _kernels(entries) if k.spill_bytes}
    assert spilled == {}


def test_no_array_lives_in_local_memory(entries: dict[str, Path]) -> None:
    stacks = {k.name: k.stack_bytes for k in _kernels(entries) if k.stack_bytes}
    assert stacks == {}


def test_registers_and_shared_memory_fit(entries: dict[str, Path]) -> None:
    for kernel in _kernels(entries):
        assert kernel.registers <= 255, kernel
        assert kernel.static_shared_bytes <= SHARED_LIMIT, kernel


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2;", True),
        ("setmaxnreg.inc.sync.aligned.u32 240;", True),
        ("cp.async.bulk.shared::cluster.global.mbarrier.multicast::cluster [%r1];", True),
        ("ld.global.nc.v8.f32 {%f1}, [%rd1];", True),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2};", False),
        ("ld.global.nc.v4.f32 {%f1}, [%rd1];", False),
    ],
)
def test_the_pattern_knows_instructions(line: str, found: bool) -> None:
    assert bool(NOT_ON_BOTH.search(line)) == found


def test_no_instruction_that_one_gpu_lacks(entries: dict[str, Path]) -> None:
    for source, entry in entries.items():
        (ptx,) = entry.glob("*.ptx")
        assert NOT_ON_BOTH.findall(ptx.read_text()) == [], source


def test_the_compiler_has_nothing_to_say(entries: dict[str, Path]) -> None:
    for source, entry in entries.items():
        report = (entry / build.REPORT).read_text()
        assert [line for line in report.splitlines() if "warning" in line.lower()] == [], source
