"""How much room one request needs per step. Pure arithmetic, in tokens and KV slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

ROW_SLACK = 4
"""Spare columns of a request's slot row, as SGLang keeps."""


@dataclass(frozen=True)
class StepLimits:
    """Sizes that every step of an engine stays within.

    Attributes:
        block_size: positions per draft block, root included; a step hands out at most this many
            tokens to a request (the longest path and the bonus).
        max_rows: target rows per request and step, root included; at least ``block_size``, since
            the drafter's block takes its slots from the same window.
        overlap: the scheduler knows a step's outcome only after it launched the next one.
        page_size: slots are handed out by whole pages of so many.
    """

    block_size: int
    max_rows: int
    overlap: bool
    page_size: int = 1

    def __post_init__(self) -> None:
        assert 2 <= self.block_size <= self.max_rows, (self.block_size, self.max_rows)
        assert self.page_size >= 1, self.page_size

    @property
    def max_nodes(self) -> int:
        """Largest tree, root not counted."""
        return self.max_rows - 1

    @property
    def ahead(self) -> int:
        """Slots beyond the tokens the scheduler knows of that the next step may touch.

        Under overlap one unprocessed step may have added ``block_size`` tokens already.
        """
        return self.max_rows + (self.block_size if self.overlap else 0)

    def short(self, committed: Sequence[int], allocated: Sequence[int]) -> bool:
        """Whether any of the requests has fewer slots than its next step may touch."""
        ahead = self.ahead
        return any(map(ahead.__gt__, map(sub, allocated, committed)))

    def reserved(self, committed: int, allocated: int) -> int:
        """Slots that a request of ``committed`` tokens should have before its next step.

        One that has ``ahead`` already gets none. One that has not gets as many as the scheduler
        has made sure of before each step (twice the rows): slots taken a few at a time by many
        requests in turn would leave each of them in runs of a few rows. The rest of the last page
        is the request's in any case.
        """
        if allocated >= committed + self.ahead:
            return allocated
        wanted = committed + 2 * self.max_rows
        return -(-wanted // self.page_size) * self.page_size


def row_headroom(max_rows: int, page_size: int = 1) -> int:
    """Columns that a request's slot row needs beyond the context length.

    SGLang's own figure (rows + 4) is below what DFLASH reserves at page size 1, so near the end of
    the context it writes into the neighbour's row and leaks slots (sglang#33579).
    `StepLimits.ahead` never exceeds twice the rows, and the last page is taken to its end.
    """
    return 2 * max_rows + ROW_SLACK + page_size - 1
