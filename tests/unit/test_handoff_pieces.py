"""KV rows and weights in pieces, between processes: what comes is what was sent, or it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peer_process import group
from torch import nn

from overstory.workers.collectives import Communicator
from overstory.workers.handoff.pieces import Conveyor, Garbled, Piece
from overstory.workers.handoff.rows import RowTable
from overstory.workers.handoff.weights import WeightTable, fingerprint

PIECE = 1 << 13
SLOTS = 50
SHAPES = ((1, 576, torch.bfloat16), (2, 9, torch.float32), (1, 3, torch.int16))


def _pool(seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-99, 99, (SLOTS, heads, width), generator=draw).to(dtype)
        for heads, width, dtype in SHAPES
    ]


MINE = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[:37]
THEIRS = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))[:37]


def _take_rows(comm: Communicator) -> list[torch.Tensor]:
    pool = _pool(2)
    conveyor = Conveyor(comm, PIECE)
    conveyor.receive(RowTable(pool).scatter(THEIRS, conveyor.piece_bytes), 0)
    return pool


def test_rows_come_into_their_slots_and_no_others() -> None:
    with group(_take_rows) as (comm, peers):
        pool, conveyor = _pool(1), Conveyor(comm, PIECE)
        table = RowTable(pool)
        assert table.row_bytes == 576 * 2 + 2 * 9 * 4 + 3 * 2
        done = conveyor.send(table.gather(MINE, conveyor.piece_bytes), 1)
        assert done.bytes == 37 * table.row_bytes > 3 * PIECE
        wanted = _pool(2)
        for mine, theirs in zip(pool, wanted, strict=True):
            theirs[THEIRS] = mine[MINE]
        for seen, want in zip(peers[0].result(), wanted, strict=True):
            assert torch.equal(seen, want)


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(70, 90), nn.LayerNorm(90), nn.Linear(90, 3, bias=False))
    model[2].weight = nn.Parameter(model[0].weight[:3, :].detach().repeat(1, 2)[:, :90])
    model[1].register_buffer("steps", torch.arange(seed, seed + 5))
    model[0].absorbed = torch.randn(6, 50).t()
    model[0].parts = [torch.randn(3), torch.randn(0)]
    model[0].half = model[0].absorbed[:, 3:]
    return model


def _take_weights(comm: Communicator) -> list[torch.Tensor]:
    model = _model(2)
    conveyor = Conveyor(comm, PIECE)
    conveyor.receive(WeightTable(model).scatter(conveyor.piece_bytes), 0)
    first = model[0]
    assert first.half.data_ptr() == first.absorbed[:, 3:].data_ptr(), "still views of each other"
    return [*model.state_dict().values(), first.absorbed, first.half, first.parts[0]]


def test_weights_come_whole_with_what_is_no_parameter() -> None:
    model = _model(1)
    table = WeightTable(model)
    assert table.layout == WeightTable(_model(2)).layout
    with group(_take_weights) as (comm, peers):
        conveyor = Conveyor(comm, PIECE)
        assert conveyor.send(table.gather(conveyor.piece_bytes), 1).bytes >= table.bytes > PIECE
        first = model[0]
        wanted = [*model.state_dict().values(), first.absorbed, first.half, first.parts[0]]
        for seen, want in zip(peers[0].result(), wanted, strict=True):
            assert torch.equal(seen, want)


def test_models_that_differ_have_another_layout() -> None:
    other = _model(1)
    other[0].absorbed = other[0].absorbed.contiguous()
    assert WeightTable(other).layout != WeightTable(_model(1)).layout


def _take_anything(comm: Communicator) -> str:
    try:
        Conveyor(comm, PIECE).receive([Piece(n, lambda staging: None) for n in (700, PIECE, 9)], 0)
    except Garbled as error:
        return str(error)
    return "all is well"


@pytest.mark.parametrize("flipped", [None, 0, 699, PIECE - 1])
def test_a_bit_that_flips_on_the_way_shows(
    flipped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = Conveyor._seal

    def spoil(self: Conveyor, staging: torch.Tensor, size: int) -> None:
        seal(self, staging, size)
        if flipped is not None and flipped < size:
            staging[flipped] ^= 16

    monkeypatch.setattr(Conveyor, "_seal", spoil)
    with group(_take_anything) as (comm, peers):
        pieces = [Piece(n, lambda staging: staging.fill_(7)) for n in (700, PIECE, 9)]
        Conveyor(comm, PIECE).send(pieces, 1)
        said = peers[0].result()
        assert said == "all is well" if flipped is None else "wrong checksum" in said


def test_rows_that_change_places_show() -> None:
    """The plain sum would not tell."""
    from overstory.workers.collectives import Door, Seat, connect

    comm = connect("tcp", Seat("alone", 0, 1), Door(), torch.device("cpu"))
    conveyor = Conveyor(comm, 2 * PIECE)
    staging = torch.randint(0, 255, (2 * PIECE,), dtype=torch.uint8)
    swapped = staging.roll(PIECE)
    assert not torch.equal(
        conveyor._checksum(staging, 2 * PIECE), conveyor._checksum(swapped, 2 * PIECE)
    )
    comm.close()


def test_a_row_larger_than_a_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 1230 bytes, a piece 1000"):
        next(RowTable(_pool(1)).gather(MINE, 1000))


def test_a_checkpoint_s_fingerprint_follows_its_bytes(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(300_000))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("one")
    before = fingerprint(tmp_path)
    (tmp_path / "notes.txt").write_text("two")
    assert fingerprint(tmp_path) == before
    for place in (0, 150_000, 299_999):
        changed = bytearray(300_000)
        changed[place] = 1
        weights.write_bytes(bytes(changed))
        assert fingerprint(tmp_path) != before
