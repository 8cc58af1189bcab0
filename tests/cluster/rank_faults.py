"""Boundary commands with which tests break ranks on purpose.

Ranks load them by `OVERSTORY_RANK_EXTENSIONS=rank_faults:register`; no product code knows them.
"""

import contextlib
import resource
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from overstory.workers.commands import CommandContext, Register


def register(add: Register) -> None:
    """Called in each rank when it starts."""
    add("fault.swap_token", swap_token)
    add("fault.raise", raise_error)
    add("fault.exhaust", exhaust)


def swap_token(context: CommandContext, arguments: Mapping[str, Any]) -> int:
    """On one rank alone, another token more in the output of the first running request.

    Returns:
        batches launched when it was done.
    """
    scheduler = context.scheduler.raw
    batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch]
    requests = [req for batch in batches for req in batch.reqs]
    if context.rank == arguments["rank"]:
        requests[0].output_ids.append(requests[0].output_ids[-1] ^ 1)
    return context.scheduler.launched()


def raise_error(context: CommandContext, arguments: Mapping[str, Any]) -> None:
    """An error in the event loop of one rank; of torch's type `kind` if that is given."""
    if context.rank == arguments["rank"]:
        kind = getattr(torch, arguments["kind"]) if "kind" in arguments else RuntimeError
        raise kind(arguments["message"])


_HELD: list[bytearray] = []


def exhaust(context: CommandContext, arguments: Mapping[str, Any]) -> None:
    """On one rank no thread gets memory any more, not even a little, from now on; `then` it raises
    an error, hangs, or goes on until it wants some."""
    if context.rank != arguments["rank"]:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for piece in (1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 9, 1 << 6):
        with contextlib.suppress(MemoryError):
            while True:
                _HELD.append(bytearray(piece))
    if arguments["then"] == "raise":
        raise MemoryError("deliberate")
    if arguments["then"] == "hang":
        threading.Event().wait()
