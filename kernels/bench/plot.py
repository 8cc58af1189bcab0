"""Time against context, one line per implementation and the floor, as plain SVG."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .cases import FP8
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
            lines[_name(row)].append((row.context, row.us_median))
            if row.impl == "ours" and row.kv_dtype != FP8:
                lines["floor"].append((row.context, row.floor_us))
    for lines in panels.values():
        for line in lines.values():
            line.sort()
    return {
        panel: lines
        for panel, lines in panels.items()
        if len({context for line in lines.values() for context, _ in line}) > 1
    }


class _Axes:
    """Logarithmic both ways, over all points of the lines."""

    def __init__(self, lines: dict[str, Line]) -> None:
        self.contexts = sorted({context for line in lines.values() for context, _ in line})
        times = [us for line in lines.values() for _, us in line]
        low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
        self.powers = range(low, high + 1)
        left, top, right, bottom = _MARGIN
        self.left, self.right = left, _PANEL[0] - right
        self.top, self.bottom = top, _PANEL[1] - bottom

    def x(self, context: int) -> float:
        """Of a context, in pixels."""
        part = math.log(context / self.contexts[0]) / math.log(self.contexts[-1] / self.contexts[0])
        return self.left + (self.right - self.left) * part

    def y(self, us: float) -> float:
        """Of a time, in pixels."""
        part = (math.log10(us) - self.powers[0]) / max(1, len(self.powers) - 1)
        return self.bottom - (self.bottom - self.top) * part


def _draw(panel: Panel, lines: dict[str, Line]) -> str:
    op, bs, q, heads = panel
    axes = _Axes(lines)
    parts = [_text(axes.left, 20, f"{op}, bs {bs}, q {q}, {heads} heads"), *_grid(axes)]
    slowest_first = sorted(lines.items(), key=lambda item: -item[1][-1][1])
    for index, (name, line) in enumerate(slowest_first):
        parts += _line(axes, name, line, index)
    return "".join(parts)


def _name(row: Row) -> str:
    return f"{row.impl}, {FP8}" if row.kv_dtype == FP8 else row.impl


def _grid(axes: _Axes) -> list[str]:
    parts = [_text(8, axes.top - 4, "us")]
    for power in axes.powers:
        y = axes.y(10.0**power)
        parts.append(f'<path d="M{axes.left} {y:.1f}H{axes.right}" stroke="#ddd"/>')
        parts.append(_text(axes.left - 6, y + 4, f"{10.0**power:g}", "end"))
    for context in axes.contexts:
        x = axes.x(context)
        parts.append(f'<path d="M{x:.1f} {axes.top}V{axes.bottom}" stroke="#eee"/>')
        parts.append(_text(x, axes.bottom + 16, f"{context:,}", "middle"))
    parts.append(_text((axes.left + axes.right) / 2, axes.bottom + 34, "context", "middle"))
    return parts


def _line(axes: _Axes, name: str, line: Line, index: int) -> list[str]:
    """Line, points, and its place in the legend."""
    style = f'stroke="{_COLOURS[index % len(_COLOURS)]}"'
    if name == "floor":
        style = 'stroke="#000" stroke-dasharray="4 3"'
    places = [(axes.x(context), axes.y(us)) for context, us in line]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    y = axes.top + 8 + 16 * index
    return [
        f'<polyline points="{points}" fill="none" {style} stroke-width="1.6"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" {style}/>' for x, y in places),
        f'<path d="M{axes.right + 12} {y}h22" {style} stroke-width="2"/>',
        _text(axes.right + 40, y + 4, name),
    ]


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
