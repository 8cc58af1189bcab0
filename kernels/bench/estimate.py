"""How long attention takes on a GPU that was not there: an estimate, never a measurement.

What the loop costs is taken from a measured GPU: time is a line over the granules (16 keys) of the
busiest block, in cycles, of which the matrix instructions are replaced by those of the other GPU.
What bounds a block there is the larger of that and its share of the memory's rate. Which share of
the keys a block should take follows, as in `chunk_of` and `share_out` (cuda/mla_schedule.cuh).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .cases import AttentionCase
from .results import Row

GRANULE, MAX_TILES, THREADS = 16, 9, 256
"""Keys of a step, tiles of 8 rows of a block, threads of a block."""
PART_COST = 0.004
"""`kPartCost`: what a part of a request costs, in granules, for each tile (of eight at least)."""
SECOND_ITEM = 10
"""`kSecondItem`: what a block that begins a second item loses by it, in granules."""
_PADDED_BATCH = 32
"""Requests up to which items are padded to whole shares."""
_MATRIX_INSTRUCTIONS = 17
"""Of a scheduler, for a granule and tile: (36 for scores + 32 for values) / 4 schedulers."""
_RESERVED_SHARED = 1024
"""Bytes that the system takes of each block."""


@dataclass(frozen=True)
class Gpu:
    """What the estimate must know of a GPU."""

    name: str
    sms: int
    clock_hz: float
    bytes_per_s: float
    """Of the memory, sustained."""
    matrix_cycles: float
    """Between two m16n8k16 bf16 products of one scheduler, float32 sums."""
    shared_bytes: int
    """Of a multiprocessor."""
    registers: int = 65_536


H200 = Gpu("H200", 132, 1.98e9, 4.23e12, 6.5, 228 * 1024)
"""Clock and rates as measured with the kernels (docs/kernels-attention.md, "What bounds it")."""
RTX_PRO_6000 = Gpu("RTX PRO 6000", 188, 2.4e9, 1.55e12, 16.0, 100 * 1024)
"""Of 1.79 TB/s what kernels on this memory reach; 1,024 FLOP a cycle and multiprocessor."""


@dataclass(frozen=True)
class Loop:
    """A kernel of one width on the measured GPU."""

    granule_us: float
    outside_us: float
    """Launch, queries, schedule, the end: what the number of granules does not change."""


@dataclass(frozen=True)
class Share:
    """How the keys of a launch are shared out."""

    min_chunk: int
    """What asks for it (`Schedule.min_chunk`); 0 is the kernel's own choice."""
    granules: int
    """Of a block."""
    parts: int
    crosses: bool
    """Blocks work on two items."""

    def cost(self, tiles: int) -> float:
        """The time of the busiest block, and what putting parts together takes, in granules."""
        second = SECOND_ITEM if self.crosses else 0
        return self.granules + second + self.parts_cost(tiles)

    def parts_cost(self, tiles: int) -> float:
        """What putting parts together takes, in granules."""
        return PART_COST * max(tiles, 8) * self.parts


@dataclass(frozen=True)
class Estimate:
    """Of one shape on one GPU; times in us."""

    blocks: int
    share: Share
    """The tuned split."""
    us: float
    memory_us: float
    """The keys once, at the memory's rate."""
    bound: str
    """What most of the time goes to: "memory", "instructions" or "outside". Where memory is it, the
    best share leaves multiprocessors idle: fewer parts, and the memory is busy all the same."""


