"""Rows of many KV tensors to or from a staging by one launch.

Layer by layer the host is the limit: 61 launches for 256 MiB take it longer than NVLink takes to
carry them (237 of 359 GB/s). NVRTC compiles it through CuPy, which carries hand-offs anyway.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

WORD = 16
"""Bytes that a thread moves at once."""
THREADS = 256
MOST_BLOCKS = 4096
"""Of one tensor; more words take turns."""
MOST_WORDS = 1 << 31
"""Of one tensor in a piece: they are counted in 32 bits."""

SOURCE = r"""
extern "C" __global__ void overstory_move_rows(
    const unsigned long long *tensors, const long long *slots, uint4 *staging,
    unsigned int count, unsigned int words, int taking_out)
{
    const unsigned int all = count * words;
    uint4 *rows = (uint4 *)tensors[blockIdx.y];
    uint4 *part = staging + (unsigned long long)blockIdx.y * all;
    unsigned int at = blockIdx.x * blockDim.x + threadIdx.x;
    for (; at < all; at += gridDim.x * blockDim.x) {
        const unsigned int row = at / words;
        uint4 *place = rows + slots[row] * words + (at - row * words);
        if (taking_out) *place = part[at];
        else part[at] = *place;
    }
}
"""


def suits(rows: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel can move these: uint8 or wider [slots, n], all of one row size."""
    first = rows[0]
    size = first.shape[1] * first.element_size()
    return size % WORD == 0 and all(
        one.device.type == "cuda"
        and one.device == first.device
        and one.data_ptr() % WORD == 0
        and one.shape[1] * one.element_size() == size
        for one in rows
    )


class RowKernel:
    """Moves rows of tensors of one row size.

    Args:
        rows: that `suits` agrees to; they keep their memory.
    """

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        self._device = rows[0].device
        self._words = rows[0].shape[1] * rows[0].element_size() // WORD
        self._tensors = torch.tensor([one.data_ptr() for one in rows], device=self._device)
        self._count = len(rows)

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> RowKernel | None:
        """None where it suits not or cannot be had, which is said once."""
        if not suits(rows) or _compiled(rows[0].device.index) is None:
            return None
        return cls(rows)

    def move(self, slots: torch.Tensor, staging: torch.Tensor, taking_out: bool) -> None:
        """Rows `slots` of all tensors to `staging`, tensor after tensor, or from there.

        On the current stream. Slots are not checked.

        Args:
            slots: int64 [n], on the device.
            staging: uint8 [tensors * n * row bytes], there too, 16-byte aligned.

        Raises:
            ValueError: a staging of another size or place, or a piece that is too large.
        """
        import cupy
        import numpy

        each = len(slots) * self._words
        if staging.numel() != self._count * each * WORD or staging.data_ptr() % WORD:
            raise ValueError(
                f"{len(slots)} rows of {self._count} tensors take {self._count * each * WORD} "
                f"aligned bytes, got {staging.numel()} at {staging.data_ptr():#x}"
            )
        if each >= MOST_WORDS:
            raise ValueError(f"{len(slots)} rows are too many for one piece")
        if not each:
            return
        slots = slots.contiguous()
        compiled = _compiled(self._device.index)
        assert compiled is not None, "`of` has compiled it"
        stream = torch.cuda.current_stream(self._device)
        blocks = min(MOST_BLOCKS, -(-each // THREADS))
        with (
            cupy.cuda.Device(self._device.index),
            cupy.cuda.ExternalStream(stream.cuda_stream, self._device.index),
        ):
            compiled(
                (blocks, self._count),
                (THREADS,),
                (
                    numpy.uint64(self._tensors.data_ptr()),
                    numpy.uint64(slots.data_ptr()),
                    numpy.uint64(staging.data_ptr()),
                    numpy.uint32(len(slots)),
                    numpy.uint32(self._words),
                    numpy.int32(taking_out),
                ),
            )
        slots.record_stream(stream)


def prepare(device: torch.device) -> None:
    """Compiles the kernel for a GPU, so that no boundary waits for it. From any thread."""
    _compiled(device.index)


@functools.cache
def _compiled(device: int) -> Any:
    """The kernel for a GPU; None, said once, where NVRTC or CuPy does not do it."""
    try:
        import cupy

        with cupy.cuda.Device(device):
            kernel = cupy.RawKernel(SOURCE, "overstory_move_rows")
            kernel.compile()
    except Exception as error:
        logger.warning("KV rows are moved tensor by tensor, which is slower: %s", error)
        return None
    return kernel
