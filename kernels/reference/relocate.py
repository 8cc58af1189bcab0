"""Moving KV rows between slots: compaction after acceptance, defragmentation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .accept import Accepted
from .kv_fp8 import is_fp8


def kv_relocate(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """Copy row src_slots[i] to row dst_slots[i] in each buffer, in place.

    Everything is read before anything is written, over all buffers: slots may be source and
    destination at once, and buffers may share memory.

    Args:
        buffers: [slots, ...] each, any type; say, one per layer.
        src_slots: [moves] int.
        dst_slots: [moves] int, distinct.

    Raises:
        ValueError: as many sources as destinations are needed, and distinct destinations.
        IndexError: a slot is outside a buffer.
    """
    if src_slots.shape != dst_slots.shape or src_slots.dim() != 1:
        raise ValueError(
            f"src_slots has shape {tuple(src_slots.shape)}, dst_slots {tuple(dst_slots.shape)}; "
            "want two vectors of one length"
        )
    src_slots, dst_slots = src_slots.to(torch.int64), dst_slots.to(torch.int64)
    if src_slots.numel() == 0:
        return
    if torch.unique(dst_slots).numel() != dst_slots.numel():
        raise ValueError("dst_slots names a slot twice: what it would hold is undefined")
    highest = int(torch.maximum(src_slots, dst_slots).max())
    lowest = int(torch.minimum(src_slots, dst_slots).min())
    for buffer in buffers:
        if lowest < 0 or highest >= buffer.shape[0]:
            raise IndexError(f"slots {lowest}..{highest} in a buffer of {buffer.shape[0]}")
    # torch cannot write rows of 8-bit floats by index; their bytes it can.
    as_bytes = [buffer.view(torch.uint8) if is_fp8(buffer) else buffer for buffer in buffers]
    read = [buffer.index_select(0, src_slots) for buffer in as_bytes]
    for buffer, values in zip(as_bytes, read, strict=True):
        buffer.index_copy_(0, dst_slots, values)


def kv_rows(
    buffers: Sequence[torch.Tensor], slots: torch.Tensor, dense: torch.Tensor, *, scatter: bool
) -> None:
    """Rows of some slots of all buffers to a dense tensor; from there to the slots if `scatter`.

    Args:
        buffers: [buffer slots, *row] each, all alike.
        slots: [rows] int; distinct where they are written.
        dense: [buffers, rows, *row] of the same type, sharing no memory with the buffers.
        scatter: which way.

    Raises:
        ValueError: `dense` has another shape.
        IndexError: a slot is outside the buffers.
    """
    wanted = (len(buffers), len(slots), *buffers[0].shape[1:])
    if dense.shape != wanted:
        raise ValueError(f"dense has shape {tuple(dense.shape)}; want {wanted}")
    slots = slots.to(torch.int64)
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < len(buffers[0]):
        raise IndexError(f"slots {slots.tolist()} in buffers of {len(buffers[0])}")
    for buffer, part in zip(buffers, dense, strict=True):
        if is_fp8(buffer):
            buffer, part = buffer.view(torch.uint8), part.view(torch.uint8)
        if scatter:
            buffer.index_copy_(0, slots, part)
        else:
            torch.index_select(buffer, 0, slots, out=part)


def compaction_moves(
    window_slots: torch.Tensor, accepted: Accepted
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves that bring the accepted path to the front of each request's verify window.

    Args:
        window_slots: [bs, n] int, slot of each row of the tree.
        accepted: what `tree_accept` returned for the same tree.

    Returns:
        src and dst, [moves] int64 each, of path rows that are not in place already; the root
        and the part of the path that equals the spine never move.
    """
    path = accepted.rows
    front = torch.arange(path.shape[1], device=path.device).expand_as(path)
    moving = path > front  # a path row is never before its depth; -1 ends the path
    batch = moving.nonzero()[:, 0]
    slots = window_slots.to(torch.int64)
    return slots[batch, path[moving]], slots[batch, front[moving]]
