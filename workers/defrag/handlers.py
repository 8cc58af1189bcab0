"""Boundary commands of defragmentation: `slot_picture` and `relocate`.

A picture is too large for the reports that every rank sends all the time: rank 0 keeps the last one
until it is fetched.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from overstory.orchestrator.defrag_plan import (
    MOST_ROWS,
    Plan,
    PlanRefused,
    SlotPicture,
    check_plan,
    measure,
)

if TYPE_CHECKING:
    from overstory.workers.commands import CommandContext, CommandTable


class PictureShelf:
    """The last picture of this rank, under the key that it was asked for with."""

    def __init__(self) -> None:
        self._key = ""
        self._picture: SlotPicture | None = None

    def put(self, key: str, picture: SlotPicture) -> None:
        """Keeps a picture in place of the one before."""
        self._key, self._picture = key, picture

    def take(self, key: str) -> SlotPicture:
        """Hands the picture out, once.

        Raises:
            ValueError: another one was asked for since, or it was fetched already.
        """
        if self._picture is None or key != self._key:
            raise ValueError(f"no slot picture {key!r} here: another was taken since")
        picture, self._picture = self._picture, None
        return picture


SHELF = PictureShelf()


def _none_held() -> int:
    return 0


def register(table: CommandTable, held: Callable[[], int]) -> None:
    """Adds both commands; `held` counts hand-offs of KV that this rank has a part in."""
    table.register("slot_picture", slot_picture)
    table.register("relocate", functools.partial(relocate, held=held))


def slot_picture(context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Audits this rank's slots; rank 0 takes a picture of them, which the others' equal.

    Args:
        context: of the rank.
        arguments: `key`, to fetch the picture by; `strict`: look for unknown holders too.

    Returns:
        `forwards`; on rank 0 `fragmentation`; `refused` with the reason where slots cannot move.
    """
    from overstory.workers.defrag.audit import SlotsAstray, audit
    from overstory.workers.defrag.holders import unsupported
    from overstory.workers.defrag.relocate import take_picture

    scheduler = context.scheduler.raw
    answer: dict[str, Any] = {"forwards": context.scheduler.launched()}
    if reason := unsupported(scheduler):
        return {**answer, "refused": reason}
    try:
        audit(scheduler, look_for_unknown=bool(arguments.get("strict")))
    except SlotsAstray as astray:
        return {**answer, "refused": str(astray)}
    if context.rank != 0:
        return answer
    picture = take_picture(scheduler)
    SHELF.put(arguments["key"], picture)
    return {**answer, "fragmentation": dataclasses.asdict(measure(picture))}


def relocate(
    context: CommandContext, arguments: Mapping[str, Any], held: Callable[[], int] = _none_held
) -> dict[str, Any]:
    """Carries out `plan`, on every rank alike: what may differ between ranks is not looked at here.

    Nothing moves while KV goes to another replica or comes from one: a thread reads or writes those
    rows by the slot numbers that they had when they were held or reserved, between boundaries, so
    no pass can rewrite them. That begins and ends at boundaries, so that all ranks refuse alike.

    A plan is judged here and not when it is granted: the lease that brings it may be granted anew,
    by a controller that had to attach again and has another epoch now.

    Returns:
        the fields of `PassDone` and `forwards`; or `refused` with the reason, nothing changed.

    Raises:
        SlotsAstray: slot numbers do not add up afterwards: the rank must not go on.
    """
    answer: dict[str, Any] = {"forwards": context.scheduler.launched()}
    if given := held():
        return {
            **answer,
            "refused": f"KV is being handed over between replicas ({given} at present): its rows "
            "must stay where they are. Try again in some seconds",
        }
    from overstory.workers.defrag.relocate import CannotRelocate
    from overstory.workers.defrag.relocate import relocate as carry_out

    plan, scheduler = arguments.get("plan"), context.scheduler.raw
    try:
        if not isinstance(plan, Plan):
            raise PlanRefused(f"relocate wants a plan, got {type(plan).__name__}")
        size = int(scheduler.token_to_kv_pool_allocator.size)
        check_plan(plan, context.epoch, size, MOST_ROWS)
        done = carry_out(scheduler, plan)
    except (CannotRelocate, PlanRefused) as reason:
        return {**answer, "refused": str(reason)}
    return {**answer, **dataclasses.asdict(done)}
