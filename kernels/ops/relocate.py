"""`kv_relocate` and `kv_rows`; contracts in reference/relocate.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overstory.kernels import reference

from .checks import INTS, check_tensor
from .choice import launch, library_for
from .registry import register
from .status import status_of

_UNIT = 16
"""Rows are moved in pieces of so many bytes."""
_LARGEST_PART = _UNIT << 30
"""Of `kv_rows`: pieces of a layer are counted in 32 bits."""


class LayerTable:
    """Buffers of all layers and the table of their addresses that the kernel reads.

    Making one copies the table to the device, which cannot be captured: make it once per pool.
    Buffers must not share memory (a pool that hands out its values as a view of its keys goes in
    once); the same number of slots each, rows of the same multiple of 16 bytes.

    Raises:
        ValueError: the buffers are no such set.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = list(buffers)
        if not self.buffers:
            raise ValueError("no buffers to move rows in")
        first = self.buffers[0]
        for index, buffer in enumerate(self.buffers):
            check_tensor(f"buffers[{index}]", buffer, first.shape, (first.dtype,), first.device)
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.slots = first.shape[0]
        self.row_bytes = _row_bytes(first)
        if self.row_bytes % _UNIT or any(address % _UNIT for address in addresses):
            raise ValueError(
                f"rows of {self.row_bytes} bytes; the kernel moves multiples of {_UNIT} from "
                f"addresses that are multiples of {_UNIT}"
            )
        if len(set(addresses)) != len(addresses):
            raise ValueError("a buffer is listed twice: its rows would be moved twice")
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)


