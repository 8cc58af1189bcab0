"""A deployment's status as text for a person. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from overstory.orchestrator.auto_text import auto_line, policy_at_work
from overstory.orchestrator.defrag_text import fragmentation_line


def acceptance(steps: dict[str, Any] | None, policy: str) -> str:
    """Share of drafts that reached each depth under `policy`, in percent; empty if none yet."""
    counters = ((steps or {}).get("verify") or {}).get(policy)
    if not counters or not counters["requests"] or not counters["accepted_by_depth"]:
        return ""
    shares = (100 * n / counters["requests"] for n in counters["accepted_by_depth"])
    return " ".join(f"{share:.0f}" for share in shares)


def _rank_line(rank: dict[str, Any]) -> str:
    parts = [f"    rank {rank['rank']}  pid {rank['pid']}  {rank['health']}"]
    if rank["health_reason"]:
        parts.append(f"({rank['health_reason']})")
    parts.append(f"{rank['policy']}  forward {rank['forwards']}")
    if rank.get("steps_per_s"):
        parts.append(
            f"{rank['steps_per_s']:.1f} steps/s  {rank.get('tokens_per_s', 0):.1f} tokens/s"
        )
    if shares := acceptance(rank.get("steps"), policy_at_work(rank)):
        parts.append(f"accepted by depth, %: {shares}")
    if chosen := auto_line(rank.get("auto")):
        parts.append(f"chose {chosen}")
    return "  ".join(parts)


def _health_line(slot: dict[str, Any]) -> str:
    """One copy of the model over its lives (`ReplicaHealth.picture`)."""
    doing = "generating" if slot["generating"] else "ready" if slot["ready"] else "not ready"
    line = f"{slot['name']}: {slot['state']} ({doing})"
    counts = {
        "failed probes": slot["probe_failures"],
        "failed requests": slot["request_failures"],
        f"of {slot['restarts']} lives failed": slot["failed_lives"],
    }
    told = [f"{count} {what}" for what, count in counts.items() if count]
    why = slot["reason"].splitlines()[:1] if slot["state"] != "HEALTHY" else []
    return ", ".join([line, *told]) + "".join(f": {reason}" for reason in why)


def left_as_told(controller: Mapping[str, Any]) -> frozenset[str]:
    """Names of replicas that go or have gone because somebody asked for it: no faults."""
    return frozenset(slot["name"] for slot in controller.get("health", ()) if slot.get("as_told"))


def _controller_lines(controller: dict[str, Any] | None) -> Iterator[str]:
    if controller is None:
        yield "  controller: none answers; replicas run freely under their last policy"
        return
    yield (
        f"  controller: policy {controller['policy']}, leases of {controller['lease_steps']} "
        f"steps, up {controller['uptime_s']:.0f} s"
    )
    for slot in controller.get("health", ()):
        if slot["state"] != "RETIRED" or not slot.get("as_told"):
            yield f"  {_health_line(slot)}"
    told = left_as_told(controller)
    for replica in controller["replicas"]:
        if replica["phase"] != "leased" and replica["name"] in told:
            continue
        why = f": {replica['reason']}" if replica["reason"] else ""
        equal = f", digests equal up to forward {replica['digests_equal_up_to']}"
        leased = replica["phase"] == "leased"
        yield f"  replica {replica['name']}: {replica['phase']}{why}{equal if leased else ''}"
        if leased:
            yield from map(_rank_line, replica["ranks"])
        if leased and (seen := replica.get("fragmentation")):
            yield f"    KV, {seen['age_s']:.0f} s ago: {fragmentation_line(seen)}"


def render(picture: dict[str, Any]) -> str:
    """The picture as text."""
    ready = "ready" if picture["ready"] else f"not ready: {picture['reason']}"
    lines = [f"{picture['name']}  {picture['model']} at {picture['endpoint']}  {ready}"]
    app = picture["serve"]
    if app is None:
        lines.append("  Serve does not know this deployment")
    else:
        for deployment, states in app["replicas"].items():
            counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
            lines.append(f"  {deployment}: {counts or 'none'}")
        if app["message"]:
            lines.append(f"  Serve says: {app['message'].strip().splitlines()[-1]}")
    return "\n".join([*lines, *_controller_lines(picture["controller"])])
