"""Communicators between CPUs: plain TCP, one connection between any two ranks.

Not gloo: what it has under way cannot be aborted, and a send to a rank that was killed has been
seen to wait for its whole limit.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import torch

from overstory.workers.collectives.errors import (
    CollectiveError,
    PeerLost,
    TransferTimeout,
)
from overstory.workers.collectives.meeting import LEAVING_S, Door, Line, Seat, meet

_PIECE = 1 << 20
_HELLO = 256
_HELLO_S = 5.0
_NEWS_S = LEAVING_S + 1.0


class TcpCommunicator:
    """See `Communicator`. Operations are done when their call returns."""

    def __init__(self, line: Line, links: dict[int, socket.socket], transfer_s: float) -> None:
        self.name, self.rank, self.size = line.seat.name, line.seat.rank, line.seat.size
        self.device = torch.device("cpu")
        self._line, self._links, self._transfer_s = line, links, transfer_s
        self._closed = False
        line.call_on_loss(self._cut)

    @classmethod
    def connect(
        cls, seat: Seat, door: Door | bytes, device: torch.device, init_s: float, transfer_s: float
    ) -> TcpCommunicator:
        """See `overstory.workers.collectives.connect`."""
        if device.type != "cpu":
            raise ValueError(f"tcp carries CPU tensors, got device {device}")
        deadline = time.monotonic() + init_s
        servers: list[socket.socket] = []

        def listen(host: str) -> list[Any]:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            servers.append(socket.create_server((host, 0), family=family))
            return [host, servers[0].getsockname()[1]]

        try:
            line = meet(seat, door, init_s, listen)
            try:
                return cls(line, _links(line, servers[0], deadline), transfer_s)
            except (OSError, EOFError, ValueError) as error:
                line.close()
                raise line.lost or CollectiveError(f"communicator {seat.name}: {error}") from error
        finally:
            for server in servers:
                server.close()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """See `Communicator`."""
        view = _bytes(tensor)
        self._carry_out(to, lambda link, deadline: _push(link, view, deadline))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See `Communicator`."""
        view = _bytes(tensor)
        self._carry_out(source, lambda link, deadline: _pull(link, view, deadline))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """See `Communicator`."""
        _bytes(tensor)
        self.wait()
        if self.rank != root:
            self.receive(tensor, root)
            return
        for rank in self._others():
            self.send(tensor, rank)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See `Communicator`."""
        self.wait()
        parts = [
            tensor if rank == self.rank else torch.empty_like(tensor) for rank in range(self.size)
        ]
        # Of two ranks the lower one sends first: two that send at once might wait for each other.
        for rank in self._others():
            for sends in (self.rank < rank, self.rank > rank):
                if sends:
                    self.send(tensor, rank)
                else:
                    self.receive(parts[rank], rank)
        return [part.clone() if part is tensor else part for part in parts]

    @property
    def lost(self) -> PeerLost | None:
        """See `Communicator`."""
        return self._line.lost

    def tell(self, word: Any, to: int) -> None:
        """See `Communicator`."""
        self._line.tell(word, to)

    def hear(self, timeout_s: float) -> tuple[int, Any]:
        """See `Communicator`."""
        return self._line.hear(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Communicator`; there is nothing left to wait for."""
        if self._line.lost is not None:
            raise self._line.lost
        if self._closed:
            raise CollectiveError(f"communicator {self.name} is closed")

    def close(self) -> None:
        """See `Communicator`."""
        self._closed = True
        self._cut()  # Closing alone would not wake a thread that waits for a peer that stalls.
        self._line.close()
        for link in self._links.values():
            link.close()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _carry_out(self, peer: int, move: Callable[[socket.socket, float], None]) -> None:
        self.wait()
        if peer not in self._links:
            raise ValueError(f"communicator {self.name}: rank {self.rank} has no peer {peer}")
        try:
            move(self._links[peer], time.monotonic() + self._transfer_s)
        except TimeoutError as error:
            raise self._line.lost or TransferTimeout(
                f"communicator {self.name}: rank {peer} took over {self._transfer_s:g} s"
            ) from error
        except (OSError, EOFError) as error:
            raise self._line.await_loss(_NEWS_S) or PeerLost(
                self.name, peer, f"cut its connection: {error}"
            ) from error

    def _cut(self) -> None:
        """From any thread: whoever waits is to stop. What was sent still arrives."""
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_RDWR)
            except OSError:  # Closed by the other side already.
                continue


def _links(line: Line, server: socket.socket, deadline: float) -> dict[int, socket.socket]:
    """Connections to all other ranks: each calls those below it, where they said they listen."""
    seat = line.seat
    links: dict[int, socket.socket] = {}
    try:
        for rank in range(seat.rank):
            where = tuple(line.book[rank])
            links[rank] = socket.create_connection(where, timeout=_left(deadline))
            links[rank].sendall(json.dumps([seat.name, seat.rank]).encode().ljust(_HELLO))
        while len(links) < seat.size - 1:
            server.settimeout(_left(deadline))
            link, _ = server.accept()
            rank = _caller(link, seat, deadline)
            if seat.rank < rank < seat.size and rank not in links:
                links[rank] = link
            else:
                link.close()
    except BaseException:
        for link in links.values():
            link.close()
        raise
    for link in links.values():
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _caller(link: socket.socket, seat: Seat, deadline: float) -> int:
    """The rank at the other end; -1 for a stranger."""
    hello = bytearray(_HELLO)
    try:
        _pull(link, memoryview(hello), min(deadline, time.monotonic() + _HELLO_S))
        name, rank = json.loads(bytes(hello))
    except (OSError, EOFError, ValueError):
        return -1
    return int(rank) if name == seat.name else -1


def _push(link: socket.socket, view: memoryview, deadline: float) -> None:
    done = 0
    while done < len(view):
        link.settimeout(_left(deadline))
        done += link.send(view[done : done + _PIECE])


def _pull(link: socket.socket, view: memoryview, deadline: float) -> None:
    done = 0
    while done < len(view):
        link.settimeout(_left(deadline))
        count = link.recv_into(view[done : done + _PIECE])
        if not count:
            raise EOFError("closed")
        done += count


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("time is up")
    return left


def _bytes(tensor: torch.Tensor) -> memoryview:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"wanted a contiguous CPU tensor, got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}"
        )
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
