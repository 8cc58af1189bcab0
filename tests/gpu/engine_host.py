"""Where the host's time of a step goes on a GPU: role `host` of `engine_runs.py`.

Milliseconds of a step by policy, and what Python's profiler says of the loop's thread, both in a
closed loop: its own time makes short functions look longer than they are, calls into CUDA count in
full.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import engine_pairs
from engine_pairs import Shape

POLICIES = ("plain", "tree-15", "tree-63", "auto")
SHAPES: Sequence[Shape] = (Shape(1, 0.0), Shape(8, 0.0), Shape(1, 1.0), Shape(32, 0.0))
ROUNDS = 8
ROUND_MESSAGES = 150
PROFILED = [(shape, policy) for shape in SHAPES[:2] for policy in ("auto", "tree-63")]
"""Pairs of the same shape, to be compared."""

PROFILED_MESSAGES = 600
LINES = 70

Opened = Callable[[Shape], AbstractContextManager[Any]]


def steps_ms(opened: Opened, until: float) -> list[dict[str, Any]]:
    """Milliseconds of a step: the median and the least of windows in turn, of each shape."""
    found = []
    for number, shape in enumerate(SHAPES):
        share = time.time() + (until - time.time()) / (len(SHAPES) - number)
        windows: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        with opened(shape) as loop:
            _learn(loop)
            for turn in range(ROUNDS):
                for policy in POLICIES if turn % 2 else POLICIES[::-1]:
                    windows[policy].append(loop.window(policy, most=ROUND_MESSAGES).ms_per_step)
                if time.time() > share:
                    break
        ms = {name: [statistics.median(some), min(some)] for name, some in windows.items()}
        found.append({"requests": shape.requests, "T": shape.temperature, "ms": ms})
        print(found[-1], flush=True)
    return found


def profiles(opened: Opened, until: float) -> dict[str, list[str]]:
    """Of each case, lines of two tables: our functions by file, then the longest of all.

    Nothing begins after ``until``.
    """
    found = {}
    for shape, policy in PROFILED:
        if time.time() > until:
            break
        name = f"{policy}, {shape.requests} requests, T {shape.temperature}"
        profile = cProfile.Profile()
        with opened(shape) as loop:
            _learn(loop)
            window = loop.window(
                policy, most=PROFILED_MESSAGES, begin=profile.enable, end=profile.disable
            )
        stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        messages = window.steps + window.prefills
        found[name] = [
            f"{window.steps} steps and {window.prefills} prefills; us of one",
            *by_file(stats, messages, our_folders()),
            *longest(stats, messages),
        ]
        print(name, *found[name], sep="\n", flush=True)
    return found


def _learn(loop: Any) -> None:
    """`auto` runs as long as in `engine_pairs`."""
    until = time.time() + engine_pairs.LEARN_SECONDS
    while time.time() < until:
        loop.window("auto", most=engine_pairs.LEARN_MESSAGES)


def our_folders() -> list[str]:
    """Folders of this project's packages, as its functions name their files."""
    import overstory.kernels
    import overstory.workers

    return [
        str(Path(package.__file__).parent) for package in (overstory.workers, overstory.kernels)
    ]


def by_file(stats: Mapping[Any, Any], steps: int, folders: list[str]) -> list[str]:
    """Our functions together, by file: microseconds of a step in them, in what they call outside
    Python, and calls.

    Args:
        stats: of `pstats.Stats`: (file, line, name) -> (_, calls, own, total, callers).
    """
    sums: dict[str, list[float]] = {}
    for (file, _line, _name), (_, calls, own, _total, callers) in stats.items():
        if place := _ours(file, folders):
            _add(sums, place, own, 0.0, calls)
        elif file == "~":
            for (caller, *_), (_, _calls, its_own, _) in callers.items():
                if place := _ours(caller, folders):
                    _add(sums, place, 0.0, its_own, 0)
    _add(sums, "all of them", *(sum(row[i] for row in sums.values()) for i in range(3)))
    lines = ["own, outside Python, calls, file of ours"]
    for place, (own, outside, calls) in sorted(sums.items(), key=lambda one: -one[1][0]):
        own_us, outside_us = own / steps * 1e6, outside / steps * 1e6
        lines.append(f"{own_us:8.2f} {outside_us:8.2f} {calls / steps:7.2f} {place}")
    return lines


def _add(
    sums: dict[str, list[float]], place: str, own: float, outside: float, calls: float
) -> None:
    row = sums.setdefault(place, [0.0, 0.0, 0.0])
    for i, value in enumerate((own, outside, calls)):
        row[i] += value


def _ours(file: str, folders: list[str]) -> str:
    """Path of a file below its package's folder with the package's name, or nothing."""
    for folder in folders:
        if file.startswith(f"{folder}/"):
            return file[len(str(Path(folder).parent)) + 1 :]
    return ""


def longest(stats: Mapping[Any, Any], steps: int) -> list[str]:
    """The functions with most time of their own."""
    lines = ["own, with what it calls, calls, function"]
    most = sorted(stats.items(), key=lambda one: one[1][2], reverse=True)[:LINES]
    for (file, line, function), (_, calls, own, total, _) in most:
        place = "/".join(file.split("/")[-3:])
        lines.append(
            f"{own / steps * 1e6:8.2f} {total / steps * 1e6:9.2f} {calls / steps:7.2f} "
            f"{place}:{line}({function})"
        )
    return lines
