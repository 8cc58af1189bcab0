"""Rates from two snapshots of a rank's cumulative counters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rates(earlier: Mapping[str, Any], later: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """Launched batches and verified tokens per second between two reports of one rank.

    Args:
        earlier: `RankHost.report` of then.
        later: of now.
        seconds: between both.

    Returns:
        `steps_per_s`, `tokens_per_s` (of decoding; prompt tokens not counted), `tokens_per_forward`
        (tokens per request and verify step; 0 without steps).
    """
    if seconds <= 0:
        return {"steps_per_s": 0.0, "tokens_per_s": 0.0, "tokens_per_forward": 0.0}
    steps = int(later["forwards"]) - int(earlier["forwards"])
    tokens = _verified(later, "tokens") - _verified(earlier, "tokens")
    requests = _verified(later, "requests") - _verified(earlier, "requests")
    return {
        "steps_per_s": round(steps / seconds, 2),
        "tokens_per_s": round(tokens / seconds, 2),
        "tokens_per_forward": round(tokens / requests, 3) if requests else 0.0,
    }


def _verified(report: Mapping[str, Any], counter: str) -> int:
    return sum(int(mode[counter]) for mode in report["steps"]["verify"].values())
