"""The ranks of a new replica meet those of the one that gives its weights: real communicators, a
scripted Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from overstory.kernels import ops
from overstory.orchestrator import weight_donor
from overstory.orchestrator.weight_donor import Donor, find_donor
from overstory.workers.handoff import identity, rank_side
from overstory.workers.handoff.loading import SHELF
from overstory.workers.handoff.pieces import Piece
from overstory.workers.handoff.rank_side import RankSide


def side() -> RankSide:
    return RankSide("cpu", lambda: 0, lambda: "127.0.0.1")


class Ranks:
    """Actors by name; a call runs in a thread of its own, as in a rank's control group."""

    def __init__(self, pool: ThreadPoolExecutor, count: int) -> None:
        self._pool = pool
        self.givers = {f"tiny-old-{n}": side() for n in range(count)}
        self.takers = [side() for _ in range(count)]

    def get_actor(self, name: str, _namespace: str) -> RankSide:
        if name not in self.givers:
            raise ValueError(f"no actor {name}")
        return self.givers[name]

    def call(self, actor: RankSide, _group: str, method: str, *arguments: Any) -> Future[Any]:
        assert method == "peer"
        name, *rest = arguments
        return self._pool.submit(getattr(actor, name), *rest)

    @staticmethod
    def get(what: Any, timeout: float) -> Any:
        if isinstance(what, list):
            return [one.result(timeout) for one in what]
        return what.result(timeout)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    with ThreadPoolExecutor(8) as pool:

        def make(count: int) -> Ranks:
            made = Ranks(pool, count)
            monkeypatch.setattr(weight_donor, "call", made.call)
            monkeypatch.setattr(weight_donor, "rank_name", lambda *parts: "-".join(map(str, parts)))
            monkeypatch.setattr(ray, "get_actor", made.get_actor)
            monkeypatch.setattr(ray, "get", made.get)
            return made

        yield make


def test_rank_meets_rank_and_nothing_stays(
    ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ranks(2)
    given = torch.arange(7, dtype=torch.uint8)

    def give(order: Any, _piece_bytes: int) -> Any:
        return [Piece(7, lambda staging: staging.copy_(given + order["n"]))], lambda: True

    monkeypatch.setattr(SHELF, "give", give)
    donor = Donor("tiny", "old")
    name = donor.meet(there.takers)
    assert name.startswith("weights-old-")
    for number, taker in enumerate(there.takers):
        came = torch.zeros(7, dtype=torch.uint8)
        taken = taker._peers.taker(name).take(
            {"what": "weights", "n": number}, [Piece(7, lambda staging, to=came: to.copy_(staging))]
        )
        assert taken.bytes == 7
        assert torch.equal(came, given + number)
        taker.close(name)
    for rank in (*there.takers, *there.givers.values()):
        (meeting,) = rank.meetings()
        assert meeting["name"] == name
        assert abs(meeting["at"] - time.time()) < 60
        assert 0 <= meeting["met_s"] < 60
        closed = rank in there.takers
        assert ("closed_s" in meeting) == closed
        assert not closed or meeting["closed_at"] >= meeting["at"]
        assert 0 <= meeting.get("closed_s", 0.0) < 60
    donor.part()
    assert all("closed_s" in rank.meetings()[0] for rank in there.givers.values())
    donor.part()
    for giver in there.givers.values():
        assert giver._peers._open == {}


def test_a_rank_does_not_wait_for_the_end_of_what_brought_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("identity_of", "weights_settings", "weights_move"):
        monkeypatch.setattr(identity, name, lambda *_: "")
    rank, may_close, closed = side(), threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        assert name == "weights-old-1"
        may_close.wait(20.0)
        closed.set()

    monkeypatch.setattr(rank, "close", slowly)
    server_args: Any = None
    with rank.loading(server_args, 0, "weights-old-1"):
        assert not closed.is_set()
    may_close.set()
    assert closed.wait(20.0)
    assert SHELF.source is None


def test_nccl_meets_where_others_reach_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for an interface once in a process: before its libraries are there."""
    asked: list[str] = []

    def no_kernels(_: torch.device) -> str:
        asked.append("kernels")
        raise RuntimeError("no GPU")

    monkeypatch.setattr(rank_side, "meet_nccl_over_network", asked.append)
    monkeypatch.setattr(ops, "prepare", no_kernels)
    rank = RankSide("cuda", lambda: 0, lambda: "192.0.2.7")
    with pytest.raises(RuntimeError, match="no GPU"):
        rank.open("weights-old-1", "nccl", b"{}", 1.0)
    assert asked == ["192.0.2.7", "kernels"]


def test_a_replica_that_cannot_give_leaves_it_to_the_disk(
    ranks: Callable[[int], Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    there = ranks(2)
    del there.givers["tiny-old-1"]
    assert Donor("tiny", "old").meet(there.takers) == ""
    assert "weights come from disk, replica old cannot give: no actor tiny-old-1" in caplog.text


def test_nobody_to_ask_gives_no_donor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_donor, "find_controller", lambda deployment: None)
    assert find_donor("tiny") is None
    answers = iter(["", "old"])
    controller = SimpleNamespace(donor=SimpleNamespace(remote=lambda: next(answers)))
    monkeypatch.setattr(weight_donor, "find_controller", lambda deployment: controller)
    monkeypatch.setattr(ray, "get", lambda what, timeout: what)
    assert find_donor("tiny") is None
    found = find_donor("tiny")
    assert found is not None
    assert found.replica == "old"
