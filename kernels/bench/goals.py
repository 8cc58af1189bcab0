"""Measured against the goals: a table for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cases import FP8, GOALS
from .results import Row
from .small_cases import small_cases

_HEAD = """\
| op | bs | q | context | us | goal | reached | floor us | others, times slower |
|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class _Goal:
    shape: tuple[str, int, int, int, int]
    """(op, bs, q, heads, context)."""
    dtype: str
    words: str
    reached: Callable[[Row], bool]


def goal_table(rows: Sequence[Row]) -> str:
    """Markdown: our time, goal, floor, and how many times slower the others are."""
    lines = [_line(goal, rows) for goal in _goals()]
    return "\n".join([_HEAD, *(line for line in lines if line)])


def _goals() -> list[_Goal]:
    goals = []
    for case in GOALS:
        shape = (case.op, case.bs, case.q, case.heads, case.context)
        goals.append(_within(shape, case.kv_dtype, case.goal_us))
    for small in small_cases():
        shape = (small.op, small.bs, small.q, small.heads, small.context)
        if small.impl != "ours":
            continue
        if small.goal_of_copy is not None:
            goals.append(_part_of_copy(shape, small.dtype, small.goal_of_copy))
        else:
            goals.append(_within(shape, small.dtype, small.goal_us))
    return goals


def _within(shape: tuple[str, int, int, int, int], dtype: str, most_us: float | None) -> _Goal:
    if most_us is None:
        return _Goal(shape, dtype, "", lambda row: True)
    return _Goal(shape, dtype, f"{most_us:g} us", lambda row: row.us_median <= most_us)


def _part_of_copy(shape: tuple[str, int, int, int, int], dtype: str, part: float) -> _Goal:
    return _Goal(
        shape, dtype, f"{part:.0%} of copy", lambda row: row.floor_us / row.us_median >= part
    )


def _line(goal: _Goal, rows: Sequence[Row]) -> str:
    here = [r for r in rows if (r.op, r.bs, r.q, r.heads, r.context) == goal.shape]
    here = [r for r in here if r.kv_dtype != FP8]  # which has no goals
    if goal.dtype.startswith("bf16 "):  # one shape twice: what is drawn tells them apart
        here = [r for r in here if r.kv_dtype == goal.dtype]
    ours = next((r for r in here if r.impl == "ours"), None)
    if ours is None:
        return ""
    others = ", ".join(
        f"{r.impl} {r.us_median / ours.us_median:.1f}" for r in here if r.impl != "ours"
    )
    op, bs, q, _, context = goal.shape
    reached = "yes" if goal.reached(ours) else "no"
    kind = f"{op} ({goal.dtype})" if goal.dtype.startswith("bf16 ") else op
    return (
        f"| {kind} | {bs} | {q} | {context:,} | {ours.us_median:.1f} | {goal.words} "
        f"| {reached} | {ours.floor_us:.1f} | {others} |"
    )
