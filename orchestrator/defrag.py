"""Defragmentation of one replica: picture, plan, pass, and again until it is good or enough.

Runs inside the controller. What it needs of it is `Steering`; the plans are
`overstory.orchestrator.defrag_plan`'s, the ranks' part is `overstory.workers.defrag`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from overstory.orchestrator.defrag_plan import (
    LONG_RUN,
    MOST_ROWS,
    ROWS_PER_PASS,
    Fragmentation,
    Plan,
    SlotPicture,
    check_plan,
    measure,
    no_moves,
    plan_moves,
)
from overstory.orchestrator.errors import UserFault
from overstory.orchestrator.lease import Command

FEWEST_ROWS = 64
"""Rows that a pass may move however long the pauses are."""

PASSES = 8
PAUSE_MS = 20.0


class OrderFault(UserFault, ValueError):
    """An order that makes no sense: names the setting, what it got and what it wants."""


class DefragRefused(ValueError):
    """A replica that cannot be defragmented now, or a plan that it does not take. Says why."""


class RanksMovedApart(RuntimeError):
    """Ranks report different results of the same pass; `rank` is the one to blame."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__(what)
        self.rank = rank


@dataclass(frozen=True)
class DefragOrder:
    """What to do.

    Attributes:
        dry_run: only plan the first pass.
        rows: rows that the first pass may move; later ones go by the pause of those before.
        passes: at most so many.
        pause_ms: longest that a pass should keep the ranks from stepping.
        long_run: rows worth moving to remove one break, see `plan_moves`.
        below: do nothing if the contiguous share is not below; 1.0 does what there is to do.
    """

    dry_run: bool = False
    rows: int = ROWS_PER_PASS
    passes: int = PASSES
    pause_ms: float = PAUSE_MS
    long_run: int = LONG_RUN
    below: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MOST_ROWS:
            raise OrderFault(f"rows: got {self.rows}, wanted 1..{MOST_ROWS}")
        if self.passes < 1:
            raise OrderFault(f"passes: got {self.passes}, wanted at least 1")
        if not self.pause_ms > 0:
            raise OrderFault(f"pause_ms: got {self.pause_ms}, wanted above 0")
        if self.long_run < 1:
            raise OrderFault(f"long_run: got {self.long_run}, wanted at least 1")
        if not 0 <= self.below <= 1:
            raise OrderFault(f"below: got {self.below}, wanted a share, 0..1")


class Steering(Protocol):
    """The controller, as seen from here."""

    def epoch_under_lease(self, replica: str) -> int:
        """Its epoch at the replica; `DefragRefused` if it does not steer it."""

    async def carry_out(self, replica: str, command: Command) -> Mapping[int, Any]:
        """Results of a boundary command by rank."""

    async def fetch_picture(self, replica: str, key: str) -> SlotPicture:
        """What rank 0 took under `key`."""

    def pictured(self, replica: str, seen: Fragmentation) -> None:
        """Keeps the figures for the status."""


async def defragment(steering: Steering, replica: str, order: DefragOrder) -> dict[str, Any]:
    """Passes until nothing is worth moving, or as many as ordered.

    Returns:
        JSON-able: `before` and `after` (`Fragmentation`); `passes`, each with `planned` and
        `rows` (copied), `plan` (digest), `pause_ms`, `copy_ms`; `next`, the plan that would come
        (`rows`, `plan`, `bytes`, `after`, and with `dry_run` its `moves` as pairs), None if there
        is nothing worth moving.

    Raises:
        DefragRefused: not steered, slots of a kind that cannot move, or a plan refused.
        RanksMovedApart: see there.
        TimeoutError: a command was not carried out everywhere in time.
    """
    picture = await _look(steering, replica, strict=True)
    before, rows = measure(picture), order.rows
    passes: list[dict[str, Any]] = []
    while True:
        plan = await _plan(steering, replica, picture, rows, order)
        if plan.rows == 0 or order.dry_run or len(passes) == order.passes:
            break
        done = await _pass(steering, replica, plan)
        passes.append({"planned": plan.rows, **done})
        rows = rows_for_pause(rows, done["pause_ms"], order.pause_ms)
        picture = await _look(steering, replica, strict=False)
    return {
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(measure(picture)),
        "passes": passes,
        "next": _described(plan, picture, order.dry_run) if plan.rows else None,
    }


def rows_for_pause(rows: int, pause_ms: float, wanted_ms: float) -> int:
    """Rows of the next pass, after one of `rows` that took `pause_ms`: at most twice as many."""
    factor = min(2.0, wanted_ms / max(pause_ms, 1e-3))
    return max(min(rows, FEWEST_ROWS), min(MOST_ROWS, int(rows * factor)))


async def _look(steering: Steering, replica: str, strict: bool) -> SlotPicture:
    steering.epoch_under_lease(replica)
    key = uuid.uuid4().hex
    command = Command("slot_picture", {"key": key, "strict": strict}, drain=True)
    _unless_refused(replica, await steering.carry_out(replica, command))
    picture = await steering.fetch_picture(replica, key)
    steering.pictured(replica, measure(picture))
    return picture


async def _plan(
    steering: Steering, replica: str, picture: SlotPicture, rows: int, order: DefragOrder
) -> Plan:
    epoch = steering.epoch_under_lease(replica)
    if order.below < 1.0 and measure(picture).contiguous_share >= order.below:
        return no_moves(picture, epoch)
    # In a thread: a large pool takes some hundred ms, and the event loop grants leases.
    return await asyncio.to_thread(plan_moves, picture, epoch, rows, order.long_run)


async def _pass(steering: Steering, replica: str, plan: Plan) -> dict[str, Any]:
    check_plan(plan, steering.epoch_under_lease(replica), plan.size, MOST_ROWS)
    results = await steering.carry_out(replica, Command("relocate", {"plan": plan}, drain=True))
    _unless_refused(replica, results)
    alike = {rank: (r["plan"], r["state"], r["rows"]) for rank, r in results.items()}
    if set(alike.values()) != {alike[0]} or alike[0][0] != plan.digest:
        odd = [rank for rank, seen in alike.items() if seen != alike[0]]
        told = f"replica {replica}, plan {plan.digest}: ranks report {alike} (plan, state, rows)"
        raise RanksMovedApart(told, odd[-1] if odd else 0)
    slowest = max(results.values(), key=lambda result: result["pause_ms"])
    return {name: slowest[name] for name in ("plan", "rows", "pause_ms", "copy_ms")}


def _unless_refused(replica: str, results: Mapping[int, Any]) -> None:
    for rank, result in sorted(results.items()):
        if "refused" in result:
            raise DefragRefused(f"replica {replica}, rank {rank}: {result['refused']}")


def _described(plan: Plan, picture: SlotPicture, with_moves: bool) -> dict[str, Any]:
    described = {
        "rows": plan.rows,
        "bytes": plan.rows * picture.row_bytes,
        "plan": plan.digest,
        "after": dataclasses.asdict(plan.after),
    }
    if with_moves:
        described["moves"] = list(zip(plan.sources, plan.targets, strict=True))
    return described
