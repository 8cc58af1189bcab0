"""What a part of the texts is asked for with, and what is given for it: all of it by one order, so
that several sequences are one stream of pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overstory.workers.handoff.cached import Held, Reserved
from overstory.workers.handoff.commands import KvHandoff, _Order
from overstory.workers.handoff.pieces import Carried
from overstory.workers.handoff.rows import RowTable
from overstory.workers.handoff.taking import KvTaking, Move, _Part, _Session

ROWS = torch.arange(40 * 4, dtype=torch.int64).view(40, 4)
SLOTS = (torch.tensor([7, 3, 9, 1]), torch.tensor([20, 30]))


def giving() -> KvHandoff:
    kv = KvHandoff()
    kv._table = RowTable([ROWS.clone()])
    kv._held["k"] = _Order(1, ["a", "b"], [Held(slots, None) for slots in SLOTS])
    return kv


def order(**more: Any) -> dict[str, Any]:
    known = {"key": "k", "identity": "", "rows": RowTable([ROWS]).described()}
    return known | {"moves": [(1, 0, 2), (0, 1, 4)]} | more


def test_rows_of_several_texts_are_one_stream() -> None:
    kv = giving()
    pieces, stands = kv.give(order(), 3 * 32)
    came = []
    for piece in pieces:
        staging = torch.zeros(piece.size, dtype=torch.uint8)
        piece.move(staging)
        came.append(staging.view(torch.int64).view(-1, 4))
    assert [len(part) for part in came] == [3, 2], "pieces do not end where texts do"
    assert torch.equal(torch.cat(came), ROWS[[20, 30, 3, 9, 1]])
    assert stands()
    kv._held.clear()
    assert not stands()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"key": "other"}, "nothing is held under 'other'"),
        ({"identity": "other"}, "not have the same weights"),
        ({"rows": [8]}, "not have the same weights or KV layout"),
        ({"moves": [(0, 0, 5)]}, r"rows 0 to 5 of text 0; held are \[4, 2\]"),
        ({"moves": [(0, 0, 4), (2, 0, 1)]}, "rows 0 to 1 of text 2"),
        ({"moves": [(-1, 0, 1)]}, "rows 0 to 1 of text -1"),
        ({"moves": [(0, 2, 2)]}, "rows 2 to 2 of text 0"),
        ({"moves": [(0, -1, 2)]}, "rows -1 to 2 of text 0"),
    ],
)
def test_what_is_not_held_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        giving().give(order(**more), 64)


def test_a_part_is_one_order() -> None:
    """A text that another one brings is not in it."""
    asked: list[Any] = []

    def take(what: Any, pieces: Any) -> Carried:
        asked.append((what, [piece.size for piece in pieces]))
        return Carried(0, 0.0)

    taker = SimpleNamespace(take=take, piece_bytes=128)
    peers: Any = SimpleNamespace(taker=lambda name: taker)
    taking = KvTaking(lambda: peers, lambda _: RowTable([ROWS]), lambda: "same")
    moves = [Move(0, 2, 5), Move(1, 4, 4), Move(2, 1, 3)]
    part = _Part(moves, Reserved(torch.arange(5), None))
    session = _Session(1, "k", "kv-old-new", [], part)
    scheduler: Any = None
    taking._fetcher(scheduler, session, part)()
    ((what, sizes),) = asked
    assert what["moves"] == [(0, 2, 5), (2, 1, 3)]
    assert (what["key"], what["identity"]) == ("k", "same")
    assert sum(sizes) == 5 * 32
