"""The live view of `overstory status --watch`: one screen, drawn anew at each look. Pure.

Faults stand above the replicas, and replicas are shown in as much detail as the terminal has lines
for: what is cut off below a screen is seen by nobody.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from overstory.orchestrator.auto_text import auto_line, policy_at_work
from overstory.orchestrator.defrag_text import fragmentation_line
from overstory.orchestrator.status_text import left_as_told
from overstory.orchestrator.step_figures import PolicyFigures, current_figures
from overstory.orchestrator.wording import counted

BAR = 24
POOL_BAR = 60
NARROW = 80
"""Columns below which a rank's pid and forward are left out, and bars are shorter."""
SHOWN_FAULTS = 8
_FULL, _PART, _EMPTY = "█", "▒", "·"
_DEEP = 16


class Detail(IntEnum):
    """How much is shown of a replica."""

    LINE = 0
    """One line."""
    SHORT = 1
    """A panel with its first rank and those unlike it, acceptance and pool in a line each."""
    FULL = 2
    """Every rank, acceptance as bars."""


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


def pool_map(load: Mapping[str, Any], width: int = POOL_BAR) -> str:
    """KV slots of requests, of the prefix cache alone, and free, in one bar."""
    size = max(1, int(load.get("max_slots", 0)))
    cached = int(load.get("cached_slots", 0))
    used = max(0, size - int(load.get("free_slots", 0)) - cached)
    return bar(used / size, (used + cached) / size, width)


