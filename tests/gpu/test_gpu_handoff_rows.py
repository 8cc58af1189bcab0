"""The kernel that moves KV rows of all layers at once: it does what the layers' copies do."""

from __future__ import annotations

import pytest
import torch

from overstory.workers.handoff.row_kernel import RowKernel, suits
from overstory.workers.handoff.rows import RowTable

pytest.importorskip("cupy")

SLOTS = 3000
SHAPES = {
    "mla": [(1, 576, torch.bfloat16)] * 5,
    "mla and a drafter": [(1, 576, torch.bfloat16)] * 3 + [(2, 128, torch.bfloat16)] * 4,
    "e4m3": [(1, 576, torch.float8_e4m3fn)] * 2,
    "one odd": [(1, 576, torch.bfloat16), (1, 3, torch.int16)],
}


def pool(shapes: list[tuple[int, int, torch.dtype]], seed: int) -> list[torch.Tensor]:
    draw = torch.Generator("cuda").manual_seed(seed)
    return [
        torch.randint(
            0, 255, (SLOTS, heads * width * dtype.itemsize), generator=draw, device="cuda"
        )
        .to(torch.uint8)
        .view(dtype)
        .view(SLOTS, heads, width)
        for heads, width, dtype in shapes
    ]


def by_layer(table: RowTable) -> RowTable:
    for group in table._groups:
        group._kernel = None
    return table


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 7, 2000])
def test_rows_there_and_back(name: str, count: int) -> None:
    shapes = SHAPES[name]
    mine, theirs = pool(shapes, 1), pool(shapes, 2)
    draw = torch.Generator().manual_seed(count)
    slots = torch.randperm(SLOTS, generator=draw)[:count].cuda()
    others = torch.randperm(SLOTS, generator=draw)[:count].cuda()
    wanted = [one.clone() for one in theirs]
    for source, target in zip(mine, wanted, strict=True):
        target.view(torch.uint8)[others] = source.view(torch.uint8)[slots]
    for made in (RowTable, lambda buffers: by_layer(RowTable(buffers))):
        taker = [one.clone() for one in theirs]
        gather = RowTable(mine).gather(slots, 1 << 20)
        for piece, other in zip(gather, made(taker).scatter(others, 1 << 20), strict=True):
            staging = torch.zeros(piece.size, dtype=torch.uint8, device="cuda")
            piece.move(staging)
            other.move(staging)
        for seen, want in zip(taker, wanted, strict=True):
            assert torch.equal(seen.view(torch.uint8), want.view(torch.uint8))


def test_which_tensors_it_takes() -> None:
    rows = [one.view(torch.uint8).view(SLOTS, -1) for one in pool(SHAPES["mla"], 3)]
    assert suits(rows)
    kernel = RowKernel.of(rows)
    assert kernel is not None
    slots = torch.arange(4, device="cuda")
    with pytest.raises(ValueError, match=r"take 23040 aligned bytes, got 23056"):
        kernel.move(slots, torch.zeros(23056, dtype=torch.uint8, device="cuda"), False)
    assert not suits([rows[0][:, 4:20].contiguous()[1:, :15].contiguous()])
