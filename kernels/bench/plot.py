"""Time against context, one line per implementation and the floor, as plain SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .results import Row

_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#b8860b", "#444444", "#2a9d8f", "#d62828")
_PANEL, _MARGIN = (560, 400), (64, 34, 250, 48)
"""Width and height of a panel; margins left, top, right, bottom within it."""

Panel = tuple[str, int, int, int]
"""(op, bs, q, heads)."""
Line = list[tuple[int, float]]


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """A panel per (op, bs, q, heads) that was measured at two contexts or more."""
    panels = _panels(rows)
    parts = []
    for index, (panel, lines) in enumerate(sorted(panels.items())):
        parts.append(f'<g transform="translate(0 {index * _PANEL[1]})">{_draw(panel, lines)}</g>')
    height = max(1, len(panels)) * _PANEL[1]
    gpu = escape(rows[0].gpu) if rows else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_PANEL[0]}" height="{height}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(
        f'{head} font-family="sans-serif" font-size="11"><title>{gpu}</title>'
        f"{paper}{''.join(parts)}</svg>\n"
    )


def _panels(rows: Sequence[Row]) -> dict[Panel, dict[str, Line]]:
    panels: dict[Panel, dict[str, Line]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.op.endswith("_attention"):
            lines = panels[row.op, row.bs, row.q, row.heads]
            lines[row.impl].append((row.context, row.us_median))
            if row.impl == "ours":
                lines["floor"].append((row.context, row.floor_us))
    for lines in panels.values():
        for line in lines.values():
            line.sort()
    return {
        panel: lines
        for panel, lines in panels.items()
        if len({context for line in lines.values() for context, _ in line}) > 1
    }


def _draw(panel: Panel, lines: dict[str, Line]) -> str:
    contexts = sorted({context for line in lines.values() for context, _ in line})
    times = [us for line in lines.values() for _, us in line]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    left, top, right, bottom = _MARGIN
    x_end, y_end = _PANEL[0] - right, _PANEL[1] - bottom
    span = math.log(contexts[-1] / contexts[0])

    def x_of(context: int) -> float:
        return left + (x_end - left) * math.log(context / contexts[0]) / span

    def y_of(us: float) -> float:
        return y_end - (y_end - top) * (math.log10(us) - low) / max(1, high - low)

    op, bs, q, heads = panel
    parts = [f'<text x="{left}" y="20">{escape(op)}, bs {bs}, q {q}, {heads} heads</text>']
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<path d="M{left} {y:.1f}H{x_end}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
        )
    parts.append(f'<text x="8" y="{top - 4}">us</text>')
    for context in contexts:
        x = x_of(context)
        parts.append(f'<path d="M{x:.1f} {top}V{y_end}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{y_end + 16}" text-anchor="middle">{context:,}</text>')
    parts.append(
        f'<text x="{(left + x_end) / 2}" y="{y_end + 34}" text-anchor="middle">context</text>'
    )
    by_end = sorted(lines.items(), key=lambda item: -item[1][-1][1])
    for index, (name, line) in enumerate(by_end):
        colour, dash = _COLOURS[index % len(_COLOURS)], ""
        if name == "floor":
            colour, dash = "#000", ' stroke-dasharray="4 3"'
        points = " ".join(f"{x_of(context):.1f},{y_of(us):.1f}" for context, us in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
        )
        for context, us in line:
            place = f'cx="{x_of(context):.1f}" cy="{y_of(us):.1f}"'
            parts.append(f'<circle {place} r="2.2" fill="{colour}"/>')
        y = top + 8 + 16 * index
        parts.append(f'<path d="M{x_end + 12} {y}h22" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{x_end + 40}" y="{y + 4}">{escape(name)}</text>')
    return "".join(parts)
