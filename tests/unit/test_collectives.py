"""Communicators over TCP, between real processes: they carry tensors, name who is missing, notice
who dies, and leave nothing behind."""

from __future__ import annotations

import fcntl
import gc
import json
import signal
import socket
import sys
import termios
import threading
import time

import pytest
import torch
from peer_process import CPU, Peer, group, held, native_threads

from overstory.workers.collectives import (
    CollectiveError,
    CollectivesUnavailable,
    Communicator,
    Door,
    PeerLost,
    RankMissing,
    Seat,
    TransferTimeout,
    connect,
    meeting,
    nccl,
)
from overstory.workers.collectives.meeting import Line

AWAY_S = 8.0
"""A loss must show long before the transfer's own limit, and this is before it."""


def _exchange(comm: Communicator) -> list[object]:
    """The other ranks' part of `test_every_operation_carries_what_it_was_given`."""
    there = torch.zeros(5, dtype=torch.bfloat16)
    comm.receive(there, 0)
    comm.send(there * 2, 0)
    shared = torch.zeros(2, 3, dtype=torch.int64)
    comm.broadcast(shared, 0)
    parts = comm.all_gather(torch.full((2,), comm.rank))
    comm.wait()
    asked_by, word = comm.hear(5.0)
    assert asked_by == 0
    comm.tell([*word, comm.rank], 0)
    return [there.tolist(), shared.tolist(), [part.tolist() for part in parts]]


def test_every_operation_carries_what_it_was_given() -> None:
    with group(_exchange, size=3) as (comm, peers):
        given = torch.arange(5, dtype=torch.bfloat16)
        for rank in (1, 2):
            comm.send(given * rank, rank)
            back = torch.zeros(5, dtype=torch.bfloat16)
            comm.receive(back, rank)
            assert torch.equal(back, given * rank * 2)
        whole = torch.arange(6).view(2, 3)
        comm.broadcast(whole, 0)
        assert [part.tolist() for part in comm.all_gather(torch.full((2,), 0))] == [
            [0, 0],
            [1, 1],
            [2, 2],
        ]
        for rank in (1, 2):
            comm.tell(["word", rank], rank)
        assert sorted(comm.hear(5.0) for _ in peers) == [(1, ["word", 1, 1]), (2, ["word", 2, 2])]
        for rank, peer in enumerate(peers, 1):
            seen = peer.result()
            assert seen == [(given * rank).tolist(), whole.tolist(), [[0, 0], [1, 1], [2, 2]]]


def _receive_for_ever(comm: Communicator) -> None:
    piece = torch.empty(1 << 22, dtype=torch.uint8)
    while True:
        comm.receive(piece, 0)