def kv_relocate(
    buffers: Sequence[torch.Tensor] | LayerTable,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    *,
    status: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> None:
    """`reference.kv_relocate`; a move with a slot of -1 is none, so that a captured launch of fixed
    size serves any number of moves.

    On CUDA nothing is read on the host: of the errors, slots outside of the buffers leave their
    moves undone and set `status`; a destination named twice is not seen. All moves go in one
    launch, up to 8,192 (many are looked over by a kernel before).

    Args:
        buffers: [slots, ...] each, or a `LayerTable` of them, which capture needs.
        src_slots, dst_slots: [moves] int32 or int64, both the same.
        status: [1] int32, set to 1 where a slot is outside; default `status_of` the device.
        scratch: [1] int32, any value; default taken from torch's allocator. Calls that may run at
            the same time need one each.

    Raises:
        ValueError: shapes or types do not fit, or too many moves.
        KernelError: as `library_for`.
    """
    device = src_slots.device
    library = library_for("kv_relocate", device)
    if scratch is None:
        scratch = torch.empty(1, dtype=torch.int32, device=device)
    listed, addresses = _listed(buffers, library is not None)
    _relocate(listed, addresses, src_slots, dst_slots, scratch, status_of(device, status))


def _listed(
    buffers: Sequence[torch.Tensor] | LayerTable, by_kernel: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Buffers, with the table of their addresses where there is one or the kernel needs it."""
    if not isinstance(buffers, LayerTable):
        if not by_kernel:
            return list(buffers), None
        buffers = LayerTable(buffers)
    return buffers.buffers, buffers.addresses


def _row_bytes(buffer: torch.Tensor) -> int:
    return buffer[:1].numel() * buffer.element_size()


def _check(
    buffers: list[torch.Tensor],
    addresses: torch.Tensor | None,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    scratch: torch.Tensor,
    status: torch.Tensor,
) -> None:
    device = src_slots.device
    check_tensor("src_slots", src_slots, [None], INTS, device)
    check_tensor("dst_slots", dst_slots, [src_slots.shape[0]], (src_slots.dtype,), device)
    for name, tensor in {"scratch": scratch, "status": status}.items():
        check_tensor(name, tensor, [1], (torch.int32,), device)
    if addresses is not None:
        check_tensor("addresses", addresses, [len(buffers)], (torch.int64,), device)
    for buffer in buffers:
        if buffer.device != device:
            raise ValueError(f"a buffer is on {buffer.device}; the slots are on {device}")


@register(
    "kv_relocate(Tensor(a!)[] buffers, Tensor? addresses, Tensor src_slots, Tensor dst_slots, "
    "Tensor(b!) scratch, Tensor(c!) status) -> ()",
    _check,
)
def _relocate(
    buffers: list[torch.Tensor],
    addresses: torch.Tensor | None,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    scratch: torch.Tensor,
    status: torch.Tensor,
) -> None:
    library = library_for("kv_relocate", src_slots.device)
    if library is None:
        moved = (src_slots != -1) & (dst_slots != -1)
        reference.kv_relocate(buffers, src_slots[moved], dst_slots[moved])
        return
    most, moves = library.query("kv_relocate_max_moves"), src_slots.numel()
    if moves > most:
        raise ValueError(f"{moves} moves; one launch takes at most {most}")
    first = buffers[0]
    launch(
        library,
        "kv_relocate",
        src_slots.device,
        layers=addresses,
        num_layers=len(buffers),
        row_bytes=_row_bytes(first),
        slots=first.shape[0],
        source_slots=src_slots,
        target_slots=dst_slots,
        wide_slots=src_slots.dtype == torch.int64,
        moves=moves,
        scratch=scratch,
        status=status,
    )


def kv_rows(
    buffers: Sequence[torch.Tensor] | LayerTable,
    slots: torch.Tensor,
    dense: torch.Tensor,
    *,
    scatter: bool,
    status: torch.Tensor | None = None,
) -> None:
    """`reference.kv_rows` in one launch. On CUDA nothing is read on the host: a slot outside of the
    buffers leaves its row undone and sets `status`.

    Args:
        buffers: [buffer slots, *row] each, or a `LayerTable` of them.
        slots: [rows] int32 or int64.
        dense: [buffers, rows, *row].
        scatter: from `dense` to the buffers.
        status: [1] int32, set to 1 where a slot is outside; default `status_of` the device.

    Raises:
        ValueError: shapes or types do not fit, or a layer's part of `dense` has over 16 GiB.
        KernelError: as `library_for`.
    """
    status = status_of(slots.device, status)
    listed, addresses = _listed(buffers, library_for("kv_rows", slots.device) is not None)
    _rows(listed, addresses, slots, dense, scatter, status)


def _check_rows(
    buffers: list[torch.Tensor],
    addresses: torch.Tensor | None,
    slots: torch.Tensor,
    dense: torch.Tensor,
    scatter: bool,
    status: torch.Tensor,
) -> None:
    device, first = slots.device, buffers[0]
    check_tensor("slots", slots, [None], INTS, device)
    check_tensor("status", status, [1], (torch.int32,), device)
    check_tensor("buffers[0]", first, [None] * first.dim(), (first.dtype,), device)
    wanted = [len(buffers), slots.shape[0], *first.shape[1:]]
    check_tensor("dense", dense, wanted, (first.dtype,), device)
    if dense[:1].numel() * dense.element_size() > _LARGEST_PART:
        raise ValueError(f"{slots.shape[0]} rows; a layer's may have at most {_LARGEST_PART} bytes")


@register(
    "kv_rows(Tensor(a!)[] buffers, Tensor? addresses, Tensor slots, Tensor(b!) dense, "
    "bool scatter, Tensor(c!) status) -> ()",
    _check_rows,
)
def _rows(
    buffers: list[torch.Tensor],
    addresses: torch.Tensor | None,
    slots: torch.Tensor,
    dense: torch.Tensor,
    scatter: bool,
    status: torch.Tensor,
) -> None:
    library = library_for("kv_rows", slots.device)
    if library is None:
        reference.kv_rows(buffers, slots, dense, scatter=scatter)
        return
    first = buffers[0]
    launch(
        library,
        "kv_rows",
        slots.device,
        layers=addresses,
        num_layers=len(buffers),
        row_bytes=_row_bytes(first),
        layer_slots=first.shape[0],
        slots=slots,
        wide_slots=slots.dtype == torch.int64,
        rows=slots.numel(),
        dense=dense,
        scatter=scatter,
        status=status,
    )
