"""How the attention kernels share out the keys: a grid size and a smallest share.

Both are fixed when a launch is captured; the lengths decide on the device who does what.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from overstory.kernels.cuda_library import KernelLibrary
from overstory.kernels.errors import NoDeviceError

from .checks import check_range

MOST = 1 << 16
"""Blocks of a launch, and granules of a smallest share, at most."""
_SIMULATED_BLOCKS = 3


@dataclass(frozen=True)
class Schedule:
    """Tunables of one launch.

    Raises:
        ValueError: a number is outside of 1..65536 (`blocks`) or 0..65536 (`min_chunk`).
    """

    blocks: int
    """Of the attention kernel, for all requests together."""
    min_chunk: int
    """Granules of 16 keys that a block takes at least; 0: the kernel weighs the time of a share
    against that of putting the parts together, for the lengths at hand."""

    def __post_init__(self) -> None:
        check_range("Schedule.blocks", self.blocks, 1, MOST)
        check_range("Schedule.min_chunk", self.min_chunk, 0, MOST)


@functools.cache
def default_schedule(
    library: KernelLibrary, device: torch.device, heads: int, max_q: int, fp8: bool = False
) -> Schedule:
    """As many blocks as the device runs at a time, the share up to the kernel.

    Raises:
        NoDeviceError: the device cannot hold one block of the kernel.
    """
    if device.type != "cuda":
        return Schedule(_SIMULATED_BLOCKS, 0)
    with torch.cuda.device(device):
        per_sm = library.query("attention_blocks_per_sm", heads=heads, max_q=max_q, fp8=int(fp8))
    if per_sm < 1:
        name = torch.cuda.get_device_name(device)
        raise NoDeviceError(f"{name} cannot hold a block of the attention kernel")
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Schedule(per_sm * count, 0)


@functools.cache
def workspace_bytes(library: KernelLibrary, heads: int, max_q: int, schedule: Schedule) -> int:
    """Bytes that a launch with these numbers needs for the parts of split requests."""
    return library.query("attention_workspace", heads=heads, max_q=max_q, blocks=schedule.blocks)


def workspace_for(
    library: KernelLibrary,
    device: torch.device,
    heads: int,
    max_q: int,
    schedule: Schedule,
    given: torch.Tensor | None,
) -> torch.Tensor:
    """The workspace of a launch: what was given, or a new one from torch's allocator.

    Raises:
        ValueError: the given one is too small.
    """
    need = workspace_bytes(library, heads, max_q, schedule)
    if given is None:
        return torch.empty(need, dtype=torch.uint8, device=device)
    if given.numel() < need:
        raise ValueError(
            f"workspace has {given.numel()} bytes; {schedule.blocks} blocks for {heads} heads and "
            f"max_q {max_q} need {need}: take one from attention_workspace with these numbers"
        )
    return given
