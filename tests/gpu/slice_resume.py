"""What an earlier run of a session has measured already. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slice_points import Cell

Point = Mapping[str, Any]


def rows_left(cell: Cell, points: Iterable[Point]) -> tuple[int, ...]:
    """Of a cell's rows those without a point.

    Args:
        cell: what is to be measured.
        points: what `rank_slice.py` has written.
    """
    there = {point["rows"] for point in points if _of(point, cell)}
    return tuple(rows for rows in cell.rows if rows not in there)


def stages_left(cell: Cell, points: Iterable[Point]) -> bool:
    """Whether the cell is to be profiled and one of its points has no stages."""
    there = [point for point in points if _of(point, cell)]
    return cell.profiled and not all(point.get("stages_us") for point in there)


def cells_left(cells: Iterable[Cell], points: Sequence[Point]) -> list[Cell]:
    """Those of which something is left to measure, in order."""
    return [cell for cell in cells if rows_left(cell, points) or stages_left(cell, points)]


def counts_left(
    wanted: Iterable[tuple[float, int, int]], found: Iterable[Point]
) -> list[tuple[float, int, int]]:
    """Triples (alike, batch, rows) that are not among ``found``, in order."""
    there = {(row["alike"], row["batch"], row["rows"]) for row in found}
    return [triple for triple in wanted if triple not in there]


def _of(point: Point, cell: Cell) -> bool:
    # A point before any profile is another measurement than one after.
    return all(point[name] == getattr(cell, name) for name in Cell._fields if name != "rows")
