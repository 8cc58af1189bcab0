"""Times of a step's stages, and what a step did, kept until its outcome is known on the host."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import gt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from overstory.workers.step_stats import STATS, StepStats

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req

    from overstory.kernels.reference import Tree


DEVICE_TIMES_ENV = "OVERSTORY_DEVICE_TIMES"
"""1 has all steps on an accelerator read its clock at both ends, and counts it for `idle_ns`; steps
on a CPU always do. Else captured steps read it, for the automatic policy alone; 0: none do."""


def times_steps(device: str) -> bool:
    """Whether steps on ``device`` read its clock, and are counted by it."""
    return device == "cpu" or os.environ.get(DEVICE_TIMES_ENV) == "1"


def clocks_captured_steps(device: str) -> bool:
    """Whether captured steps on ``device`` read its clock: two launches of one thread more."""
    return times_steps(device) or os.environ.get(DEVICE_TIMES_ENV) != "0"


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


class Outcome(Protocol):
    """What is to be made of a step once it is known."""

    def judge(self, running: list[bool]) -> None:
        """The results have been read; ``running`` by request: it had not ended before."""


class StepRecord(NamedTuple):
    """A verify step whose acceptance the scheduler has not read yet.

    Attributes:
        policy: its name.
        tree: what was verified.
        requests: the batch.
        stage_ns: times of the stages.
        deepest: [bs] int64 on the host, depth of each tree, complete by the time the scheduler has
            the step's tokens; taken from the tree if None.
        outcome: told once the step is counted, if anybody wants it.
        times: [2] int64 on the host, nanoseconds of the device's clock before and after the step's
            work, complete as `deepest`; None if it was not timed.
    """

    policy: str
    tree: Tree
    requests: tuple[Req, ...]
    stage_ns: Mapping[str, int] = MappingProxyType({})
    deepest: torch.Tensor | None = None
    outcome: Outcome | None = None
    times: torch.Tensor | None = None


class _ReadStep(NamedTuple):
    """A step whose acceptance is read and whose tokens SGLang is appending.

    Attributes:
        record: the step.
        accepted: drafted tokens on the accepted path, by request.
        lengths: tokens of each request before this step; None if it had ended before.
        follows: whether nothing was launched between the step before and this one.
    """

    record: StepRecord
    accepted: list[int]
    lengths: list[int | None]
    follows: bool


class _Paths(NamedTuple):
    """What a step gave its ``running`` requests.

    Attributes:
        tokens: given in all.
        offered: requests by the depth of what they were offered.
        reached: requests by the depth that was accepted of it.
    """

    running: int
    tokens: int
    offered: list[int]
    reached: list[int]


class PendingSteps:
    """Steps in the order they ran; the scheduler reads them in the same order.

    The scheduler first reads a step's acceptance (`read`), then appends its tokens and looks for
    each request's end, then sends them off (`count`). Only then is it known how many of the tokens
    a request was given: a stop token may end it in the middle of a path.
    """

    def __init__(self, stats: StepStats) -> None:
        self._stats = stats
        self._pending: deque[tuple[StepRecord, bool]] = deque()  # and `_ReadStep.follows`
        self._broken = True  # whether something else was launched since the last step
        self._ended_ns: int | None = None
        self._read: _ReadStep | None = None

    def start(self) -> None:
        """A worker starts: steps that one before it in this process left behind are dropped."""
        self._pending.clear()
        self._broken, self._ended_ns = True, None
        self._read = None

    def interrupted(self) -> None:
        """Something else than a step was launched: the next step's gap is not idle time."""
        self._broken = True

    def add(self, record: StepRecord) -> None:
        """A step has been launched."""
        self._pending.append((record, not self._broken))
        self._broken = False

    def read(self, accepted: list[int]) -> None:
        """The acceptance of the oldest step: ``accepted`` drafted tokens per request."""
        assert self._read is None, "the step before was not counted"
        record, follows = self._pending.popleft()
        assert len(accepted) == len(record.requests), "steps read out of order"
        lengths = [
            None if req.finished() or req.is_retracted else len(req.output_ids)
            for req in record.requests
        ]
        self._read = _ReadStep(record, accepted, lengths, follows)

    def count(self) -> None:
        """Count the step that was read last, its tokens being appended; without one, nothing.

        Requests that had ended before (overlap scheduling runs one step too many) and what lies
        beyond a request's end, be it a limit or a stop token, are not counted.
        """
        step, self._read = self._read, None
        if step is None:
            return
        record = step.record
        known = record.tree.depths.amax(dim=1) if record.deepest is None else record.deepest
        deepest = known.tolist()
        paths = _whole_paths(step, deepest) or _paths(step, deepest)
        self._stats.record_verify(
            record.policy,
            rows=record.tree.tokens.numel(),
            offered_by_depth=_at_least(paths.offered),
            accepted_by_depth=_at_least(paths.reached),
            tokens=paths.tokens,
            stage_ns=record.stage_ns,
            requests=paths.running,
        )
        self._count_times(record, step.follows)
        if record.outcome is not None:
            record.outcome.judge([before is not None for before in step.lengths])

    def _count_times(self, record: StepRecord, follows: bool) -> None:
        if record.times is None:
            self._ended_ns = None
            return
        begun, ended = record.times.tolist()
        idle = None
        if follows and self._ended_ns is not None:
            idle = max(0, begun - self._ended_ns)
        self._stats.record_device(record.policy, max(0, ended - begun), idle)
        self._ended_ns = ended


