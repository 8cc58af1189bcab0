"""A giving and a taking rank: what one order leaves behind is not for the next, and nobody has to
come to close what is of no more use."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import random
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peer_process import held, native_threads

from overstory.workers.collectives import CollectiveError, PeerLost
from overstory.workers.handoff import peers
from overstory.workers.handoff.peers import Peers, Refused
from overstory.workers.handoff.pieces import Conveyor, Garbled
from overstory.workers.handoff.rows import RowTable

SLOTS, WIDTH = 600, 512
PIECE = 1 << 16
SOON_S = 15.0
"""Less than the limits of transfers here, and enough for a busy machine."""
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps communicators looks at them all the time, and a giver whether it is closed."""
    monkeypatch.setattr(peers, "LOOK_S", 0.02)
    monkeypatch.setattr(peers, "_LISTEN_S", 0.1)


def pool(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, (SLOTS, WIDTH), generator=draw, dtype=torch.int64)


GIVEN = pool(1)
ORDER = {"what": "rows"}


def rows(order: Any, piece_bytes: int) -> tuple[Any, Callable[[], bool]]:
    if order.get("none"):
        raise ValueError("there are none")
    return RowTable([GIVEN]).gather(torch.arange(SLOTS), piece_bytes), lambda: True


def peers_of(answers: Any) -> Peers:
    return Peers(answers, lambda: torch.device("cpu"), lambda: "127.0.0.1")


class Ranks:
    """A giving rank and a taking rank in this process."""

    def __init__(self, answer: Any = rows) -> None:
        self.giving, self.taking = peers_of({"rows": answer}), peers_of({})
        self.count = 0

    def meet(self, transfer_s: float = 60.0, **more: Any) -> str:
        self.count += 1
        name = f"c{self.count}"
        ticket = self.giving.offer(name)
        limits = (SOON_S, transfer_s, PIECE)
        opening = threading.Thread(
            target=self.giving.open, args=(name, "tcp", None, *limits), kwargs=more
        )
        opening.start()
        self.taking.open(name, "tcp", ticket, SOON_S, transfer_s, PIECE, **more)
        opening.join(SOON_S)
        return name

    def take(self, name: str, **order: Any) -> torch.Tensor:
        """The rows as they came."""
        mine, taker = torch.zeros_like(GIVEN), self.taking.taker(name)
        pieces = RowTable([mine]).scatter(torch.arange(SLOTS), taker.piece_bytes)
        taker.take(ORDER | order, pieces)
        return mine

    def open(self) -> int:
        return len(self.giving._open) + len(self.taking._open) + len(self.giving._doors)

    def close(self) -> None:
        for side in (self.giving, self.taking):
            for name in [*side._open, *side._doors]:
                side.close(name)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.close()


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_orders_one_after_the_other(ranks: Ranks) -> None:
    name = ranks.meet()
    for _ in range(3):
        assert torch.equal(ranks.take(name), GIVEN)
        with pytest.raises(Refused, match="there are none"):
            ranks.take(name, none=True)


