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
    """A batch and its context; all of its rows are measured together, in one profile if at all."""

    batch: int
    context: int
    rows: tuple[int, ...]
    backend: str
    profiled: bool = True


_OTHERS = (33, 17, 1, CHAIN_ROWS)


def grid() -> list[Cell]:
    """The issue's points: one request's contexts, before any profile and by stage, then Triton's.

    What is left of Triton's comes last.
    """
    lengths = (65536, 200_000, 8192, 1024)
    ours = [Cell(1, c, (9,), "overstory", profiled=False) for c in lengths]
    ours += [Cell(1, c, (9,), "overstory") for c in lengths]
    ours.append(Cell(1, 65536, (9,), "triton"))
    ours += [Cell(1, c, _OTHERS, "overstory") for c in lengths]
    order = [(b, c) for c in (65536, 8192, 1024, 200_000) for b in (4, 16)]
    ours += [Cell(b, c, (9, *_OTHERS), "overstory") for b, c in order]
    return [*ours, *triton(), Cell(4, 200_000, (9,), "triton")]


def triton() -> list[Cell]:
    """SGLang's Triton attention with all layers but at the goal's point, shortest steps first."""
    where = ((1, 8192), (1, 1024), (4, 8192), (4, 1024), (1, 200_000), (4, 65536))
    return [Cell(b, c, (9,), "triton") for b, c in where]


def few() -> list[Cell]:
    """Points that an engine of few layers measures, where all of them would not fit or take too
    long: the longest contexts, and each where SGLang's Triton attention is compared."""
    ours = longest()
    both = [(b, c) for b in (1, 4) for c in CONTEXTS]
    ours += [Cell(b, c, (9,), "overstory") for b, c in both if (b, c) != (4, 200_000)]
    return ours + [Cell(b, c, (9,), "triton") for b, c in both]


def against_triton() -> list[Cell]:
    """SGLang's Triton attention beside ours, in an engine of few layers; first the goal's point."""
    both = [(b, c) for b in (1, 4) for c in (65536, 8192, 200_000, 1024)]
    return [Cell(b, c, (9,), kind) for b, c in both for kind in ("overstory", "triton")]


def again() -> list[Cell]:
    """The points of the goals and those around them: after a change of the attention."""
    lengths = (65536, 200_000, 8192, 1024)
    ours = [Cell(1, c, (9,), "overstory", profiled=False) for c in lengths]
    ours += [Cell(1, c, (9, 8, 17, 33, 1), "overstory") for c in lengths]
    return ours + [Cell(b, c, (9, 8, 1), "overstory") for c in (65536, 8192) for b in (4, 16)]


def goals() -> list[Cell]:
    """The points of the attention's goals."""
    where = [(p, c) for p in (False, True) for c in (65536, 200_000)]
    return [Cell(1, context, (9,), "overstory", profiled) for profiled, context in where]


def rest() -> list[Cell]:
    """What `again` leaves of several requests up to 65k: with it all of those are of one commit."""
    short = [Cell(b, 1024, (9, *_OTHERS), "overstory") for b in (16, 4)]
    return short + [Cell(b, c, (17, 33), "overstory") for c in (65536, 8192) for b in (16, 4)]


def longest() -> list[Cell]:
    """Several requests of 200k, whose KV of all layers does not fit."""
    return [Cell(b, 200_000, (9, *_OTHERS), "overstory") for b in (4, 16)]


def levers() -> list[Cell]:
    """Where a way to run the experts is compared with another."""
    return [Cell(b, 1024, (1, 9, 17, 33), "overstory") for b in BATCHES]


def both_ways() -> list[Cell]:
    """Where steps are timed as one graph and in parts, as those of several ranks run."""
    where = ((1, 1024), (1, 65536), (1, 200_000), (4, 8192), (16, 8192))
    return [Cell(b, c, (1, CHAIN_ROWS, 9), "overstory", profiled=False) for b, c in where]


def slots(cells: list[Cell], most_rows: int) -> int:
    """KV slots that the largest cell takes (slot 0 is SGLang's padding)."""
    return 1 + max(cell.batch * (cell.context + most_rows) for cell in cells)