def tiles_of(heads: int, rows: int) -> tuple[int, int]:
    """Tiles of a block and row tiles of a request, as `tiles_for` in cuda/mla_attention.cu."""
    tiles = -(-heads * rows // 8)
    row_tiles = -(-tiles // MAX_TILES)
    return -(-tiles // row_tiles), row_tiles


def blocks_per_sm(gpu: Gpu, registers: int, shared_bytes: int) -> int:
    """Blocks of a compiled kernel that a multiprocessor holds.

    Args:
        registers: of a thread; handed out by eight.
        shared_bytes: of a block, dynamic and static.
    """
    of_a_block = -(-registers // 8) * 8 * THREADS
    return min(gpu.registers // of_a_block, gpu.shared_bytes // (shared_bytes + _RESERVED_SHARED))


def items_of(case: AttentionCase) -> tuple[int, int]:
    """Row tiles of all requests, and the granules of each."""
    _, row_tiles = tiles_of(case.heads, case.q)
    return case.bs * row_tiles, -(-(case.context + case.tail) // GRANULE)


def chosen_share(case: AttentionCase, blocks: int) -> Share:
    """What the kernel chooses by itself: `share_out`."""
    items, granules = items_of(case)
    tiles, _ = tiles_of(case.heads, case.q)
    units = items * granules
    least = max(1, int((PART_COST * max(tiles, 8) * units) ** 0.5 + 0.5))
    even = max(-(-units // blocks), least)
    if case.bs <= _PADDED_BATCH and items > 1:
        for chunk in range(even, even + SECOND_ITEM + 1):
            parts = items * -(-granules // chunk)
            if parts <= blocks:
                return Share(0, chunk, parts, crosses=False)
    return even_share(case, even, 0)


def even_share(case: AttentionCase, chunk: int, min_chunk: int) -> Share:
    """`chunk` granules to each block, whichever items they are of."""
    items, granules = items_of(case)
    crosses = items > 1 and granules % chunk != 0
    # A block that works on two items writes a part of each.
    parts = -(-items * granules // chunk) + (items - 1 if crosses else 0)
    return Share(min_chunk, chunk, parts, crosses)


def fit_loops(rows: Iterable[Row], blocks: dict[int, int]) -> dict[int, Loop]:
    """The line through our measured rows of each width, by tiles.

    Args:
        rows: of a results file; others than ours in bf16 are left out.
        blocks: of the measured launches, by tiles.

    Returns:
        widths with two different sizes at least.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if row.impl != "ours" or "attention" not in row.op or row.kv_dtype != "bf16":
            continue
        case = AttentionCase(row.op, row.bs, row.q, row.context, row.heads)
        tiles, _ = tiles_of(row.heads, row.q)
        if tiles not in blocks:
            continue
        cost = chosen_share(case, blocks[tiles]).cost(tiles)
        points.setdefault(tiles, []).append((cost, row.us_median))
    return {tiles: _line(found) for tiles, found in points.items() if len(set(found)) > 1}


def _line(points: Sequence[tuple[float, float]]) -> Loop:
    """Least squares of the relative errors: short launches count as much as long ones."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
        / spread
    )
    return Loop(slope, mean_y - slope * mean_x)


def estimate(case: AttentionCase, gpu: Gpu, loop: Loop, per_sm: int, measured: Gpu) -> Estimate:
    """The best split of a shape on `gpu`, and its time.

    Args:
        loop: of the shape's width, on `measured`.
        per_sm: blocks of the kernel compiled for `gpu` that one of its multiprocessors holds.
    """
    tiles, _ = tiles_of(case.heads, case.q)
    blocks = gpu.sms * per_sm
    items, granules = items_of(case)
    more = _MATRIX_INSTRUCTIONS * tiles * (gpu.matrix_cycles - measured.matrix_cycles)
    granule_us = (loop.granule_us * measured.clock_hz / 1e6 + more) / gpu.clock_hz * 1e6
    memory_us = case.kv_bytes / gpu.bytes_per_s * 1e6

    def inside(share: Share) -> float:
        busiest = (share.cost(tiles) - share.parts_cost(tiles)) * granule_us
        return max(busiest, memory_us) + share.parts_cost(tiles) * granule_us

    least = -(-items * granules // blocks)
    tuned = [even_share(case, chunk, chunk) for chunk in range(least, least + 64)]
    share = min([*tuned, chosen_share(case, blocks)], key=inside)
    us = loop.outside_us + inside(share)
    if 2 * loop.outside_us > us:
        bound = "outside"
    else:
        bound = "memory" if memory_us > least * granule_us else "instructions"
    return Estimate(blocks, share, us, memory_us, bound)
