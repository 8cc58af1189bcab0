"""The automatic tree policy of a rank as text for a person. Pure."""

from typing import Any

_KINDS = ("greedy", "sampled")


def auto_line(auto: dict[str, Any] | None) -> str:
    """One line from `StepChooser.report` of rank 0; empty where nothing chooses.

    What is expected of a step is told for the kinds of requests that were seen, for the option that
    is in force.
    """
    if not auto or not auto.get("choice"):
        return ""
    parts = [f"{auto['choice']} ({auto['why']})"]
    expected = [
        f"{auto[kind]['tokens'][auto['choice']]:.2f} {kind}"
        for kind in _KINDS
        if auto.get(kind, {}).get("seen")
    ]
    if expected:
        parts.append(f"tokens per step expected: {', '.join(expected)}")
    parts += _drafter(auto)
    return "; ".join(parts)


def _drafter(auto: dict[str, Any]) -> list[str]:
    """Standing of the drafter, as far as rank 0 tells."""
    if "drafter" not in auto:
        return []
    told = [f"drafter {auto['drafter']}"]
    if auto["first_accepted"] is not None:
        told.append(f"{100 * auto['first_accepted']:.0f}% of first tokens right")
    if auto["switched_off"]:
        told.append(f"switched off {auto['switched_off']} times")
    return told


def policy_at_work(rank: dict[str, Any]) -> str:
    """The policy that a rank's last step ran under: the chosen one, else the one in force."""
    auto = rank.get("auto") or {}
    chosen = auto.get("choice") if str(rank["policy"]).startswith("auto") else None
    return str(chosen or rank["policy"])
