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

CHUNKS = (1, 2, 4, 8, 16, 32)
"""Smallest shares of a block, in granules of 16 keys."""
BLOCKS_PER_SM = (1, 2)


def sweep_jobs(cases: Sequence[AttentionCase]) -> list[Job]:
    """Case by case, every schedule; the row's `impl` names it."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    schedules = [Schedule(per_sm * count, chunk) for per_sm in BLOCKS_PER_SM for chunk in CHUNKS]
    variants = [
        Implementation(
            f"ours_blocks{schedule.blocks}_chunk{schedule.min_chunk}",
            functools.partial(ours, schedule=schedule),
            lambda case: True,
            True,
        )
        for schedule in schedules
    ]
    return [job for case in cases for job in attention_jobs([case], variants)]
