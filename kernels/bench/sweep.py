"""Our tunables over shapes: which schedule is fastest where."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from overstory.kernels.ops import Schedule

from .cases import AttentionCase
from .implementations import Implementation
from .measure import Job, attention_jobs
from .ours import ours

CHUNKS = (0, 1, 2, 4, 8, 16, 32)
"""Smallest shares of a block, in granules of 16 keys; 0: what the kernel makes of the lengths."""
BLOCKS_PER_SM = (1, 2)
_QUICK = {("verify_attention", 1, 9), ("verify_attention", 4, 9), ("decode_attention", 1, 1)}
"""(op, bs, q) of the quick sweep: where the share matters most."""


def sweep_jobs(cases: Sequence[AttentionCase], quick: bool) -> list[Job]:
    """Case by case, every schedule; the row's `impl` names it.

    Args:
        cases: what to sweep over.
        quick: fewer of both.
    """
    count = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = [case for case in cases if not quick or (case.op, case.bs, case.q) in _QUICK]
    schedules = [
        Schedule(per_sm * count, chunk)
        for per_sm in BLOCKS_PER_SM[: 1 if quick else None]
        for chunk in CHUNKS[: 6 if quick else None]
    ]
    variants = [
        Implementation(
            f"ours_blocks{schedule.blocks}_chunk{schedule.min_chunk}",
            functools.partial(ours, schedule=schedule),
            lambda case: True,
            True,
        )
        for schedule in schedules
    ]
    return [job for case in chosen for job in attention_jobs([case], variants)]
