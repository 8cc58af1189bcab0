"""Figures that status and report read off a rank's counters (`StepStats.snapshot`). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PolicyFigures:
    """What one policy did on one rank since it started.

    Attributes:
        policy: its name.
        forwards: target forwards.
        tokens_per_forward: tokens handed out to a request by each of its verify steps.
        rows_per_forward: target rows of a forward, of all its requests.
        offered, accepted: share of requests with a node at depth 1, 2, ..., and whose accepted path
            reached it.
        stage_ms: milliseconds of a forward by stage.
    """

    policy: str
    forwards: int
    tokens_per_forward: float
    rows_per_forward: float
    offered: tuple[float, ...]
    accepted: tuple[float, ...]
    stage_ms: Mapping[str, float]

    @property
    def slowest(self) -> str | None:
        """The stage that takes longest; None where no stage was timed."""
        stages = self.stage_ms
        return max(stages, key=lambda name: stages[name]) if stages else None


def _figures(policy: str, counted: Mapping[str, Any]) -> PolicyFigures:
    requests, forwards = counted["requests"], counted.get("forwards", 0)
    stages = counted.get("stage_ns", {})

    def shares(key: str) -> tuple[float, ...]:
        return tuple(n / requests for n in counted.get(key, ())) if requests else ()

    return PolicyFigures(
        policy=policy,
        forwards=forwards,
        tokens_per_forward=counted.get("tokens", 0) / requests if requests else 0.0,
        rows_per_forward=counted.get("rows", 0) / forwards if forwards else 0.0,
        offered=shares("offered_by_depth"),
        accepted=shares("accepted_by_depth"),
        stage_ms={name: ns / forwards / 1e6 for name, ns in stages.items()} if forwards else {},
    )


def policy_figures(steps: Mapping[str, Any] | None) -> list[PolicyFigures]:
    """Figures of every policy that a rank has run under, the most used first."""
    verify = (steps or {}).get("verify") or {}
    found = [_figures(policy, counted) for policy, counted in verify.items()]
    return sorted(found, key=lambda figures: -figures.forwards)


def current_figures(steps: Mapping[str, Any] | None, policy: str) -> PolicyFigures | None:
    """Those of the policy in force; of the most used one where that chooses others by itself."""
    found = policy_figures(steps)
    exact = next((figures for figures in found if figures.policy == policy), None)
    return exact or (found[0] if found else None)
