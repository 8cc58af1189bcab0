"""From the controller's picture of a deployment to metrics."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from overstory.orchestrator.fleet import FAULTS
from overstory.orchestrator.meters import Meters
from overstory.orchestrator.metric_table import CONTROLLER

logger = logging.getLogger(__name__)

EXPORT_EVERY_S = 5.0

CANDIDATES = 4
"""Ranks of candidates that are told apart: each is a series for each depth."""

CONDEMNED = "condemned"
"""The kind of fault that the controller itself counts: ranks that differed."""

Key = tuple[str, tuple[tuple[str, str], ...]]


class ControllerMetrics:
    """Exports pictures as they come; counters of ranks that started anew go on from where they
    are."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters
        self._counted: dict[Key, float] = {}
        self._gauges: set[Key] = set()
        for kind in (*FAULTS, CONDEMNED):
            meters.add("faults", 0, kind=kind)

    def export(self, status: Mapping[str, Any]) -> None:
        """Args: status: as `Controller.status` gives it, with `health` and `faults` of a fleet
        where there is one."""
        before, self._gauges = self._gauges, set()
        for replica in status["replicas"]:
            if replica["phase"] in ("found", "leased"):
                self._replica(replica)
        self._kinds("replicas", "phase", status["replicas"], "phase")
        self._kinds("replica_health", "state", status.get("health") or [], "state")
        faults = {**status.get("faults", {}), CONDEMNED: status.get("condemned", 0)}
        for kind, count in faults.items():
            self._count("faults", count, kind=kind)
        self._hand_offs(status.get("hand_offs") or {})
        for name, labels in before - self._gauges:  # gone; Ray forgets no series
            self._meters.set(name, 0.0, **dict(labels))

    def _replica(self, replica: Mapping[str, Any]) -> None:
        name = replica["name"]
        if replica["fragmentation"]:
            self._set(
                "kv_neighbours", replica["fragmentation"].get("contiguous_share"), replica=name
            )
        for rank in replica["ranks"]:
            labels = {"replica": name, "rank": str(rank["rank"])}
            self._set("report_age_seconds", rank["age_s"], **labels)
            self._set("steps_per_second", rank.get("steps_per_s"), **labels)
            self._set("tokens_per_second", rank.get("tokens_per_s"), **labels)
            self._slots(rank["load"], labels)
            self._steps(rank["steps"] or {}, labels)
            if rank["rank"] == 0:
                self._set("tokens_per_step", rank.get("tokens_per_forward"), replica=name)
                self._set("tree_policy", 1.0, replica=name, policy=str(rank.get("policy")))
                self._drafter(rank.get("auto") or {}, name)
                self._candidates(rank.get("candidates") or {}, name)
                self._count("stood_seconds", rank.get("stood_s") or 0.0, replica=name)
                load = rank["load"] or {}
                self._set("engine_running", load.get("running"), replica=name)
                self._set("engine_waiting", load.get("waiting"), replica=name)

    def _drafter(self, auto: Mapping[str, Any], replica: str) -> None:
        """What the automatic policy knows of the drafter; nothing where it has no cost table."""
        if "switched_off" not in auto:
            return
        self._count("drafter_switched_off", auto["switched_off"], replica=replica)
        self._set("drafter_in_use", float(auto["drafter"] != "off"), replica=replica)

    def _candidates(self, shares: Mapping[str, Any], replica: str) -> None:
        """How often the drafter's candidates were right; nothing before any was tried."""
        for kind, of_kind in shares.items():
            for parent, depths in of_kind.items():
                of = {"replica": replica, "kind": kind, "parent": parent}
                for depth, ranks in depths.items():
                    for candidate, share in ranks.items():
                        if int(candidate) < CANDIDATES:
                            each = {"depth": str(depth), "candidate": str(candidate)}
                            self._set("draft_candidate_share", share, **of, **each)

    def _hand_offs(self, figures: Mapping[str, Any]) -> None:
        self._count("kv_handed_over_bytes", figures.get("bytes", 0))
        self._count("kv_hand_over_seconds", figures.get("seconds", 0.0))
        self._count("kv_hand_over_wait_seconds", figures.get("waited_s", 0.0))
        self._count("kv_hand_over_meet_seconds", figures.get("meeting_s", 0.0))
        self._count("kv_hand_overs", figures.get("sequences", 0), outcome="moved")
        self._count("kv_hand_overs", figures.get("fallbacks", 0), outcome="computed")

    def _slots(self, load: Mapping[str, Any] | None, labels: dict[str, str]) -> None:
        if load is None:
            return
        free, cached = load["free_slots"], load["cached_slots"]
        used = max(0, load["max_slots"] - free - cached)
        for state, slots in (("free", free), ("cached", cached), ("used", used)):
            self._set("kv_slots", slots, state=state, **labels)

    def _steps(self, steps: Mapping[str, Any], labels: dict[str, str]) -> None:
        for policy, counts in (steps.get("verify") or {}).items():
            each = {**labels, "policy": policy}
            self._count("verify_steps", counts["forwards"], **each)
            self._count("verify_requests", counts["requests"], **each)
            self._count("verify_rows", counts["rows"], **each)
            self._count("verify_tokens", counts["tokens"], **each)
            if labels["rank"] == "0":
                self._depths(counts, labels["replica"], policy)
        self._stages(steps.get("verify") or {}, labels)
        prefill = steps.get("prefill") or {}
        self._count("prefill_steps", prefill.get("forwards", 0), **labels)
        self._count("prefill_tokens", prefill.get("tokens", 0), **labels)

    def _depths(self, counts: Mapping[str, Any], replica: str, policy: str) -> None:
        for name, key in (
            ("draft_offered", "offered_by_depth"),
            ("draft_accepted", "accepted_by_depth"),
        ):
            for depth, requests in enumerate(counts[key], 1):
                self._count(name, requests, replica=replica, policy=policy, depth=str(depth))

    def _stages(self, verify: Mapping[str, Any], labels: dict[str, str]) -> None:
        spent: dict[str, float] = {}
        for counts in verify.values():
            timed = counts.get("idle_gaps", 0)  # else nobody reads the device's clock
            device = {"device": counts["device_ns"], "idle": counts["idle_ns"]} if timed else {}
            for stage, nanoseconds in {**counts["stage_ns"], **device}.items():
                spent[stage] = spent.get(stage, 0.0) + nanoseconds / 1e9
        for stage, seconds in spent.items():
            self._count("stage_seconds", seconds, stage=stage, **labels)

    def _kinds(self, metric: str, label: str, entries: list[Mapping[str, Any]], key: str) -> None:
        """Numbers of replicas by a state."""
        numbers: dict[str, int] = {}
        for entry in entries:
            state = str(entry[key])
            numbers[state] = numbers.get(state, 0) + 1
        for state, number in numbers.items():
            self._set(metric, number, **{label: state})

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        if value is None:
            return
        self._gauges.add((name, tuple(sorted(labels.items()))))
        self._meters.set(name, float(value), **labels)

    def _count(self, name: str, total: float, **labels: str) -> None:
        """A counter that stands at `total` where it is kept; less than before is a new start."""
        key = name, tuple(sorted(labels.items()))
        before = self._counted.get(key, 0.0)
        self._meters.add(name, total - before if total >= before else total, **labels)
        self._counted[key] = total


async def keep_exporting(deployment: str, picture: Callable[[], Mapping[str, Any]]) -> None:
    """Exports a controller's picture through Ray, until cancelled. An error is logged once and
    costs that picture alone: steering must not depend on it."""
    exported = ControllerMetrics(Meters(CONTROLLER, deployment, through_ray=True))
    complained = False
    while True:
        try:
            exported.export(picture())
        except Exception:
            if not complained:
                logger.exception("metrics of %s were not exported", deployment)
            complained = True
        await asyncio.sleep(EXPORT_EVERY_S)
