"""Boundary commands: acts that all ranks of a replica carry out at the same boundary.

A handler runs on every rank, in the loop's thread, between two iterations, with no collective in
flight. It must act alike on all ranks. An error in a handler ends the rank: half a command, done
on some ranks only, would be worse.

More handlers come by `OVERSTORY_RANK_EXTENSIONS` (comma-separated `module:function`, each called
with `register` when the rank starts) or by the modules that own them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overstory.workers.scheduler_view import SglangScheduler

EXTENSIONS_VARIABLE = "OVERSTORY_RANK_EXTENSIONS"


@dataclass(frozen=True)
class CommandContext:
    """What a handler may use; `epoch` is that of the controller whose command it is."""

    rank: int
    scheduler: SglangScheduler
    epoch: int = 0


Handler = Callable[[CommandContext, Mapping[str, Any]], Any]
Register = Callable[[str, Handler], None]


class CommandTable:
    """Handlers by name."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {"standing": standing}

    def register(self, name: str, handler: Handler) -> None:
        """Adds a handler.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._handlers:
            raise ValueError(f"boundary command {name!r} has a handler already")
        self._handlers[name] = handler

    def load_extensions(self, names: str) -> None:
        """Calls each `module:function` of a comma-separated list with `register`.

        Raises:
            ValueError: an entry is not `module:function`.
        """
        for name in filter(None, (part.strip() for part in names.split(","))):
            module, colon, function = name.partition(":")
            if not colon:
                raise ValueError(f"{EXTENSIONS_VARIABLE}: {name!r} is not module:function")
            getattr(importlib.import_module(module), function)(self.register)

    def check(self, name: str) -> None:
        """Refuses a name that has no handler (ValueError)."""
        if name not in self._handlers:
            known = ", ".join(sorted(self._handlers))
            raise ValueError(f"unknown boundary command {name!r}; known: {known}")

    def carry_out(self, name: str, context: CommandContext, arguments: Mapping[str, Any]) -> Any:
        """Runs the handler; its result goes into the rank's report."""
        return self._handlers[name](context, arguments)


def standing(context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Where this rank stands: launched batches, each running request's output, free KV slots."""
    scheduler = context.scheduler.raw
    requests = list(scheduler.running_batch.reqs)
    if scheduler.last_batch is not None:
        requests += [req for req in scheduler.last_batch.reqs if req not in requests]
    return {
        "forwards": context.scheduler.launched(),
        "requests": {
            req.rid: [int(token) for token in req.output_ids]
            for req in requests
            if not req.finished()
        },
        "free_slots": context.scheduler.load()["free_slots"],
    }
