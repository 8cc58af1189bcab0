"""Tokens per second against requests at a time, a line for each mode, as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#b8860b", "#444444", "#2a9d8f", "#d62828")
_WIDTH, _HEIGHT = 620, 420
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 36, 120, 44
TICKS = (500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


def write_plot(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """A panel for each temperature; vertical strokes go from the slowest round to the fastest."""
    temperatures = sorted({row["temperature"] for row in rows})
    modes = sorted({row["mode"] for row in rows})
    parts = [
        f'<g transform="translate(0 {number * _HEIGHT})">'
        + _panel([row for row in rows if row["temperature"] == temperature], modes, temperature)
        + "</g>"
        for number, temperature in enumerate(temperatures)
    ]
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{max(1, len(parts)) * _HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _panel(rows: Sequence[dict[str, Any]], modes: Sequence[str], temperature: float) -> str:
    sizes = sorted({row["concurrency"] for row in rows})
    parts = [
        f'<text x="{_LEFT}" y="18" font-weight="bold">tokens/s by requests at a time, '
        f"T = {temperature:g}; median, slowest and fastest of the rounds</text>"
    ]
    for tick in TICKS:
        y = _y(tick)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,}</text>'
        )
    for size in sizes:
        parts.append(
            f'<text x="{_x(size, sizes):.1f}" y="{_HEIGHT - _BOTTOM + 18}" '
            f'text-anchor="middle">{size}</text>'
        )
    for number, mode in enumerate(modes):
        line = sorted(
            (row for row in rows if row["mode"] == mode), key=lambda row: int(row["concurrency"])
        )
        if line:
            parts.append(_line(line, sizes, mode, number))
    return "".join(parts)


def _line(line: Sequence[dict[str, Any]], sizes: Sequence[int], mode: str, number: int) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    points, strokes = [], []
    for row in line:
        x = _x(row["concurrency"], sizes) + 2 * (number - 4)  # strokes side by side
        rounds = [float(run) for run in row["tokens_per_s_rounds"].split()]
        points.append(f"{x:.1f},{_y(row['tokens_per_s']):.1f}")
        strokes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(min(rounds)):.1f}" '
            f'y2="{_y(max(rounds)):.1f}" stroke="{colour}" stroke-opacity="0.4"/>'
        )
    key = _TOP + 16 * number
    return (
        f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        f"{''.join(strokes)}"
        f'<rect x="{_WIDTH - _RIGHT + 16}" y="{key}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{_WIDTH - _RIGHT + 31}" y="{key + 9}">{escape(mode)}</text>'
    )


def _x(size: int, sizes: Sequence[int]) -> float:
    low, high = math.log2(sizes[0]), math.log2(max(sizes[-1], 2 * sizes[0]))
    inner = _WIDTH - _LEFT - _RIGHT - 30
    return _LEFT + 15 + inner * (math.log2(size) - low) / (high - low)


def _y(rate: float) -> float:
    low, high = math.log10(TICKS[0]), math.log10(TICKS[-1])
    share = (min(max(math.log10(max(rate, 1.0)), low), high) - low) / (high - low)
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share
