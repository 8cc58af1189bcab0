"""The estimate for a GPU that is not there: its parts, and what it says of the one that was."""

from pathlib import Path

import pytest

from overstory.kernels import build
from overstory.kernels.bench.cases import GOALS, AttentionCase
from overstory.kernels.bench.estimate import (
    H200,
    PART_COST,
    RTX_PRO_6000,
    SECOND_ITEM,
    Loop,
    Share,
    blocks_per_sm,
    chosen_share,
    estimate,
    even_share,
    fit_loops,
    tiles_of,
)
from overstory.kernels.bench.results import read_rows

STORED = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernels_h200.csv"
BLOCKS = {tiles: 264 if tiles <= 3 else 132 for tiles in range(1, 10)}


def verify(bs: int, q: int, context: int) -> AttentionCase:
    return AttentionCase("verify_attention", bs, q, context)


@pytest.mark.parametrize(
    ("registers", "shared", "h200", "rtx"),
    [(255, 98_000, 1, 1), (128, 93_000, 2, 1), (128, 49_000, 2, 2), (64, 10_000, 4, 4)],
)
def test_blocks_of_a_multiprocessor(registers: int, shared: int, h200: int, rtx: int) -> None:
    assert blocks_per_sm(H200, registers, shared) == h200
    assert blocks_per_sm(RTX_PRO_6000, registers, shared) == rtx


@pytest.mark.parametrize(
    ("q", "expected"), [(1, (1, 1)), (9, (9, 1)), (17, (9, 2)), (33, (9, 4)), (64, (8, 8))]
)
def test_row_tiles_are_those_of_the_kernel(q: int, expected: tuple[int, int]) -> None:
    assert tiles_of(8, q) == expected


@pytest.mark.parametrize(
    ("bs", "q", "context", "granules", "parts", "crosses"),
    [
        # One item: 2 granules at 1k and 4 at 8k were fastest on an H200.
        (1, 9, 1024, 2, 33, False),
        (1, 9, 8192, 4, 129, False),
        (1, 9, 65_536, 32, 129, False),
        # Several: shares of 63 would be even, of 65 every item begins with a block of its own.
        (16, 9, 8192, 65, 128, False),
        (4, 9, 8192, 16, 132, False),
        # Eight row tiles: shares of 782 would do, 24 more than the even ones. Seven blocks cross.
        (1, 64, 200_000, 758, 139, True),
        # More requests than are padded.
        (33, 9, 8192, 129, 164, True),
    ],
)
def test_the_kernel_s_own_share(
    bs: int, q: int, context: int, granules: int, parts: int, crosses: bool
) -> None:
    assert chosen_share(verify(bs, q, context), 132) == Share(0, granules, parts, crosses)


def test_a_block_on_two_items_costs_more() -> None:
    case = verify(4, 9, 8192)
    crossing, own = even_share(case, 16, 16), chosen_share(case, 132)
    assert (crossing.granules, own.granules) == (16, 16)
    assert crossing.cost(9) > own.cost(9) + 9
    assert not even_share(case, 513, 513).crosses


def test_the_model_gives_back_what_was_measured() -> None:
    """Of the H200 itself, from which it is: within a tenth at every shape with a goal."""
    rows = read_rows(STORED)
    loops = fit_loops(rows, BLOCKS)
    ours = {
        (r.op, r.bs, r.q, r.context): r.us_median
        for r in rows
        if r.impl == "ours" and "attention" in r.op and r.kv_dtype == "bf16"
    }
    checked = 0
    for case in GOALS:
        tiles, _ = tiles_of(case.heads, case.q)
        measured = ours.get((case.op, case.bs, case.q, case.context))
        if measured is None or tiles not in loops:
            continue
        loop = loops[tiles]
        us = loop.outside_us + loop.granule_us * chosen_share(case, BLOCKS[tiles]).cost(tiles)
        assert us == pytest.approx(measured, rel=0.1), case
        checked += 1
    assert checked == len(GOALS)


def test_memory_bounds_small_trees_and_instructions_large_ones() -> None:
    loop = Loop(granule_us=1.5, outside_us=12.0)
    small = estimate(verify(1, 9, 200_000), RTX_PRO_6000, loop, 1, H200)
    large = estimate(verify(1, 64, 200_000), RTX_PRO_6000, loop, 1, H200)
    assert (small.bound, large.bound) == ("memory", "instructions")
    for found in (small, large):
        assert found.us > found.memory_us
        assert found.blocks == 188
    assert estimate(verify(1, 1, 1024), RTX_PRO_6000, loop, 1, H200).bound == "outside"


def test_a_faster_loop_or_more_multiprocessors_are_never_slower() -> None:
    case, loop = verify(1, 33, 65_536), Loop(1.5, 12.0)
    times = [
        estimate(case, gpu, Loop(us, 12.0), 1, H200).us
        for gpu, us in ((RTX_PRO_6000, 2.0), (RTX_PRO_6000, 1.5), (RTX_PRO_6000, 1.0))
    ]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    # A part of each block, and one more of those that may work on two of the four row tiles.
    found = estimate(case, RTX_PRO_6000, loop, 1, H200)
    assert found.share.parts <= found.blocks + 3


def test_constants_are_those_of_the_kernel() -> None:
    source = (build.SOURCES / "mla_schedule.cuh").read_text()
    assert f"kPartCost = {PART_COST}f;" in source
    assert f"kSecondItem = {SECOND_ITEM};" in source
