"""The hand-off's pieces by the kernel that moves rows of all layers: what the reference does."""

from __future__ import annotations

import pytest
import torch

from overstory.workers.handoff.rows import RowTable

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


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 7, 2000])
def test_rows_there_and_back(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = SHAPES[name]
    mine, theirs = pool(shapes, 1), pool(shapes, 2)
    draw = torch.Generator().manual_seed(count)
    slots = torch.randperm(SLOTS, generator=draw)[:count].cuda()
    others = torch.randperm(SLOTS, generator=draw)[:count].cuda()
    wanted = [one.clone() for one in theirs]
    for source, target in zip(mine, wanted, strict=True):
        target.view(torch.uint8)[others] = source.view(torch.uint8)[slots]
    for choice in ("cuda", "reference"):
        monkeypatch.setenv("OVERSTORY_KERNELS", choice)
        taker = [one.clone() for one in theirs]
        gather = RowTable(mine).gather(slots, 1 << 20)
        for piece, other in zip(gather, RowTable(taker).scatter(others, 1 << 20), strict=True):
            staging = torch.zeros(piece.size, dtype=torch.uint8, device="cuda")
            piece.move(staging)
            other.move(staging)
        for seen, want in zip(taker, wanted, strict=True):
            assert torch.equal(seen.view(torch.uint8), want.view(torch.uint8))
