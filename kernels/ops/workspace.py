"""Scratch memory of ops that spread a row over several blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowWorkspace(NamedTuple):
    """Partial results of blocks, and the count of those that are done with a row.

    The last block of a row puts its count back to 0, so a workspace serves launch after launch.
    """

    scratch: torch.Tensor
    """[bytes] uint8, any content."""
    arrived: torch.Tensor
    """[rows] int32, 0 between launches."""

    @classmethod
    def empty(cls, device: torch.device, size: int, rows: int) -> RowWorkspace:
        """One of `size` bytes of scratch for `rows` rows."""
        return cls(
            torch.empty(size, dtype=torch.uint8, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )
