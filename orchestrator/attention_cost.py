"""Time of the verify attention, from measurements of our kernel. Pure.

The measured kernel is bound by latency: its time is a start and then, for every granule of 16 keys
that a streaming multiprocessor has to walk, a constant that grows with the rows that share the
keys. Both are read off the measured points; another GPU is taken to walk granules at its clock's
rate, and never faster than its memory and its tensor cores allow.
"""

import functools
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEASURED_PATH = Path(__file__).with_name("attention_measured.json")
GRANULE = 16
KEY_BYTES = 1152
"""One key of an MLA cache in bfloat16: 512 latent and 64 rotary columns."""
FLOPS_PER_ROW_AND_KEY = 2 * (576 + 512)


@dataclass(frozen=True)
class MeasuredPoint:
    """One launch: `batch` requests of `rows` tree rows and `heads` heads over `context` keys."""

    batch: int
    rows: int
    heads: int
    context: int
    seconds: float


@dataclass(frozen=True)
class Walk:
    """Seconds to start and for each granule, with `shared` query rows (tree rows times heads)."""

    shared: int
    start: float
    granule: float


@functools.cache
def measured() -> tuple[str, int, tuple[MeasuredPoint, ...]]:
    """Where the points come from, multiprocessors of that GPU, the points."""
    document = json.loads(MEASURED_PATH.read_text())
    points = tuple(MeasuredPoint(**row) for row in document["points"])
    return document["source"], document["sms"], points


def granules(batch: int, context: int, sms: int) -> float:
    """Granules that one multiprocessor walks."""
    return batch * context / GRANULE / sms


@functools.cache
def walks() -> tuple[Walk, ...]:
    """A line through the first and last measured point of each number of shared rows."""
    _, sms, points = measured()
    found = []
    for shared in sorted({point.rows * point.heads for point in points}):
        rows = sorted(
            (granules(p.batch, p.context, sms), p.seconds)
            for p in points
            if p.rows * p.heads == shared
        )
        (few, soon), (many, late) = rows[0], rows[-1]
        if many > few:
            slope = (late - soon) / (many - few)
            found.append(Walk(shared, soon - slope * few, slope))
    return tuple(found)


def _between(shared: int, lines: Sequence[Walk]) -> Walk:
    """The line for any number of rows: between the nearest measured, in proportion beyond."""
    at = bisect_left([line.shared for line in lines], shared)
    if at == 0:
        return Walk(shared, lines[0].start, lines[0].granule)
    if at == len(lines):
        last = lines[-1]
        return Walk(shared, last.start, last.granule * shared / last.shared)
    low, high = lines[at - 1], lines[at]
    part = (shared - low.shared) / (high.shared - low.shared)
    return Walk(
        shared,
        low.start + part * (high.start - low.start),
        low.granule + part * (high.granule - low.granule),
    )


def attention_seconds(
    batch: int,
    rows: int,
    heads: int,
    context: int,
    sms: int,
    speed: float,
    dram: float,
    flops: float,
) -> float:
    """Seconds of one layer's verify attention on one rank.

    Args:
        batch, rows, context: requests, tree rows of each, keys of each.
        heads: query heads on the rank.
        sms: multiprocessors of the GPU.
        speed: its clock over that of the measured GPU.
        dram, flops: bytes per second and operations per second that it reaches.
    """
    line = _between(rows * heads, walks())
    walked = line.granule * granules(batch, context, sms) / speed
    memory = batch * context * KEY_BYTES / dram
    compute = batch * context * rows * heads * FLOPS_PER_ROW_AND_KEY / flops
    return line.start / speed + max(walked, memory, compute)
