"""Which implementation an op takes: the CUDA kernels, the plain torch reference, the simulator.

$OVERSTORY_KERNELS says: `auto` (default) takes the kernels for CUDA tensors and the reference for
CPU tensors, and where the kernels cannot run it takes the reference too, after a warning; `cuda`,
`reference` and `simulator` (the kernels' sources on the CPU, for tests) are that or an error.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

from overstory.kernels.build import SOURCES
from overstory.kernels.cuda_library import KernelLibrary, cuda_library, simulator_library
from overstory.kernels.errors import KernelError
from overstory.kernels.signatures import launchers_of

VARIABLE = "OVERSTORY_KERNELS"
CHOICES = ("auto", "cuda", "reference", "simulator")


def library_for(launcher: str, device: torch.device) -> KernelLibrary | None:
    """The library whose `launcher` serves tensors of `device`; None: the reference does.

    Raises:
        ValueError: $OVERSTORY_KERNELS names no choice, or one that is not for this device.
        KernelError, OSError: it names `cuda` or `simulator`, which cannot be built or run here.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} is {choice!r}; want one of {', '.join(CHOICES)}")
    is_cuda = device.type == "cuda"
    if choice == "reference" or (choice == "auto" and not is_cuda):
        return None
    if choice == "auto":
        return _cuda_or_warn(device.index)
    if (choice == "cuda") != is_cuda:
        raise ValueError(
            f"{VARIABLE}={choice}, but the tensors are on {device}; "
            f"take {VARIABLE}=auto or move them"
        )
    return _cuda(device) if is_cuda else _simulator(launcher)


def prepare(device: torch.device | str) -> str:
    """Build or load what the ops on a device need, so that no first call waits for it.

    Before a capture run the same ops once besides: a kernel is loaded at its first launch.

    Returns:
        what serves the device: "reference", "simulator" or the architecture of the kernels.

    Raises:
        ValueError, KernelError, OSError: as `library_for`.
    """
    library = library_for("tree_build", torch.device(device))
    return "reference" if library is None else library.target.name


def launch(library: KernelLibrary, launcher: str, device: torch.device, **arguments: Any) -> None:
    """Run a launcher on the current stream of `device`.

    Raises:
        LaunchError: as `KernelLibrary.launch`.
    """
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        library.launch(launcher, **arguments)
        return
    with torch.cuda.device(device):
        library.launch(launcher, **arguments)


@functools.cache
def _cuda(device: torch.device) -> KernelLibrary:
    """Asked for at every launch: what the device is need be found out once."""
    return cuda_library(device)


@functools.cache
def _cuda_or_warn(index: int | None) -> KernelLibrary | None:
    """One answer, and so one warning, per device and process."""
    try:
        return cuda_library(index)
    except (KernelError, OSError) as error:
        warnings.warn(
            f"the CUDA kernels cannot run here, so ops on CUDA tensors take the plain torch "
            f"reference, which is slow, synchronises and cannot be captured. "
            f"{VARIABLE}=cuda makes this an error. The reason: {error}",
            RuntimeWarning,
            stacklevel=4,
        )
        return None


@functools.cache
def _simulator(launcher: str) -> KernelLibrary:
    """A library of the one source that has the launcher: a test need not build the others."""
    for source in sorted(SOURCES.glob("*.cu")):
        if launcher in launchers_of(source):
            return simulator_library([source])
    raise KernelError(f"no source of {SOURCES} has overstory_{launcher}")
