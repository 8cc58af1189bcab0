"""What the rank slice measures, in the order in which it is worth having. Pure."""

from __future__ import annotations

from typing import NamedTuple

BATCHES = (1, 4, 16)
CONTEXTS = (1024, 8192, 65536, 200_000)
ROWS = (1, 9, 17, 33)
CHAIN_ROWS = 8
"""Of the drafter's block."""

POLICIES = {1: "plain", 8: "chain", 9: "tree-8", 17: "tree-16", 33: "tree-32"}
"""By rows per request."""


class Cell(NamedTuple):
    """A batch and its context; all of its rows are measured together, in one profile."""

    batch: int
    context: int
    rows: tuple[int, ...]
    backend: str


_FIRST = (9, 33, 17, CHAIN_ROWS, 1)


def grid() -> list[Cell]:
    """The issue's points: the long contexts of one request first, then Triton's, then the rest."""
    ours = [Cell(b, c, _FIRST, "overstory") for b, c in ((1, 65536), (1, 200_000))]
    ours.append(Cell(1, 65536, (9,), "triton"))
    order = (
        (1, 8192),
        (4, 65536),
        (1, 1024),
        (4, 8192),
        (16, 8192),
        (4, 1024),
        (16, 1024),
        (4, 200_000),
        (16, 65536),
        (16, 200_000),
    )
    ours += [Cell(b, c, _FIRST, "overstory") for b, c in order]
    triton = ((1, 8192), (1, 1024), (4, 8192), (4, 1024), (1, 200_000), (4, 65536), (4, 200_000))
    return ours + [Cell(b, c, (9,), "triton") for b, c in triton]


def levers() -> list[Cell]:
    """Where a way to run the experts is compared with another."""
    return [Cell(b, 1024, (1, 9, 17, 33), "overstory") for b in BATCHES]


def slots(cells: list[Cell], most_rows: int) -> int:
    """KV slots that the largest cell takes (slot 0 is SGLang's padding)."""
    return 1 + max(cell.batch * (cell.context + most_rows) for cell in cells)
