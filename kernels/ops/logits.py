"""What the ops over rows of logits have in common."""

from __future__ import annotations

import functools

import torch

from overstory.kernels.cuda_library import KernelLibrary

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""As `logit_type` of the launchers."""
_SIMULATED = 2


def check_logits(logits: torch.Tensor) -> None:
    """[rows, V], the columns next to each other, rows any distance apart.

    Raises:
        ValueError: of another shape.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {list(logits.shape)}; want [rows, V]")
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"columns of logits are {logits.stride(1)} elements apart; want 1")


def logit_type(logits: torch.Tensor) -> int:
    """The number by which the launchers know the type.

    Raises:
        ValueError: a type that they do not take.
    """
    if logits.dtype not in _TYPES:
        names = ", ".join(str(dtype) for dtype in _TYPES)
        raise ValueError(f"logits are {logits.dtype}; the kernels take {names}")
    return _TYPES[logits.dtype]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the device, 2 in the simulator."""
    if device.type != "cuda":
        return _SIMULATED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def row_splits(
    library: KernelLibrary, op: str, device: torch.device, rows: int, columns: int
) -> int:
    """Blocks that an op had best spread each row over, by the op's own launcher."""
    count = multiprocessors(device)
    return library.query(f"{op}_splits", rows=rows, columns=columns, multiprocessors=count)