def test_an_order_does_not_wait_for_the_network_to_acknowledge_words(ranks: Ranks) -> None:
    name, took = ranks.meet(), []
    for _ in range(40):  # the system does not put off its first acknowledgements
        begun = time.perf_counter()
        ranks.take(name)
        took.append(time.perf_counter() - begun)
    assert sorted(took)[len(took) // 4] < 0.02, f"an acknowledgement comes after 40 ms: {took}"


def test_what_came_wrong_does_not_spoil_the_next_order(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ranks.meet()
    seal = Conveyor._seal

    def wrong(self: Conveyor, staging: torch.Tensor, size: int) -> None:
        seal(self, staging, size)
        staging[size // 2] += 1

    with monkeypatch.context() as patch:
        patch.setattr(Conveyor, "_seal", wrong)
        with pytest.raises(Garbled, match="wrong checksum"):
            ranks.take(name)
    assert torch.equal(ranks.take(name), GIVEN)


def test_a_giver_that_stalls_ends_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer, when it comes after all, is nobody's."""
    going = threading.Event()

    def late(order: Any, piece_bytes: int) -> Any:
        going.wait(SOON_S)
        return rows(order, piece_bytes)

    monkeypatch.setattr(peers, "ANSWER_S", 0.3)
    ranks = Ranks(late)
    try:
        name = ranks.meet()
        with pytest.raises(CollectiveError, match="does not answer"):
            ranks.take(name)
        going.set()
        with pytest.raises(CollectiveError):
            ranks.take(name)
        until(lambda: ranks.open() == 0, "both sides to be closed")
    finally:
        going.set()
        ranks.close()


def test_a_giver_that_trickles_is_left_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, all together do not: ranks stand still meanwhile."""
    send = Conveyor._seal

    def slow(self: Conveyor, staging: torch.Tensor, size: int) -> None:
        time.sleep(0.1)
        send(self, staging, size)

    monkeypatch.setattr(Conveyor, "_seal", slow)
    ranks = Ranks()
    try:
        name = ranks.meet(transfer_s=0.5)
        begun = time.monotonic()
        with pytest.raises(CollectiveError, match=r"not done in 0\.5 s"):
            ranks.take(name)  # 38 pieces
        assert time.monotonic() - begun < 5
    finally:
        ranks.close()


def test_what_takes_longer_than_idling_may_is_not_idle(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = Conveyor._seal

    def slow(self: Conveyor, staging: torch.Tensor, size: int) -> None:
        time.sleep(0.01)
        seal(self, staging, size)

    monkeypatch.setattr(Conveyor, "_seal", slow)
    name = ranks.meet(idle_s=0.1)
    assert torch.equal(ranks.take(name), GIVEN)


def test_pieces_of_other_sizes_are_refused(ranks: Ranks) -> None:
    name = ranks.meet()
    taker = ranks.taking.taker(name)
    taker._conveyor.piece_bytes *= 2
    with pytest.raises(Refused, match=f"here they have {PIECE}"):
        ranks.take(name)


@pytest.mark.parametrize("side", ["giving", pytest.param("taking", marks=pytest.mark.full)])
def test_what_one_side_closes_the_other_closes_too(ranks: Ranks, side: str) -> None:
    name = ranks.meet()
    getattr(ranks, side).close(name)
    until(lambda: ranks.open() == 0, "the other side to close")
    with pytest.raises(CollectiveError, match="no communicator"):
        ranks.taking.taker(name)


def test_what_nobody_uses_or_takes_up_is_closed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a controller that is gone."""
    monkeypatch.setattr(peers, "OFFER_S", 0.2)
    ranks.giving.offer("never")
    ranks.meet(idle_s=0.5)
    kept = ranks.meet()
    until(lambda: ranks.open() == 2, "offer and idle communicator to be closed")
    assert torch.equal(ranks.take(kept), GIVEN)
    with pytest.raises(ValueError, match="'never' was offered"):
        ranks.giving.open("never", "tcp", None, 1.0, 1.0, PIECE)


def stopped_taker(ticket: bytes, said: Any) -> None:
    """Asks for rows and stops itself after the first piece."""
    torch.set_num_threads(1)
    mine = peers_of({})
    mine.open("c", "tcp", ticket, SOON_S, 60.0, PIECE)
    taker = mine.taker("c")
    table = RowTable([torch.zeros_like(GIVEN)])

    def pieces() -> Iterator[Any]:
        for number, piece in enumerate(table.scatter(torch.arange(SLOTS), taker.piece_bytes)):
            if number == 1:
                said.send("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            yield piece

    taker.take(ORDER, pieces())


@pytest.mark.full
def test_closing_waits_for_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The giver's thread is in the middle of a send that nobody takes."""

    def many(order: Any, piece_bytes: int) -> Any:
        table = RowTable([GIVEN])
        everything = (
            piece for _ in range(50) for piece in table.gather(torch.arange(SLOTS), piece_bytes)
        )
        return everything, lambda: True

    giving = peers_of({"rows": many})
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=stopped_taker, args=(giving.offer("c"), theirs), daemon=True)
    process.start()
    try:
        giving.open("c", "tcp", None, SOON_S, 60.0, PIECE)
        assert ours.poll(SOON_S)
        link = giving._open["c"][0]._communicator._links[1]  # type: ignore[attr-defined]
        queued = [0]

        def stuck() -> bool:
            queued.append(
                int.from_bytes(fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
            )
            return queued[-1] > 0 and len(set(queued[-25:])) == 1

        until(stuck, "the giver to wait for its peer")
        begun = time.monotonic()
        giving.close("c")
        assert time.monotonic() - begun < 5
    finally:
        process.kill()
        process.join(SOON_S)


def killed_taker(ticket: bytes, name: str, after: int) -> None:
    """Is killed when so many bytes have come."""
    torch.set_num_threads(1)
    mine = peers_of({})
    mine.open(name, "tcp", ticket, SOON_S, 60.0, PIECE)
    link = mine.taker(name)._communicator._links[0]  # type: ignore[attr-defined]
    mine.taker(name)._communicator.tell({**ORDER, "piece_bytes": PIECE}, 0)
    while after > 0:
        after -= len(link.recv(min(after, 1 << 14)))
    os.kill(os.getpid(), signal.SIGKILL)


def killed_giver(pipe: Any, name: str, after: int) -> None:
    """Is killed when so many bytes were sent."""
    torch.set_num_threads(1)

    def answer(order: Any, piece_bytes: int) -> Any:
        until(lambda: name in giving._open, "the giver to be there")
        comm: Any = giving._open[name][0]._communicator
        comm.tell({"go": True}, 1)
        comm._links[1].settimeout(SOON_S)
        comm._links[1].sendall(bytes(after))
        os.kill(os.getpid(), signal.SIGKILL)

    giving = peers_of({"rows": answer})
    pipe.send(giving.offer(name))
    giving.open(name, "tcp", None, SOON_S, 60.0, PIECE)
    time.sleep(60)


@pytest.mark.parametrize("rounds", [5, pytest.param(50, marks=pytest.mark.full)])
def test_a_side_killed_at_any_byte_is_noticed_and_nothing_stays(ranks: Ranks, rounds: int) -> None:
    """The giver, the taker, or nobody is killed. Whoever is left closes by itself."""
    draw = random.Random(8)
    assert torch.equal(ranks.take(ranks.meet()), GIVEN)  # what libraries keep for good
    ranks.close()
    until(lambda: ranks.giving._keeper is None and ranks.taking._keeper is None, "quiet")
    gc.collect()
    before, threads = held(), native_threads()
    for number in range(rounds):
        name, at = f"r{number}", draw.randrange(GIVEN.nbytes)
        who = draw.choice(["giver", "taker", "nobody"])
        if who == "nobody":
            assert torch.equal(ranks.take(ranks.meet()), GIVEN)
            ranks.taking.close(f"c{ranks.count}")
            continue
        ours, theirs = _FORK.Pipe()
        if who == "taker":
            process = _FORK.Process(
                target=killed_taker, args=(ranks.giving.offer(name), name, at), daemon=True
            )
            process.start()
            ranks.giving.open(name, "tcp", None, SOON_S, 60.0, PIECE)
        else:
            process = _FORK.Process(target=killed_giver, args=(theirs, name, at), daemon=True)
            process.start()
            ranks.taking.open(name, "tcp", ours.recv(), SOON_S, 60.0, PIECE)
            begun = time.monotonic()
            with pytest.raises(PeerLost, match="rank 0"):
                ranks.take(name)
            assert time.monotonic() - begun < SOON_S
        process.join(SOON_S)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        ours.close()
        theirs.close()
    until(lambda: ranks.open() == 0, "all to be closed")
    until(lambda: ranks.giving._keeper is None and ranks.taking._keeper is None, "quiet")
    gc.collect()
    assert held() == before
    assert native_threads() <= threads
