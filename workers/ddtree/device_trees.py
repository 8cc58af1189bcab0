"""Trees and moves of a step by tensor operations alone: no value is read on the host.

So a step can be launched without waiting for the device, and parts of it can be captured.
"""

from __future__ import annotations

import torch

from overstory.kernels.reference import Accepted, Tree


def chain_rows(roots: torch.Tensor, drafted: torch.Tensor) -> Tree:
    """As `overstory.kernels.reference.chain_tree`.

    Args:
        roots: [bs] int64.
        drafted: [bs, depth] int64; depth 0 gives the root alone.
    """
    bs, depth = drafted.shape
    order = torch.arange(depth + 1, device=roots.device)
    parents = (order - 1).expand(bs, -1).contiguous()
    return Tree(
        tokens=torch.cat([roots.unsqueeze(1), drafted], dim=1),
        parents=parents,
        depths=order.expand(bs, -1).contiguous(),
        ranks=parents.clamp(max=0),
        sizes=torch.full((bs,), depth + 1, dtype=torch.int64, device=roots.device),
    )


def path_moves(slots: torch.Tensor, accepted: Accepted) -> tuple[torch.Tensor, torch.Tensor]:
    """As `overstory.kernels.reference.compaction_moves`, with -1 for a row that need not move.

    Args:
        slots: [bs, n] int64, slot of each row.
        accepted: the walk, width columns, at most n.

    Returns:
        source and destination, [bs * width] int64 each.
    """
    path = accepted.rows
    width = path.shape[1]
    moving = path > torch.arange(width, device=path.device)
    none = torch.full_like(path, -1)
    source = torch.where(moving, slots.gather(1, path.clamp(min=0)), none)
    destination = torch.where(moving, slots[:, :width], none)
    return source.view(-1), destination.view(-1)
