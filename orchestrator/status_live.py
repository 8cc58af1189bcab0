"""The live view of `overstory status --watch`: one screen, drawn anew at each look. Pure."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from overstory.orchestrator.auto_text import auto_line, policy_at_work
from overstory.orchestrator.defrag_text import fragmentation_line
from overstory.orchestrator.step_figures import PolicyFigures, current_figures

BAR = 24
POOL_BAR = 60
_FULL, _PART, _EMPTY = "█", "▒", "·"
_DEEP = 16


def bar(share: float, behind: float = 0.0, width: int = BAR) -> str:
    """`share` of the width filled, `behind` of it shaded."""
    full = round(min(1.0, max(0.0, share)) * width)
    part = round(min(1.0, max(share, behind, 0.0)) * width) - full
    return _FULL * full + _PART * part + _EMPTY * (width - full - part)


def draw_tree(figures: PolicyFigures) -> str:
    """The tree in use by depth: a filled dot where most requests' path came through, a hollow one
    where some did, a point where nodes are only offered."""
    dots = []
    for offered, accepted in zip(figures.offered, figures.accepted, strict=False):
        if offered <= 0:
            break
        dots.append("●" if accepted >= 0.5 else "○" if accepted >= 0.05 else "·")
    return "──".join(["■", *dots])


def pool_map(load: Mapping[str, Any]) -> str:
    """KV slots of requests, of the prefix cache alone, and free, in one bar."""
    size = max(1, int(load.get("max_slots", 0)))
    cached = int(load.get("cached_slots", 0))
    used = max(0, size - int(load.get("free_slots", 0)) - cached)
    return bar(used / size, (used + cached) / size, POOL_BAR)


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "pid", "phase", "policy", "forward", "steps/s", "tokens/s", "tok/fwd"):
        table.add_column(name, justify="left" if name in ("phase", "policy") else "right")
    for rank in ranks:
        why = f" ({rank['health_reason']})" if rank.get("health_reason") else ""
        table.add_row(
            *(str(rank["rank"]), str(rank.get("pid", "")), f"{rank['health']}{why}"),
            *(str(rank.get("policy", "")), str(rank.get("forwards", ""))),
            *(f"{rank.get(key, 0.0):.1f}" for key in ("steps_per_s", "tokens_per_s")),
            f"{rank.get('tokens_per_forward', 0.0):.2f}",
        )
    return table


def _acceptance(figures: PolicyFigures | None) -> RenderableType:
    if figures is None or not figures.offered:
        return Text("no drafts verified yet", style="dim")
    table = Table(box=None, pad_edge=False, show_header=False)
    shown = list(zip(figures.offered, figures.accepted, strict=False))[:_DEEP]
    for depth, (offered, accepted) in enumerate(shown, 1):
        table.add_row(f"depth {depth}", bar(accepted, offered), f"{100 * accepted:.0f}%")
    return Group(table, Text(f"tree   {draw_tree(figures)}"))


def _pool(rank: Mapping[str, Any], seen: Mapping[str, Any] | None) -> RenderableType:
    load = rank.get("load")
    if not load or not load.get("max_slots"):
        return Text("KV pool not reported yet", style="dim")
    size, free, cached = load["max_slots"], load["free_slots"], load.get("cached_slots", 0)
    lines = [
        Text(f"KV     {pool_map(load)}"),
        Text(
            f"       {_FULL} requests {size - free - cached}  {_PART} shared with later prompts "
            f"{cached}  {_EMPTY} free {free}  of {size} slots"
        ),
    ]
    if seen:
        lines.append(Text(f"       {seen['age_s']:.0f} s ago: {fragmentation_line(seen)}"))
    return Group(*lines)


def _replica(replica: dict[str, Any]) -> Panel:
    title = f"replica {replica['name']}: {replica['phase']}"
    ranks = replica["ranks"]
    if replica["phase"] != "leased" or not ranks:
        return Panel(Text(replica["reason"] or "no report yet"), title=title, title_align="left")
    first = ranks[0]
    load = first.get("load") or {}
    queue = f"queue  {load.get('running', 0)} running, {load.get('waiting', 0)} waiting"
    figures = current_figures(first.get("steps"), policy_at_work(first))
    chosen = auto_line(first.get("auto"))
    body = Group(
        _rank_table(ranks),
        Text(queue + (f"   chosen: {chosen}" if chosen else "")),
        _acceptance(figures),
        _pool(first, replica.get("fragmentation")),
        Text(f"digests of all ranks equal up to forward {replica['digests_equal_up_to']}"),
    )
    return Panel(body, title=title, title_align="left")


def faults(picture: Mapping[str, Any]) -> list[str]:
    """What goes or went wrong, latest last: one line each."""
    found = []
    controller = picture.get("controller")
    if controller is None:
        found.append("no controller answers; replicas run freely under their last policy")
        controller = {}
    for slot in controller.get("health", ()):
        if slot["state"] != "HEALTHY" and slot["reason"]:
            found.append(f"{slot['name']}: {slot['state']}: {slot['reason'].splitlines()[0]}")
        elif slot["failed_lives"]:
            found.append(f"{slot['name']}: {slot['failed_lives']} of its lives have failed")
    for replica in controller.get("replicas", ()):
        if replica["reason"]:
            found.append(f"{replica['name']}: {replica['phase']}: {replica['reason']}")
    app = picture.get("serve")
    if app is None:
        found.append("Serve does not know this deployment")
    elif app["message"]:
        found.append(f"Serve: {app['message'].strip().splitlines()[-1]}")
    return found


def live_view(picture: dict[str, Any]) -> RenderableType:
    """One screen of a deployment; `picture` is `status.gather`'s."""
    ready = "ready" if picture["ready"] else f"not ready: {picture['reason']}"
    head = Text(f"{picture['name']}  {picture['model']} at {picture['endpoint']}  {ready}")
    head.stylize("bold green" if picture["ready"] else "bold red")
    parts: list[RenderableType] = [head]
    app = picture["serve"] or {"replicas": {}}
    counted = [
        f"{name}: {', '.join(f'{n} {state}' for state, n in states.items() if n) or 'none'}"
        for name, states in app["replicas"].items()
    ]
    if counted:
        parts.append(Text("  ".join(counted)))
    gateway = picture.get("gateway")
    if gateway:
        parts.append(
            Text(
                f"gateway: {gateway['running']} of {gateway['max_concurrent']} sequences running, "
                f"{gateway['queued']} requests queued"
            )
        )
    controller = picture["controller"]
    if controller:
        parts.append(
            Text(
                f"controller: policy {controller['policy']}, leases of "
                f"{controller['lease_steps']} steps, up {controller['uptime_s']:.0f} s"
            )
        )
        parts += [_replica(replica) for replica in controller["replicas"]]
    last = faults(picture)
    if last:
        parts.append(Panel(Text("\n".join(last[-8:])), title="last faults", title_align="left"))
    return Group(*parts)
