"""A benchmark's rows as CSV and as a picture (plain SVG). Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e5ea2", "#b8860b", "#444444", "#2a9d8f")
_BAR, _GAP, _HEIGHT, _LEFT, _TOP, _BOTTOM = 26, 18, 220, 64, 40, 44
_PANELS = (("tokens_per_s", "tokens/s"), ("ttft_ms", "time to first token, ms (median)"))


def csv_text(rows: Sequence[Mapping[str, Any]], host: Mapping[str, Any]) -> str:
    """One line for each row; lists as numbers separated by spaces. Behind the rows' own columns
    `gpu`, `versions` and `commit` of the machine: `host` is that of `host_facts`."""
    rows = [{**row, **made_with(host)} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in names])
    return made.getvalue()


def made_with(host: Mapping[str, Any]) -> dict[str, str]:
    """`gpu`, `versions` and `commit` as text, of a machine's `host_facts`; empty where unknown."""
    versions = "; ".join(f"{name} {number}" for name, number in host["versions"].items())
    gpus = "; ".join(dict.fromkeys(host["gpus"]))
    return {"gpu": gpus, "versions": versions, "commit": host["commit"] or ""}


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join("" if part is None else str(part) for part in value)
    if isinstance(value, dict):
        return " ".join(f"{key}={part}" for key, part in value.items())
    return value


def plot_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Bars of every mode side by side for each cell: tokens per second, and first tokens."""
    modes = list(dict.fromkeys(str(row["mode"]) for row in rows))
    cells = list(dict.fromkeys(_name(row) for row in rows))
    width = _LEFT + len(cells) * (len(modes) * _BAR + _GAP) + 140
    panel = _TOP + _HEIGHT + _BOTTOM
    parts = [
        f'<g transform="translate(0 {number * panel})">{_panel(rows, modes, cells, key, title)}</g>'
        for number, (key, title) in enumerate(_PANELS)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{len(_PANELS) * panel}"'
        f' font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _name(row: Mapping[str, Any]) -> str:
    """Of a row's cell."""
    load = f", {row['load']}" if row.get("load") else ""
    return f"{row['concurrency']} at a time, T={row['temperature']:g}{load}"


def _panel(
    rows: Sequence[Mapping[str, Any]], modes: list[str], cells: list[str], key: str, title: str
) -> str:
    most = max((row[key] for row in rows), default=0) or 1
    parts = [f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="100%" y1="{y}" y2="{y}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{most * share:.4g}</text>'
        )
    for number, cell in enumerate(cells):
        x = _LEFT + _GAP + number * (len(modes) * _BAR + _GAP)
        y = _TOP + _HEIGHT + 16 + 13 * (number % 2)
        parts.append(f'<text x="{x}" y="{y}">{escape(cell)}</text>')
        for row in rows:
            if _name(row) == cell:
                parts.append(_bar(row, modes.index(str(row["mode"])), x, row[key] / most))
    right = _LEFT + len(cells) * (len(modes) * _BAR + _GAP) + 20
    for number, mode in enumerate(modes):
        y = _TOP + 16 * number
        parts.append(f'<rect x="{right}" y="{y}" width="10" height="10" fill="{_colour(number)}"/>')
        parts.append(f'<text x="{right + 15}" y="{y + 9}">{escape(mode)}</text>')
    return "".join(parts)


def _bar(row: Mapping[str, Any], place: int, x: int, share: float) -> str:
    height = _HEIGHT * share
    return (
        f'<rect x="{x + place * _BAR}" y="{_TOP + _HEIGHT - height:.1f}" width="{_BAR - 4}" '
        f'height="{height:.1f}" fill="{_colour(place)}"><title>{escape(str(row["mode"]))}: '
        f"{row['tokens_per_s']} tokens/s, {row['ttft_ms']} ms</title></rect>"
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
