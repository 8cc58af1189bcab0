"""Scratch memory of ops that spread a row over several blocks."""

from __future__ import annotations

from collections.abc import Callable
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

    @classmethod
    def up_to(cls, device: torch.device, rows: int, size_of: Callable[[int], int]) -> RowWorkspace:
        """One for any number of rows up to `rows`, of which so many need `size_of(number)` bytes.

        Fewer rows are split finer: the largest need is not that of the most rows.
        """
        return cls.empty(device, max(map(size_of, range(1, rows + 1)), default=0), rows)

    def check_room(self, size: int, rows: int, columns: int) -> None:
        """Raises ValueError where it has not `size` bytes or counts for `rows` rows."""
        if self.scratch.numel() < size or self.arrived.numel() < rows:
            raise ValueError(f"the workspace is for fewer rows than {rows} of {columns} columns")
