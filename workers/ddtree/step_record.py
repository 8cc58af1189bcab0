"""Times of a step's stages, and what a step did, kept until its outcome is known on the host."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overstory.workers.step_stats import StepStats

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from overstory.kernels.reference import Tree


class StageClock:
    """Nanoseconds between marks. On an accelerator: of launching, not of running."""

    def __init__(self) -> None:
        self.stages: dict[str, int] = {}
        self._last = time.perf_counter_ns()

    def mark(self, stage: str) -> None:
        """What has passed since the last mark was ``stage``."""
        now = time.perf_counter_ns()
        self.stages[stage] = self.stages.get(stage, 0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class StepRecord:
    """A verify step whose acceptance the scheduler has not read yet."""

    policy: str
    tree: Tree
    requests: tuple[Req, ...]
    stage_ns: dict[str, int] = field(default_factory=dict)


class PendingSteps:
    """Steps in the order they ran; the scheduler settles them in the same order."""

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._pending: deque[StepRecord] = deque()

    def add(self, record: StepRecord) -> None:
        """A step has been launched."""
        self._pending.append(record)

    def settle(self, accepted: list[int]) -> None:
        """Count the oldest step: ``accepted`` drafted tokens per request.

        Requests that had ended before (overlap scheduling runs one step too many) and tokens beyond
        a request's limit are not counted.
        """
        record = self._pending.popleft()
        assert len(accepted) == len(record.requests), "steps settled out of order"
        deepest = record.tree.depths.amax(dim=1).tolist()
        running, tokens = 0, 0
        offered = [0] * max(deepest, default=0)
        reached = [0] * len(offered)
        for req, drafted, depth in zip(record.requests, accepted, deepest, strict=True):
            if req.finished() or req.is_retracted:
                continue
            running += 1
            room = req.sampling_params.max_new_tokens - len(req.output_ids)
            tokens += min(drafted + 1, room)
            for level in range(depth):
                offered[level] += 1
                reached[level] += level < drafted
        self._stats.record_verify(
            record.policy,
            rows=record.tree.tokens.numel(),
            offered_by_depth=offered,
            accepted_by_depth=reached,
            tokens=tokens,
            stage_ns=record.stage_ns,
            requests=running,
        )
