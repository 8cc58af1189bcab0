"""How often the drafter's candidates are right, by depth and rank, under a fixed policy.

The automatic rule counts the same for itself (`overstory.workers.policy.steering`), and nothing is
counted twice.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overstory.workers.policy.beliefs import KINDS
from overstory.workers.policy.chooser import (
    OBSERVED_EVERY_NS,
    Told,
    Walks,
    drafted_kinds,
    observed,
)
from overstory.workers.policy.evidence import KindEvidence
from overstory.workers.policy.options import Options
from overstory.workers.tree_policy import TreePolicy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from overstory.kernels.reference import Accepted, Tree

KIND_NAMES = ("greedy", "sampled")
"""Of the kinds of requests, in their order."""

Shares = dict[str, dict[str, dict[int, dict[int, float]]]]
"""By kind of request: `KindEvidence.report`'s ``candidates``."""


class CandidateShares:
    """Counts some steps of fixed policies. The scheduler's thread calls, `report` may come from
    others.

    Args:
        options: of the engine.
        counts: whether this rank counts; the others know nothing that it does not.
    """

    def __init__(self, options: Options, counts: bool) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        self._kinds = [KindEvidence(options) for _ in range(KINDS)]
        self._due = False
        self._counted_ns = 0
        self._steps = self._turn = 0

    def begin(self, policy: TreePolicy, fixed: bool) -> None:
        """A step of requests begins under ``policy``, which is ``fixed`` or was chosen."""
        self._steps += 1
        self._due = False
        if not (fixed and self._counts) or policy.mode == "plain":
            return
        now = time.perf_counter_ns()
        if now - self._counted_ns >= OBSERVED_EVERY_NS:
            self._due, self._counted_ns = True, now

    def outcome(
        self,
        batch: ScheduleBatch,
        policy: TreePolicy,
        tree: Tree,
        accepted: Accepted,
        told: Told | None = None,
    ) -> SharesOutcome | None:
        """For `PendingSteps`, where the step that was begun is to be counted.

        Args:
            told: the same on the host, where the step has it copied anyway.
        """
        if not self._due:
            return None
        self._due = False
        kinds = drafted_kinds(batch.reqs)
        walks = Walks.copied(tree, accepted) if told is None else told.walks
        # Only the spine's order in a tree is known where it comes first.
        return SharesOutcome(self, kinds, walks, policy.mode == "chain" or policy.spine_first)

    def add(self, outcome: SharesOutcome, running: list[bool]) -> None:
        """A step's walks are on the host."""
        self._turn += 1
        walks = observed(outcome.walks, outcome.kinds, running, outcome.chain, self._turn)
        with self._lock:
            for evidence in self._kinds:
                evidence.pass_steps(self._steps)
            self._steps = 0
            for kind, walk in walks:
                self._kinds[kind].add(walk)

    def report(self) -> Shares | None:
        """Accepted shares lately, JSON-able; None on ranks that do not count."""
        if not self._counts:
            return None
        with self._lock:
            reports = [evidence.report() for evidence in self._kinds]
        return {
            name: report["candidates"] for name, report in zip(KIND_NAMES, reports, strict=True)
        }


@dataclass
class SharesOutcome:
    """A counted step's walks on their way to the host."""

    shares: CandidateShares
    kinds: list[int | None]
    walks: Walks
    chain: bool

    def judge(self, running: list[bool]) -> None:
        """Counts the drafts of requests that were ``running``; the step's results were read."""
        self.shares.add(self, running)


def shares_of(auto: dict[str, Any] | None) -> Shares | None:
    """Those that the automatic rule counted, of its report; None where it has none."""
    if auto is None or "greedy" not in auto:
        return None
    return {name: auto[name]["candidates"] for name in KIND_NAMES}
