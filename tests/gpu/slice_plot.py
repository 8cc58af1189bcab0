"""A step of one request by stage against context, as stacked bars in plain SVG.

slice_plot.py ROWS.csv PLOT.svg [ROWS_PER_REQUEST]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from slice_rows import read
from slice_stages import STAGES
from slice_tables import exchanges_us, merged, serving_us, whole

_COLOURS = {
    "attention": "#c8553d",
    "moe": "#1b6ca8",
    "dense": "#588157",
    "draft": "#8e5ea2",
    "head": "#b8860b",
    "build and commit": "#2a9d8f",
    "rest": "#999999",
    "exchange (modelled)": "none",
}
_SIZE, _LEFT, _TOP, _BOTTOM, _BAR, _GAP = (640, 400), 56, 44, 352, 64, 30


def parts_ms(point: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of each part of a profiled step, as drawn from the bottom upwards."""
    stages = point["stages_us"]
    times = {name: stages[name] for name in ("attention", "moe", "dense", "draft", "head")}
    times["build and commit"] = stages["build"] + stages["commit"]
    times["rest"] = max(0.0, serving_us(point) - sum(stages[name] for name in STAGES))
    times["exchange (modelled)"] = exchanges_us(point["batch"], point["rows"])
    return {name: us / 1000 for name, us in times.items()}


def draw(points: Sequence[Mapping[str, Any]]) -> str:
    """One bar a point, in their order; exchanges are outlined, since they are modelled."""
    bars = [parts_ms(point) for point in points]
    top = 5 * (1 + max(sum(bar.values()) for bar in bars) // 5)
    scale = (_BOTTOM - _TOP) / top
    first = points[0]
    title = f"{first['gpu']}: one rank of Kimi-K2.6 at TP 8, batch 1, {first['rows']} rows"
    right = _LEFT + len(points) * (_BAR + _GAP) + _GAP
    parts = [_text(_LEFT, 20, title), _text(8, _TOP - 8, "ms a step")]
    for ms in range(0, int(top) + 1, 5):
        y = _BOTTOM - ms * scale
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, str(ms), "end"))
    for index, (point, bar) in enumerate(zip(points, bars, strict=True)):
        x, y = _LEFT + _GAP + index * (_BAR + _GAP), float(_BOTTOM)
        for name, ms in bar.items():
            y -= ms * scale
            parts.append(_box(name, x, y, _BAR, ms * scale))
        parts.append(_text(x + _BAR / 2, _BOTTOM + 16, f"{point['context']:,}", "middle"))
    parts.append(_text((_LEFT + right) / 2, _BOTTOM + 34, "context", "middle"))
    for index, name in enumerate(reversed(_COLOURS)):
        y = _TOP + 18 * index
        parts += [_box(name, right + 12, y, 12, 12), _text(right + 30, y + 10, name)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE[0]}" height="{_SIZE[1]}"'
    paper = '<rect width="100%" height="100%" fill="white"/>'
    return f'{head} font-family="sans-serif" font-size="11">{paper}{"".join(parts)}</svg>\n'


def _box(name: str, x: float, y: float, width: float, height: float) -> str:
    colour = _COLOURS[name]
    line = ' stroke="#000" stroke-dasharray="3 2"' if colour == "none" else ""
    size = f'width="{width}" height="{height:.1f}"'
    return f'<rect x="{x}" y="{y:.1f}" {size} fill="{colour}"{line}/>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def main() -> None:
    rows = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    found = [
        point
        for point in whole(merged(read(Path(sys.argv[1]))))
        if (point["backend"], point["batch"], point["rows"]) == ("overstory", 1, rows)
        and point["stages_us"]
    ]
    Path(sys.argv[2]).write_text(draw(found))


if __name__ == "__main__":
    main()