def _whole_paths(step: _ReadStep, deepest: list[int]) -> _Paths | None:
    """`_paths` where every request goes on and was given its whole path; None elsewhere."""
    requests, accepted = step.record.requests, step.accepted
    before = [length for length in step.lengths if length is not None]
    if len(before) < len(requests) or any(map(gt, accepted, deepest)):
        return None
    if any(req.finished_len is not None for req in requests):
        return None
    tokens = sum([len(req.output_ids) for req in requests]) - sum(before)
    if tokens < sum(accepted) + len(requests):  # and it cannot be more
        return None
    depths = range(1 + max(deepest, default=0))
    offered, reached = map(deepest.count, depths), map(accepted.count, depths)
    return _Paths(len(requests), tokens, list(offered), list(reached))


def _paths(step: _ReadStep, deepest: list[int]) -> _Paths:
    running, tokens = 0, 0
    offered = [0] * (1 + max(deepest, default=0))  # requests by what they were offered in all
    reached = [0] * len(offered)
    for req, drafted, before, depth in zip(
        step.record.requests, step.accepted, step.lengths, deepest, strict=True
    ):
        if before is None:
            continue
        running += 1
        # SGLang keeps the tokens beyond an end in its list.
        end = req.finished_len
        handed_out = (len(req.output_ids) if end is None else end) - before
        tokens += handed_out
        judged = depth if handed_out > drafted else handed_out
        offered[judged] += 1
        reached[min(judged, drafted)] += 1
    return _Paths(running, tokens, offered, reached)


def on_host(values: torch.Tensor) -> torch.Tensor:
    """A copy of ``values`` on the host, without waiting for a GPU.

    The copy goes with the step's stream, which SGLang waits for before it reads a step's tokens.
    """
    if not values.is_cuda:
        return values.clone()
    host = values.new_empty(values.shape, device="cpu", pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host


def _at_least(exactly: Sequence[int]) -> list[int]:
    """Of counts at 0, 1, ...: those at 1 and more, 2 and more, ..."""
    return list(accumulate(reversed(exactly[1:])))[::-1]


PENDING = PendingSteps(STATS)
"""Steps of this process."""


def count_step(*_arguments: Any, **_named: Any) -> None:
    """BEFORE hook on SGLang's ``SchedulerOutputStreamer.stream_output``.

    Tokens are counted before a client can have them, so that whoever has an answer finds it in the
    counters.
    """
    PENDING.count()