def _rank_table(ranks: list[dict[str, Any]], narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    left_out = ("pid", "forward") if narrow else ()
    columns = ("rank", "pid", "phase", "policy", "forward", "steps/s", "tokens/s", "tok/fwd")
    shown = [name for name in columns if name not in left_out]
    for name in shown:
        table.add_column(name, justify="left" if name in ("phase", "policy") else "right")
    for rank in ranks:
        why = f" ({rank['health_reason']})" if rank.get("health_reason") else ""
        cells = {
            "rank": str(rank["rank"]),
            "pid": str(rank.get("pid", "")),
            "phase": f"{rank['health']}{why}",
            "policy": str(rank.get("policy", "")),
            "forward": str(rank.get("forwards", "")),
            "steps/s": f"{rank.get('steps_per_s', 0.0):.1f}",
            "tokens/s": f"{rank.get('tokens_per_s', 0.0):.1f}",
            "tok/fwd": f"{rank.get('tokens_per_forward', 0.0):.2f}",
        }
        table.add_row(*(cells[name] for name in shown))
    return table


def _ranks(ranks: list[dict[str, Any]], detail: Detail, narrow: bool) -> RenderableType:
    if detail is Detail.FULL:
        return _rank_table(ranks, narrow)
    unlike = [one for one in ranks[1:] if one["health"] != ranks[0]["health"]]
    alike = len(ranks) - 1 - len(unlike)
    more = (
        [Text(f"     and {counted(alike, 'more rank')} like rank 0", style="dim")] if alike else []
    )
    return Group(_rank_table([ranks[0], *unlike], narrow), *more)


def _acceptance(figures: PolicyFigures | None, detail: Detail) -> RenderableType:
    if figures is None or not figures.offered:
        return Text("no drafts verified yet", style="dim")
    tree = Text(f"tree   {draw_tree(figures)}")
    shown = list(zip(figures.offered, figures.accepted, strict=False))[:_DEEP]
    if detail is not Detail.FULL:
        shares = " ".join(f"{100 * accepted:.0f}" for _, accepted in shown)
        return Group(Text(f"accepted by depth, %: {shares}"), tree)
    table = Table(box=None, pad_edge=False, show_header=False)
    for depth, (offered, accepted) in enumerate(shown, 1):
        table.add_row(f"depth {depth}", bar(accepted, offered), f"{100 * accepted:.0f}%")
    return Group(table, tree)


def _pool(
    rank: Mapping[str, Any], seen: Mapping[str, Any] | None, detail: Detail, width: int
) -> RenderableType:
    load = rank.get("load")
    if not load or not load.get("max_slots"):
        return Text("KV pool not reported yet", style="dim")
    size, free, cached = load["max_slots"], load["free_slots"], load.get("cached_slots", 0)
    lines = [Text(f"KV     {pool_map(load, max(10, min(POOL_BAR, width - 11)))}")]
    if detail is Detail.FULL:
        lines.append(
            Text(
                f"       {_FULL} requests {size - free - cached}  {_PART} shared with later "
                f"prompts {cached}  {_EMPTY} free {free}  of {size} slots"
            )
        )
        lines.append(
            Text(f"       {seen['age_s']:.0f} s ago: {fragmentation_line(seen)}")
            if seen
            else Text("       fragments not looked at: `overstory defrag --dry-run`", style="dim")
        )
    return Group(*lines)


def _line(replica: dict[str, Any]) -> Text:
    """A replica in one line."""
    begin = f"replica {replica['name']}: {replica['phase']}"
    if replica["phase"] != "leased" or not replica["ranks"]:
        return Text(f"{begin}  {replica['reason'] or 'no report yet'}", no_wrap=True)
    first, load = replica["ranks"][0], replica["ranks"][0].get("load") or {}
    kv = ""
    if size := load.get("max_slots"):
        kv = f"  KV {100 * (1 - load['free_slots'] / size):.0f}%"
    return Text(
        f"{begin}  {first.get('policy', '')}  {first.get('tokens_per_s', 0.0):.1f} tokens/s  "
        f"{load.get('running', 0)} running, {load.get('waiting', 0)} waiting{kv}",
        no_wrap=True,
    )


def _replica(replica: dict[str, Any], detail: Detail, width: int) -> RenderableType:
    if detail is Detail.LINE:
        return _line(replica)
    title = f"replica {replica['name']}: {replica['phase']}"
    ranks = replica["ranks"]
    if replica["phase"] != "leased" or not ranks:
        return Panel(Text(replica["reason"] or "no report yet"), title=title, title_align="left")
    first = ranks[0]
    load = first.get("load") or {}
    queue = f"queue  {load.get('running', 0)} running, {load.get('waiting', 0)} waiting"
    figures = current_figures(first.get("steps"), policy_at_work(first))
    chosen = auto_line(first.get("auto"))
    body = [
        _ranks(ranks, detail, width < NARROW),
        Text(queue + (f"   chosen: {chosen}" if chosen else "")),
        _acceptance(figures, detail),
        _pool(first, replica.get("fragmentation"), detail, width),
    ]
    if detail is Detail.FULL:
        equal = replica["digests_equal_up_to"]
        body.append(Text(f"digests of all ranks equal up to forward {equal}"))
    return Panel(Group(*body), title=title, title_align="left")


def faults(picture: Mapping[str, Any]) -> list[str]:
    """What goes or went wrong, latest last: one line each. What somebody asked for is no fault."""
    found = []
    controller = picture.get("controller")
    if controller is None:
        found.append("no controller answers; replicas run freely under their last policy")
        controller = {}
    told = left_as_told(controller)
    for slot in controller.get("health", ()):
        if slot["state"] != "HEALTHY" and slot["reason"] and slot["name"] not in told:
            found.append(f"{slot['name']}: {slot['state']}: {slot['reason'].splitlines()[0]}")
        elif slot["failed_lives"]:
            found.append(f"{slot['name']}: {slot['failed_lives']} of its lives have failed")
    for replica in controller.get("replicas", ()):
        if replica["reason"] and replica["name"] not in told:
            found.append(f"{replica['name']}: {replica['phase']}: {replica['reason']}")
    app = picture.get("serve")
    if app is None:
        found.append("Serve does not know this deployment")
    elif app["message"]:
        found.append(f"Serve: {app['message'].strip().splitlines()[-1]}")
    return found


def fitted_view(picture: dict[str, Any], console: Console) -> RenderableType:
    """The view in the most detail for which the console has lines."""
    width = console.width
    for detail in sorted(Detail, reverse=True):
        view = live_view(picture, detail, width)
        if len(console.render_lines(view)) <= console.height:
            break
    return view


def live_view(
    picture: dict[str, Any], detail: Detail = Detail.FULL, width: int = 110
) -> RenderableType:
    """A deployment; `picture` is `status.gather`'s, `width` the terminal's columns."""
    ready = "ready" if picture["ready"] else f"not ready: {picture['reason']}"
    head = Text(f"{picture['name']}  {picture['model']} at {picture['endpoint']}  {ready}")
    head.stylize("bold green" if picture["ready"] else "bold red")
    parts: list[RenderableType] = [head, *_summary(picture)]
    if last := faults(picture):
        shown = "\n".join(last[-SHOWN_FAULTS:])
        parts.append(Panel(Text(shown), title="last faults", title_align="left"))
    controller = picture["controller"] or {"replicas": []}
    told = left_as_told(controller)
    parts += [
        _replica(replica, detail, width)
        for replica in controller["replicas"]
        if replica["phase"] == "leased" or replica["name"] not in told
    ]
    return Group(*parts)


def _summary(picture: Mapping[str, Any]) -> list[RenderableType]:
    """Serve's replicas, gateway and controller, in a line each."""
    lines: list[RenderableType] = []
    app = picture["serve"] or {"replicas": {}}
    processes = [
        f"{name}: {', '.join(f'{n} {state}' for state, n in states.items() if n) or 'none'}"
        for name, states in app["replicas"].items()
    ]
    if processes:
        lines.append(Text("  ".join(processes)))
    if gateway := picture.get("gateway"):
        lines.append(
            Text(
                f"gateway: {gateway['running']} of {gateway['max_concurrent']} sequences running, "
                f"{gateway['queued']} requests queued"
            )
        )
    if controller := picture["controller"]:
        lines.append(
            Text(
                f"controller: policy {controller['policy']}, leases of "
                f"{controller['lease_steps']} steps, up {controller['uptime_s']:.0f} s"
            )
        )
    return lines
