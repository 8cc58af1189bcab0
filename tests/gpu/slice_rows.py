"""The rank slice's points as rows of a CSV file, and back.

slice_rows.py SESSION_FOLDER ROLE[,ROLE...] COMMIT GPU VERSIONS [--no-head] >> ROWS.csv

SESSION_FOLDER is what `rank_slice_session.sh` left. Stages are cut again from the launches it kept.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from slice_bench import read_launches
from slice_stages import STAGES, median_times, split_steps, stage_times

WHERE = ("backend", "batch", "context", "rows")
TIMES = ("steps", "step_us", "least_us", "most_us", "in_a_row_us")
STAGE_COLUMNS = (*STAGES, "pauses", "span")
"""Of a profiled step. ``pauses`` holds what CUPTI adds to the launch of a graph."""
_STAGES = {f"{name}_us": name for name in STAGE_COLUMNS}
COLUMNS = (
    *WHERE,
    "role",
    "layers",
    "policy",
    "traced",
    *TIMES,
    *_STAGES,
    "gpu",
    "versions",
    "commit",
)
Point = dict[str, Any]


def results(folder: Path) -> dict[str, Any]:
    """What each role of a session wrote, by role. One that was killed left no slice.json."""
    files = sorted((folder / "roles").glob("*.json"))
    if files:
        return {file.stem: json.loads(file.read_text()) for file in files}
    found: dict[str, Any] = json.loads((folder / "slice.json").read_text())
    return found


def points_of(folder: Path, role: str) -> list[Point]:
    """Points of a role of the session in the order in which they were timed, with their stages.

    ``traced`` says whether a profiler had been used in the process before the point was timed;
    from then on every step takes longer, also without one. A session that was gone on with has
    several processes, the ``run`` of its points.
    """
    found = results(folder)[role]
    points: list[Point] = found["points"]
    profiles = _profiles(folder / "roles", role)
    traced, run = False, None
    cell: tuple[Any, ...] | None = None
    for point in points:
        if point.get("run") != run:
            traced, run, cell = False, point.get("run"), None
        here = (point["profiled"], *(point[name] for name in WHERE[:3]))
        traced |= cell is not None and cell != here and cell[0]
        cell = here
        point |= {"role": role, "layers": found["layers"], "traced": int(traced)}
        key = tuple(point[name] for name in WHERE)
        point["stages_us"] = profiles.get(key) if point["profiled"] else None
    return points


def _profiles(folder: Path, role: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Median stages by point, from all of a role's files of launches; of the last if several."""
    found = {}
    begin = f"launches-{role}-"
    files = {int(f.name.removeprefix(begin).split("-")[0]): f for f in folder.glob(f"{begin}*.gz")}
    for _, file in sorted(files.items()):
        name = file.name.removeprefix(f"launches-{role}-").removesuffix(".json.gz")
        _, backend, batch, context = name.split("-")
        rows, steps, kernels = read_launches(file)
        every = [stage_times(one) for one in split_steps(kernels, steps * len(rows))]
        for i, n in enumerate(rows):
            key = (backend, int(batch), int(context), n)
            found[key] = median_times(every[i * steps : (i + 1) * steps])
    return found


def write(points: Iterable[Point], common: dict[str, str], out: TextIO, head: bool = True) -> None:
    """CSV with `COLUMNS`; what was not measured is left empty."""
    rows = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    if head:
        rows.writeheader()
    for point in points:
        stages = {f"{name}_us": us for name, us in (point["stages_us"] or {}).items()}
        rows.writerow({**point, **stages, **common})


def read(path: Path) -> list[Point]:
    """Points of a file of `write`: numbers as such, stages in ``stages_us`` where profiled."""
    with path.open(newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: dict[str, str]) -> Point:
    point: Point = dict(row)
    for name in (*WHERE[1:], "layers", "traced", "steps"):
        point[name] = int(row[name])
    for name in TIMES[1:]:
        point[name] = float(row[name]) if row[name] else None
    stages = {name: point.pop(column) for column, name in _STAGES.items()}
    known = all(stages.values())
    point["stages_us"] = {name: float(us) for name, us in stages.items()} if known else None
    return point


def main() -> None:
    folder, roles, commit, gpu, versions, *more = sys.argv[1:]
    common = {"commit": commit, "gpu": gpu, "versions": versions}
    points = [p for role in roles.split(",") for p in points_of(Path(folder), role)]
    write(points, common, sys.stdout, head=more != ["--no-head"])


if __name__ == "__main__":
    main()
