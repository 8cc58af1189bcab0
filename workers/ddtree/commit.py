"""After acceptance: the accepted path becomes the request's newest KV, in target and drafter."""

from __future__ import annotations

from typing import Any

import torch

from overstory.kernels import ops
from overstory.kernels.reference import Accepted
from overstory.workers.ddtree.device_trees import path_moves


def kv_buffers(pool: Any) -> list[torch.Tensor]:
    """All per-layer KV tensors [slots, ...] of one of SGLang's pools, scales included.

    Raises:
        ValueError: a pool whose rows cannot be moved slot by slot.
    """
    if getattr(pool, "use_hnd", False):
        raise ValueError("DDTREE cannot move KV in a head-major paged layout")
    buffers: list[torch.Tensor] = []
    for name in ("kv_buffer", "k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"):
        found = getattr(pool, name, None)
        buffers += list(found) if found is not None else []
    if not buffers:
        raise ValueError(f"DDTREE does not know how to move KV in a {type(pool).__name__}")
    return buffers


class TargetKv:
    """The target's KV rows, movable in few launches.

    Args:
        pool: SGLang's pool of the target; ValueError as `kv_buffers`.
    """

    def __init__(self, pool: Any) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for buffer in kv_buffers(pool):
            alike.setdefault((buffer.shape, buffer.dtype), []).append(buffer)
        self._groups: list[ops.LayerTable | list[torch.Tensor]] = [
            ops.LayerTable(buffers) if buffers[0].is_cuda else buffers for buffers in alike.values()
        ]

    def compact(self, slots: torch.Tensor, accepted: Accepted) -> None:
        """Move the accepted rows' KV to the front of each window ``slots`` [bs, n]."""
        source, destination = path_moves(slots, accepted)
        for buffers in self._groups:
            ops.kv_relocate(buffers, source, destination)


def extend_drafter(
    worker: Any,
    hidden: torch.Tensor,
    accepted: Accepted,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    last_position: int,
) -> None:
    """Write the drafter's KV of the root and the accepted rows, and of nothing else.

    The drafter's KV is a projection of the target's hidden states, so the bonus token has none yet.

    Args:
        worker: SGLang's DFLASH worker, for its projection into the drafter's pool.
        hidden: [bs * n, K * H] captured by the verify forward.
        accepted: the walk; rows [bs, width].
        slots: [bs, n] KV slots of the window; the first ones are the compacted path's.
        seq_lens: [bs] committed lengths before this step.
        last_position: last position of the context.
    """
    extend = extend_by_paths if slots.is_cuda else extend_by_rows
    extend(worker, hidden, accepted, slots, seq_lens, last_position)


def extend_by_paths(
    worker: Any,
    hidden: torch.Tensor,
    accepted: Accepted,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    last_position: int,
) -> None:
    """As `extend_drafter`, computing as many rows of each request as its path may have: none of
    the lengths is read."""
    bs, n = slots.shape
    width = accepted.rows.shape[1]
    first_row = torch.arange(bs, device=slots.device).unsqueeze(1) * n
    rows = (accepted.rows.clamp(min=0) + first_row).view(-1)
    offsets = torch.arange(width, device=slots.device)
    positions = (seq_lens.unsqueeze(1) + offsets).clamp_(max=last_position)
    front = slots[:, :width].contiguous()
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=hidden[rows],
        cache_loc=front.view(-1),
        cache_loc_2d=front,
        positions=positions.view(-1),
        commit_lens=(accepted.lengths + 1).to(torch.int32),
    )


def extend_by_rows(
    worker: Any,
    hidden: torch.Tensor,
    accepted: Accepted,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    last_position: int,
) -> None:
    """As `extend_drafter`, computing the path's rows only: their number is known on a CPU."""
    batch, depth = (accepted.rows >= 0).nonzero(as_tuple=True)
    rows = accepted.rows[batch, depth] + batch * slots.shape[1]
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=hidden[rows],
        cache_loc=slots[batch, depth],
        positions=(seq_lens[batch] + depth).clamp_(max=last_position),
    )
