"""Attention of blocks whose rows all see the same keys, the keys split over the device.

The rows that share a head of the keys are one small matrix, and a key is read once for all of them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

MOST_PARTS = 64
"""Most parts that a request's keys are cut into."""

MOST_LINES = 128
"""Most rows of a block times query heads of a key head: larger matrices leave the registers."""

_KEYS = 64
"""Keys of a step of the kernel's loop."""


def block_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention of uniform blocks: every row of a request sees all keys of the request.

    Args:
        q: [bs * rows, heads, head_dim].
        keys, values: [slots of the pool, key heads, head_dim or v_head_dim], of q's type.
        bounds: [bs + 1] int32; request b has the keys slots[bounds[b] : bounds[b + 1]], one at
            least.
        slots: int32 or int64.
        scale: of the scores.

    Returns:
        [bs * rows, heads, v_head_dim], of q's type.
    """
    if q.is_cuda:
        requests = bounds.shape[0] - 1
        parts = _parts(q.device, requests * keys.shape[1])
        return split_attention(q, keys, values, bounds, slots, scale, parts)
    rows = q.shape[0] // (bounds.shape[0] - 1)
    group = q.shape[1] // keys.shape[1]
    blocks = []
    for query, begin, end in zip(q.split(rows), bounds[:-1], bounds[1:], strict=True):
        mine = slots[int(begin) : int(end)].long()
        key, value = (part[mine].float().repeat_interleave(group, dim=1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
        blocks.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value))
    return torch.cat(blocks).to(q.dtype)


def split_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bounds: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    parts: int,
) -> torch.Tensor:
    """`block_attention` by the Triton kernels, the keys cut into ``parts``, a power of two."""
    (count, heads, dim), key_heads = q.shape, keys.shape[1]
    requests, value_dim, group = bounds.shape[0] - 1, values.shape[2], heads // keys.shape[1]
    rows = count // requests
    assert q.stride(2) == keys.stride(2) == values.stride(2) == 1
    # A stride of 0 would have the kernel read what lies behind.
    assert bounds.is_contiguous()
    assert slots.is_contiguous()
    out = q.new_empty(count, heads, value_dim)
    partial = q.new_empty((count, heads, parts, value_dim), dtype=torch.float32)
    weights = q.new_empty((count, heads, parts), dtype=torch.float32)
    kernels = _kernels()
    value_room = _power_of_two(value_dim)
    kernels.block_parts[(requests, key_heads, parts)](
        q,
        keys,
        values,
        bounds,
        slots,
        partial,
        weights,
        scale / math.log(2.0),
        *q.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        ROWS=rows,
        GROUP=group,
        LINES=max(_power_of_two(rows * group), 16),
        DIM=dim,
        DIM_ROOM=max(_power_of_two(dim), 16),
        VALUE_DIM=value_dim,
        VALUE_ROOM=max(value_room, 16),
        KEYS=_KEYS,
        PARTS=parts,
        PRECISION="ieee",
    )
    kernels.join_parts[(count, heads)](
        partial,
        weights,
        out,
        *out.stride()[:2],
        PARTS=parts,
        VALUE_DIM=value_dim,
        VALUE_ROOM=value_room,
    )
    return out


def _parts(device: torch.device, programs: int) -> int:
    """Parts of a request's keys, a power of two: some four programs for each multiprocessor."""
    wanted = -(-4 * _multiprocessors(device) // programs)
    return min(_power_of_two(max(wanted, 1)), MOST_PARTS)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _power_of_two(value: int) -> int:
    """The smallest that is not less."""
    return 1 << (value - 1).bit_length()


@functools.cache
def _kernels() -> Any:
    """The Triton kernels; made at the first launch, since a CPU process need not load Triton."""
    from overstory.workers.seam import cuda_block_kernel

    return cuda_block_kernel
