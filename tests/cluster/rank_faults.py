"""Boundary commands with which tests break ranks on purpose.

Ranks load them by `OVERSTORY_RANK_EXTENSIONS=rank_faults:register`; no product code knows them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from overstory.workers.commands import CommandContext, Register


def register(add: Register) -> None:
    """Called in each rank when it starts."""
    add("fault.swap_token", swap_token)
    add("fault.raise", raise_error)


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
