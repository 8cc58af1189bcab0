"""`device_time`: the clock of the device, in the order of its stream."""

from __future__ import annotations

import time

import torch

from .checks import check_tensor
from .choice import launch, library_for
from .registry import register


def device_time(out: torch.Tensor) -> None:
    """Write the device's time once all that was launched before has run.

    Differences of two such times on one device say what lay between them; a launch's own way to the
    device is in none. On a CPU, and with OVERSTORY_KERNELS=reference, it is the host's clock now.

    Args:
        out: [1] int64, receives nanoseconds since any moment.

    Raises:
        ValueError: shape or type do not fit.
        KernelError: as `library_for`.
    """
    _device_time(out)


def _check(out: torch.Tensor) -> None:
    check_tensor("out", out, [1], (torch.int64,), out.device)


@register("device_time(Tensor(a!) out) -> ()", _check)
def _device_time(out: torch.Tensor) -> None:
    library = library_for("device_time", out.device)
    if library is None:
        out.fill_(time.perf_counter_ns())
        return
    launch(library, "device_time", out.device, out=out)
