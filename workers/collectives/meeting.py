"""Where the ranks of a communicator meet, and how each learns that another is gone.

```
rank 0   Door()           listens; its ticket goes to the others by whatever way there is
others   join(ticket)     hello (name, rank, what it gives)  ->
rank 0   gather()         all there: <- go, with what every rank gives
                          too late:  <- who is missing
```

The connections stay open: a process that ends, however it ends, closes its own. Rank 0 passes the
news on. A process that is merely stopped is not noticed here; transfers have their own time limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from overstory.workers.collectives.errors import CollectiveError, PeerLost, RankMissing
from overstory.workers.silence import break_when_silent

_HEADER = struct.Struct("<I")
_LONGEST = 1 << 24
_RETRY_S = 0.05
LEAVING_S = 1.0
"""After a rank has closed its communicator: what others still have under way may end so long."""

_HELLO_S = 5.0
"""How long a stranger may hold up the door."""
_SAY_S = 5.0
"""How long half a message is waited for, or room for one: a peer that stalls holds nobody up."""
_SILENT_S = 20
"""A host that is gone without a word (power, cable) answers no keep-alive for so long."""


Give = Callable[[str], Any]


@dataclass(frozen=True)
class Seat:
    """One rank's place in a communicator.

    Attributes:
        name: of the communicator, unique to this incarnation: a ticket of another is refused.
        rank: 0 has the door.
        size: how many meet.
    """

    name: str
    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"rank {self.rank} of communicator {self.name} is not below its size, {self.size}"
            )


class Line:
    """The open connections of one rank; made by `meet`.

    Attributes:
        seat: whose.
        book: what each rank gave, by rank.
    """

    def __init__(self, seat: Seat, peers: dict[int, socket.socket], book: list[Any]) -> None:
        self.seat = seat
        self.book = book
        self._peers = peers
        self._lost: PeerLost | None = None
        self._closed = False
        self._noticed = threading.Event()
        self._on_loss: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._saying = threading.Lock()
        self._words: queue.Queue[tuple[int, Any]] = queue.Queue()
        self._wake_read, self._wake_write = os.pipe()
        self._watcher = threading.Thread(
            target=self._watch, name=f"line-{seat.name}-{seat.rank}", daemon=True
        )
        self._watcher.start()

    @property
    def lost(self) -> PeerLost | None:
        """The first loss that was noticed."""
        return self._lost

    def await_loss(self, timeout_s: float) -> PeerLost | None:
        """The loss that an error of the library below comes from, which may be heard of later."""
        self._noticed.wait(timeout_s)
        return self._lost

    def tell(self, word: Any, to: int) -> None:
        """Says something short (plain values) to a rank that there is a connection to: rank 0's to
        all, and all others' to rank 0. Raises `PeerLost`."""
        if self._lost is not None:
            raise self._lost
        try:
            with self._saying:
                _send(self._peers[to], {"word": word})
        except OSError as error:
            raise self._lost or PeerLost(self.seat.name, to, "cut its connection") from error

    def hear(self, timeout_s: float) -> tuple[int, Any]:
        """The next word, and who said it.

        Raises:
            PeerLost: none will come any more.
            TimeoutError: none came.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._words.get(timeout=min(0.1, max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                if self._lost is not None:
                    raise self._lost from None
                if self._closed:
                    raise PeerLost(self.seat.name, self.seat.rank, "has closed") from None
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no word in {timeout_s:g} s") from None

    def call_on_loss(self, act: Callable[[], None]) -> None:
        """`act` runs at the first loss, in another thread; at once if there was one."""
        with self._lock:
            self._on_loss = act
            lost = self._lost is not None
        if lost:
            act()

    def close(self) -> None:
        """Says goodbye and closes. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                _send(peer, {"bye": self.seat.rank})
        os.write(self._wake_write, b"x")
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # The watcher may be in the middle of a message.
                peer.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        for peer in self._peers.values():
            peer.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ)
            for rank, peer in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            left: int | None = None
            until = 0.0
            while self._lost is None:
                patience = None if left is None else max(0.0, until - time.monotonic())
                ready = selector.select(patience)
                if not ready:
                    assert left is not None
                    self._note(left, "closed its communicator")
                if any(key.data is None for key, _ in ready):
                    return
                for key, _ in ready:
                    rank, how, word = _news(self._peers[key.data], key.data)
                    if word is not None:
                        self._words.put((rank, word))
                        continue
                    if how:
                        self._note(rank, how)
                        break
                    selector.unregister(key.fileobj)
                    if left is None:
                        left, until = rank, time.monotonic() + LEAVING_S

    def _note(self, rank: int, how: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._lost = PeerLost(self.seat.name, rank, how)
            act = self._on_loss
        self._noticed.set()
        for peer, connection in self._peers.items():
            if peer != rank:
                with contextlib.suppress(OSError):
                    _send(connection, {"lost": rank, "how": how})
        if act is not None:
            act()


class Door:
    """Rank 0's listening socket.

    Args:
        host: address that the other ranks reach.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host = host
        self._socket = socket.create_server((host, 0), family=family)
        self._token = secrets.token_hex(8)
        port = self._socket.getsockname()[1]
        self.ticket = json.dumps({"host": host, "port": port, "token": self._token}).encode()

    def gather(self, seat: Seat, deadline_s: float, give: Give) -> Line:
        """Waits for all others, then lets them go. The door is closed after it.

        Raises:
            RankMissing: names those that did not come; those that came are told.
        """
        assert seat.rank == 0, "only rank 0 has a door"
        deadline = time.monotonic() + deadline_s
        present: dict[int, socket.socket] = {}
        gifts: dict[int, Any] = {0: give(self._host)}
        try:
            while len(present) < seat.size - 1:
                left = deadline - time.monotonic()
                if left <= 0 or not self._let_in(seat, present, gifts, left):
                    missing = sorted(set(range(1, seat.size)) - set(present))
                    for peer in present.values():
                        with contextlib.suppress(OSError):
                            _send(peer, {"missing": missing, "waited_s": deadline_s})
                    raise RankMissing(seat.name, missing, deadline_s)
            book = [gifts[rank] for rank in range(seat.size)]
            for rank, peer in present.items():
                try:
                    _send(peer, {"go": book})
                except OSError as error:
                    raise PeerLost(seat.name, rank, "left before the start") from error
            return Line(seat, present, book)
        except BaseException:
            for peer in present.values():
                peer.close()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Nobody comes in any more. Idempotent."""
        self._socket.close()

    def _let_in(
        self,
        seat: Seat,
        present: dict[int, socket.socket],
        gifts: dict[int, Any],
        left_s: float,
    ) -> bool:
        """Takes one connection; False if none came."""
        self._socket.settimeout(left_s)
        try:
            peer, _ = self._socket.accept()
        except TimeoutError:
            return False
        peer.settimeout(min(left_s, _HELLO_S))
        try:
            hello = _receive(peer)
            reason = self._refusal(seat, present, hello)
            if reason:
                _send(peer, {"refused": reason})
        except (OSError, ValueError, EOFError):
            reason = "said nothing that is understood"
        if reason:
            peer.close()
        else:
            _watched(peer)
            present[int(hello["rank"])] = peer
            gifts[int(hello["rank"])] = hello["gives"]
        return True

    def _refusal(self, seat: Seat, present: dict[int, socket.socket], hello: dict[str, Any]) -> str:
        if not secrets.compare_digest(str(hello.get("token")), self._token):
            return "the ticket is of another door"
        if hello.get("name") != seat.name or hello.get("size") != seat.size:
            return (
                f"{hello.get('name')} of {hello.get('size')} ranks was asked for, "
                f"here is {seat.name} of {seat.size}"
            )
        if hello.get("rank") in present or hello.get("rank") not in range(1, seat.size):
            return f"there is no free seat of rank {hello.get('rank')}"
        return ""


def meet(seat: Seat, door: Door | bytes, deadline_s: float, give: Give) -> Line:
    """Rank 0 at its door, the others with its ticket.

    Args:
        seat: whose.
        door: on rank 0 its door, which is used up.
        deadline_s: how long to wait for the others.
        give: what this rank gives to all (plain values), told this host's address as they see it.

    Raises:
        RankMissing: names the ranks that did not come.
        CollectiveError: rank 0 refuses this rank.
    """
    if isinstance(door, Door):
        return door.gather(seat, deadline_s, give)
    return join(door, seat, deadline_s, give)


def join(ticket: bytes, seat: Seat, deadline_s: float, give: Give) -> Line:
    """Comes to rank 0's door and waits for all others.

    Raises:
        RankMissing: rank 0 is not there, or says who is missing.
        CollectiveError: rank 0 refuses this rank.
    """
    deadline = time.monotonic() + deadline_s
    where = json.loads(ticket)
    peer = _connect(where["host"], int(where["port"]), seat, deadline, deadline_s)
    try:
        hello = {"name": seat.name, "rank": seat.rank, "size": seat.size, "token": where["token"]}
        _send(peer, hello | {"gives": give(str(peer.getsockname()[0]))})
        peer.settimeout(max(0.01, deadline - time.monotonic()) + _RETRY_S)
        answer = _receive(peer)
        if "refused" in answer:
            raise CollectiveError(f"communicator {seat.name}: {answer['refused']}")
        if "missing" in answer:
            raise RankMissing(seat.name, answer["missing"], float(answer["waited_s"]))
        _watched(peer)
        return Line(seat, {0: peer}, answer["go"])
    except (OSError, EOFError) as error:
        peer.close()
        raise RankMissing(seat.name, [0], deadline_s) from error
    except BaseException:
        peer.close()
        raise


def _connect(host: str, port: int, seat: Seat, deadline: float, deadline_s: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RankMissing(seat.name, [0], deadline_s)
        try:
            return socket.create_connection((host, port), timeout=left)
        except OSError:
            time.sleep(min(_RETRY_S, left))


def _watched(peer: socket.socket) -> None:
    """A connection that stays open: nobody waits on it for long, and a host that vanished shows."""
    peer.settimeout(_SAY_S)
    # Of two words one after the other the second would wait for the first one's acknowledgement,
    # which whoever has nothing to send puts off by 40 ms.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    break_when_silent(peer, _SILENT_S, _SILENT_S)


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    peer.sendall(_HEADER.pack(len(body)) + body)


def _receive(peer: socket.socket) -> dict[str, Any]:
    """One message; EOFError if the connection is closed."""
    (length,) = _HEADER.unpack(_read(peer, _HEADER.size))
    if length > _LONGEST:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_read(peer, length))
    if not isinstance(message, dict):
        raise ValueError(f"wanted a message, got {str(message)[:80]}")
    return message


def _read(peer: socket.socket, length: int) -> bytes:
    parts = b""
    while len(parts) < length:
        part = peer.recv(length - len(parts))
        if not part:
            raise EOFError("closed")
        parts += part
    return parts


def _news(peer: socket.socket, rank: int) -> tuple[int, str, Any]:
    """What a readable connection of `rank` has to say: who is lost, and how; that `rank` itself
    has closed in peace, with no how; or a word for whoever hears."""
    try:
        message = _receive(peer)
    except (OSError, ValueError, EOFError):
        return rank, "ended or was cut off", None
    if "lost" in message:
        return int(message["lost"]), str(message["how"]), None
    return rank, "", message.get("word")