def test_a_peer_killed_during_a_transfer_is_named_in_bounded_time() -> None:
    with group(_receive_for_ever, transfer_s=60.0) as (comm, peers):
        piece = torch.empty(1 << 22, dtype=torch.uint8)
        for _ in range(4):
            comm.send(piece, 1)
        peers[0].signal(signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 ended or was cut off") as caught:
            _send_many(comm, piece, 10_000)
        assert caught.value.rank == 1
        assert time.monotonic() - begun < AWAY_S
        with pytest.raises(PeerLost):
            comm.receive(piece, 1)


def _send_many(comm: Communicator, piece: torch.Tensor, times: int) -> None:
    for _ in range(times):
        comm.send(piece, 1)


def _wait_for_news(comm: Communicator) -> str:
    try:
        comm.receive(torch.empty(8), 0)
    except PeerLost as lost:
        return f"rank {lost.rank}"
    return "nothing"


def test_a_loss_reaches_ranks_that_wait_for_others() -> None:
    with group(_wait_for_news, size=3, transfer_s=60.0) as (_, peers):
        peers[0].signal(signal.SIGKILL)
        assert peers[1].result(AWAY_S) == "rank 1"


@pytest.mark.full
def test_a_stopped_peer_is_given_up_after_the_limit() -> None:
    with group(_receive_for_ever, transfer_s=1.0) as (comm, peers):
        peers[0].signal(signal.SIGSTOP)
        piece = torch.empty(1 << 22, dtype=torch.uint8)
        begun = time.monotonic()
        with pytest.raises(TransferTimeout, match="rank 1 took over 1 s"):
            _send_many(comm, piece, 64)  # more than any socket buffers
        assert time.monotonic() - begun < AWAY_S


def test_a_rank_that_does_not_come_is_named_to_all() -> None:
    door = Door()
    peer = Peer(door.ticket, Seat("test", 2, 4), _exchange, 5.0)
    try:
        with pytest.raises(RankMissing, match=r"ranks 1, 3 did not come in 0\.5 s") as caught:
            connect("tcp", Seat("test", 0, 4), door, CPU, init_s=0.5)
        assert caught.value.ranks == (1, 3)
        with pytest.raises(RuntimeError, match=r"RankMissing: .*ranks 1, 3"):
            peer.result()
    finally:
        peer.end()


def test_a_door_that_is_gone_is_rank_0_missing() -> None:
    door = Door()
    door.close()
    with pytest.raises(RankMissing, match="rank 0 did not come"):
        connect("tcp", Seat("test", 1, 2), door.ticket, CPU, init_s=0.3)


@pytest.mark.full
def test_strangers_do_not_get_in() -> None:
    """Another incarnation, a forged ticket, a taken seat, someone who says nothing of the kind."""
    door = Door()
    where = json.loads(door.ticket)
    forged = json.dumps(where | {"token": "0"}).encode()
    others = [
        (Peer(door.ticket, Seat("older", 1, 2), _exchange, 5.0), "older of 2 ranks"),
        (Peer(forged, Seat("test", 1, 2), _exchange, 5.0), "another door"),
    ]
    noise = socket.create_connection((where["host"], where["port"]))
    noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
    try:
        with pytest.raises(RankMissing, match="rank 1"):
            connect("tcp", Seat("test", 0, 2), door, CPU, init_s=2.0)
        for peer, why in others:
            with pytest.raises(RuntimeError, match=why):
                peer.result()
    finally:
        noise.close()
        for peer, _ in others:
            peer.end()


def _nothing(comm: Communicator) -> None:
    comm.receive(torch.empty(4), 0)


def test_nothing_is_left_after_many_of_them() -> None:
    def once() -> None:
        with group(_nothing) as (comm, peers):
            comm.send(torch.empty(4), 1)
            assert peers[0].result() is None

    once()  # what libraries keep for good
    gc.collect()
    before, threads = held(), native_threads()
    for _ in range(4):
        once()
    gc.collect()
    assert held() == before
    assert native_threads() <= threads


def test_a_group_of_one() -> None:
    comm = connect("tcp", Seat("alone", 0, 1), Door(), CPU)
    assert [part.tolist() for part in comm.all_gather(torch.ones(2))] == [[1.0, 1.0]]
    comm.close()
    comm.close()
    with pytest.raises(CollectiveError, match="closed"):
        comm.broadcast(torch.ones(2), 0)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 2 .* not below its size"):
        Seat("test", 2, 2)
    with pytest.raises(ValueError, match="rank 0 brings a Door"):
        connect("tcp", Seat("test", 0, 2), b"{}", CPU)
    comm = connect("tcp", Seat("alone", 0, 1), Door(), CPU)
    with pytest.raises(ValueError, match="contiguous"):
        comm.broadcast(torch.ones(4, 4).t(), 0)
    comm.close()
    if not torch.cuda.is_available():
        with pytest.raises(CollectivesUnavailable, match="torch sees none"):
            connect("nccl", Seat("alone", 0, 1), Door(), torch.device("cuda", 0))


class _SlowNccl:
    """Its init ends when it is let, far too late."""

    def __init__(self) -> None:
        self.may, self.aborted = threading.Event(), threading.Event()

    def NcclCommunicator(self, *_: object) -> _SlowNccl:
        self.may.wait(AWAY_S)
        return self

    def abort(self) -> None:
        self.aborted.set()


def test_an_init_of_nccl_that_comes_too_late_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(nccl, "_touch", lambda *_: None)
    library = _SlowNccl()
    line = Line(Seat("late", 0, 1), {}, [[0]])
    try:
        with pytest.raises(CollectiveError, match=r"NCCL did not start in 0\.2 s"):
            nccl._start(library, line, CPU, 0.2)
        assert not library.aborted.is_set()
        library.may.set()
        assert library.aborted.wait(AWAY_S)
    finally:
        line.close()


@pytest.mark.parametrize("patient", [True, False])
def test_half_a_message_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, patient: bool) -> None:
    """A rank that stalls in the middle of a word is lost, and to close waits for nobody."""
    monkeypatch.setattr(meeting, "_SAY_S", 0.5 if patient else 60.0)
    door = Door()
    where = json.loads(door.ticket)
    with socket.create_connection((where["host"], where["port"])) as other:
        hello = {"name": "half", "rank": 1, "size": 2, "token": where["token"], "gives": None}
        meeting._send(other, hello)
        line = door.gather(Seat("half", 0, 2), 5.0, lambda _: None)
        other.sendall(b"\x99\x00\x00\x00{")
        if patient:
            lost = line.await_loss(AWAY_S)
            assert lost is not None
            assert lost.rank == 1
        deadline = time.monotonic() + AWAY_S
        while _unread(line._peers[1]):
            assert time.monotonic() < deadline, "nobody has begun to read"
            time.sleep(0.005)
        begun = time.monotonic()
        line.close()
        assert time.monotonic() - begun < AWAY_S


def _unread(peer: socket.socket) -> int:
    """Bytes that have come and were not read yet."""
    return int.from_bytes(fcntl.ioctl(peer, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_stranger_who_says_something_else_keeps_nobody_out() -> None:
    door = Door()
    where = json.loads(door.ticket)
    with socket.create_connection((where["host"], where["port"])) as stranger:
        stranger.sendall(b"\x02\x00\x00\x00[]")
        peer = Peer(door.ticket, Seat("test", 1, 2), _nothing, 5.0)
        try:
            comm = connect("tcp", Seat("test", 0, 2), door, CPU, init_s=AWAY_S)
            comm.close()
        finally:
            peer.end()
