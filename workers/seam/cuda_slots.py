"""The slots of each request's tokens, listed on the device for the attention ops.

SGLang's own kernel for this walks a request's row in one block; at long contexts that takes longer
than a layer's attention. Here a row is shared out over blocks, and the bounds come from the same
launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_BLOCK = 1024
"""Slots that a block of the kernel copies at a time."""

_MOST_BLOCKS = 64
"""Blocks of one request; longer rows take several rounds."""


class SlotLists:
    """Bounds and slots of up to ``requests`` requests, at addresses that stay.

    Args:
        requests: most requests of a forward.
        width: most tokens of a request.
        device: where the table of slots is.

    Attributes:
        bounds: [requests + 1] int32; request b has slots[bounds[b] : bounds[b + 1]].
        slots: [requests * width] int32.
    """

    def __init__(self, requests: int, width: int, device: torch.device) -> None:
        if requests * width >= 1 << 31:
            raise ValueError(
                f"{requests} requests of {width} tokens are more slots than int32 counts: lower "
                "max_running_requests or context_length"
            )
        self.bounds = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.slots = torch.zeros(requests * width, dtype=torch.int32, device=device)

    def fill(self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Lists the first ``lengths[b]`` slots of row ``rows[b]`` of ``table``, for all b.

        Reads no value on the host; on CUDA it is one launch, whose shape depends on the number of
        requests alone.

        Args:
            table: [*, width] int32 or int64.
            rows, lengths: [bs] int32 or int64.
        """
        if table.is_cuda:
            _launch(table, rows, lengths, self.bounds, self.slots)
            return
        bs = rows.shape[0]
        self.bounds[1 : bs + 1] = torch.cumsum(lengths, dim=0)
        listed = [table[int(row), : int(n)] for row, n in zip(rows, lengths, strict=True)]
        self.slots[: int(self.bounds[bs])] = torch.cat(listed).to(torch.int32)


def _launch(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    bounds: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    bs = rows.shape[0]
    blocks = min(-(-table.shape[1] // _BLOCK), _MOST_BLOCKS)
    _kernel()[(bs, blocks)](
        table,
        rows,
        lengths,
        bounds,
        slots,
        bs,
        table.stride(0),
        blocks,
        BLOCK=_BLOCK,
        REQUESTS=max(1 << (bs - 1).bit_length(), 16),
    )


@functools.cache
def _kernel() -> Any:
    """The Triton kernel; made at the first launch, since a CPU process need not load Triton."""
    from overstory.workers.seam.cuda_slots_kernel import list_slots

    return list_slots
