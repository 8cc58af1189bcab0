"""The kernel that does nothing (empty.cu): the least that any launch takes."""

from __future__ import annotations

import functools
from pathlib import Path

from overstory.kernels.bench.timing import Launch
from overstory.kernels.build import cuda_target
from overstory.kernels.cuda_library import KernelLibrary, arch_of


@functools.cache
def _library() -> KernelLibrary:
    return KernelLibrary(cuda_target(arch_of()), [Path(__file__).parent / "empty.cu"])


def empty(blocks: int, dependent: bool) -> Launch:
    """Blocks of 256 threads; `dependent`: by programmatic dependent launch, as our ops."""
    return lambda: _library().launch("empty", blocks=blocks, threads=256, dependent=dependent)
