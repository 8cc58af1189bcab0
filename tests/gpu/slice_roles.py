"""The roles of a rank slice session: an engine each, and what is measured with it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slice_modules import SLOW
from slice_points import (
    Cell,
    again,
    against_triton,
    both_ways,
    few,
    goals,
    grid,
    levers,
    longest,
    rest,
    triton,
)
from slice_resume import cells_left, counts_left

ONE_REQUEST = tuple((1, c) for c in (65536, 1024, 200_000, 8192))
AUTO = (*ONE_REQUEST, *((b, c) for c in (1024, 8192, 65536) for b in (4, 16)))
"""Batch and context of the points of the automatic policy. Of several requests the shortest steps
come first: the many steps of learning are those of the first point of a batch."""
LONG_FIRST = (
    *((b, c) for b in (16, 4) for c in (1024, 65536)),
    *ONE_REQUEST,
    *((b, 8192) for b in (4, 16)),
)
"""The same points, for a session that may be cut: those come late otherwise that take longest."""


@dataclass(frozen=True)
class Role:
    """An engine and what is measured with it.

    Attributes:
        layers: None: all.
        kv_sets: see `slice_engine`.
        fields: further server arguments.
        cells: what is measured.
        own_draft: the drafter's attention is ours; else SGLang's Triton.
        counts: experts touched are counted, and steps of rows that are much alike timed.
        early: small, so built before any is measured.
        results: without cells and automatic policy: what else the role finds, by name.
        auto: with these drafters (`slice_auto.SURE`) the automatic policy is run against each fixed
            one, at the points ``auto_at``, in their order.
        parts: steps of these are timed as one graph and in parts.
    """

    layers: int | None
    kv_sets: int
    fields: dict[str, Any]
    cells: tuple[Cell, ...]
    own_draft: bool = True
    counts: bool = False
    early: bool = False
    results: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    auto_at: tuple[tuple[int, int], ...] = AUTO
    parts: tuple[Cell, ...] = ()


ROLES = {
    "slice": Role(None, 4, {}, tuple(grid()), counts=True),
    "slice_old_draft": Role(None, 4, {}, tuple(grid()), own_draft=False, counts=True),
    "slice_triton": Role(
        None, 4, {"moe_runner_backend": "triton"}, tuple(grid()), own_draft=False, counts=True
    ),
    "again": Role(None, 4, {}, (*again(), *triton())),
    "auto": Role(None, 4, {}, (), auto=("fits badly", "fits")),
    "auto_fits": Role(None, 4, {}, (), auto=("fits",), auto_at=LONG_FIRST),
    "auto_badly": Role(None, 4, {}, (), auto=("fits badly",), auto_at=LONG_FIRST),
    "parts": Role(None, 4, {}, (), parts=tuple(both_ways())),
    "rest": Role(None, 4, {}, (*goals(), *rest()), auto=("fits badly",)),
    "few_long": Role(4, 0, {}, tuple(longest()), early=True),
    "moe_triton": Role(4, 0, {"moe_runner_backend": "triton"}, tuple(levers()), early=True),
    "moe_fused": Role(4, 0, {"enforce_shared_experts_fusion": True}, tuple(levers()), early=True),
    "moe_marlin": Role(4, 0, {}, tuple(levers()), counts=True, early=True),
    "few": Role(4, 0, {}, tuple(few()), early=True),
    "triton": Role(4, 0, {}, tuple(against_triton()), early=True),
    "long": Role(3, 0, {}, (), early=True, results=("long", "far_slots")),
    "prefill": Role(
        None,
        0,
        {"max_total_tokens": 210_000, "max_running_requests": 4},
        (),
        results=("prefill",),
    ),
}
ALIKE = (0.0, 0.5, 0.9)
COUNTED = tuple((a, b, r) for a in ALIKE for b in (1, 4, 16) for r in (1, 9, 17, 33))
"""Steps whose experts are counted: share of the rows that is alike, batch, rows of each."""
SIMILAR = tuple((a, b, r) for a in ALIKE[1:] for b in (1, 4) for r in (9, 33))
"""Steps of rows that are alike which are timed."""


def auto_left(role: Role, found: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Drafter, batch and context of the role's points that are not among ``found``, in order."""
    there = {(row["drafter"], row["batch"], row["context"]) for row in found}
    wanted = [(kind, batch, context) for kind in role.auto for batch, context in role.auto_at]
    return [point for point in wanted if point not in there]


def needed_s(cell: Cell, layers: int) -> float:
    """Seconds that a cell may need: Triton's steps take seconds with all 61 layers."""
    return 3 + (cell.backend == "triton") * (2 + cell.batch * cell.context / 12_000 * layers / 61)


def auto_needed_s(batch: int, context: int, learnt: bool) -> float:
    """Seconds that a point of the automatic policy may need; 16 requests of 65,536 tokens took 16,
    200 steps of 62 ms among them, of 1,024 tokens 12 where nothing was ``learnt`` at that batch."""
    return 8 + 5 * (not learnt) + batch * context / 104_858


def largest(role: Role) -> list[Cell]:
    """What the role's engine must hold."""
    auto = [Cell(batch, context, (), "overstory") for batch, context in role.auto_at if role.auto]
    return [*role.cells, *role.parts, *auto]


def why_not(takes_s: float, left_s: float, slots: int, room: int) -> str | None:
    """Why something is not measured, if so.

    Args:
        takes_s, left_s: seconds that it may need, and those that the role has left.
        slots, room: KV slots that it takes, and those of the pool.
    """
    if slots > room:
        return f"takes {slots} KV slots of {room}"
    if left_s < takes_s:
        return f"may take {takes_s:.1f} s, {max(left_s, 0.0):.1f} s are left"
    return None


def is_complete(role: Role, content: Mapping[str, Any], cells: Sequence[Cell]) -> bool:
    """Whether an earlier run has measured all of a role, as ``content`` has it."""
    if auto_left(role, content.get("auto", [])):
        return False
    if cells_left(role.parts, content.get("parts", [])):
        return False
    if role.results:
        return set(role.results) <= content.keys()
    counted = not role.counts or not counts_left(COUNTED, content.get("experts", []))
    similar = role.layers is not None or not counts_left(SIMILAR, content.get("alike", []))
    counted = counted and (not role.counts or similar)
    return counted and not cells_left(cells, content.get("points", []))


def not_built(out: Path, role: Role) -> str | None:
    """Why a role cannot run: the module of its experts would take minutes to compile. What
    `slice_modules.py check` found lies beside ``out``, or nothing where it was not asked."""
    file = out.parent / "modules.json"
    if role.fields.get("moe_runner_backend") == "triton" or not file.exists():
        return None
    missing = json.loads(file.read_text())["missing"]
    slow = [f"{name}: {why}" for name, why in missing.items() if SLOW in name]
    return f"all: SGLang would compile for minutes: {slow[0]}" if slow else None
