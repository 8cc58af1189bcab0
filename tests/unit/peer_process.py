"""Ranks of a communicator in processes of their own. Forked: torch is there at once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from overstory.workers.collectives import Communicator, Door, Seat, connect

CPU = torch.device("cpu")
Act = Callable[[Communicator], Any]
_FORK = multiprocessing.get_context("fork")


class Peer:
    """One rank that connects and acts. `result` gives what `act` returned, or raises."""

    def __init__(self, ticket: bytes, seat: Seat, act: Act, transfer_s: float) -> None:
        self._ours, theirs = _FORK.Pipe()
        self.process = _FORK.Process(
            target=_run, args=(theirs, ticket, seat, act, transfer_s), daemon=True
        )
        self.process.start()
        theirs.close()

    def result(self, deadline_s: float = 20.0) -> Any:
        assert self._ours.poll(deadline_s), "the peer did not answer"
        value = pickle.loads(self._ours.recv_bytes())
        if isinstance(value, BaseException):
            raise value
        return value

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(10)


def _run(pipe: Any, ticket: bytes, seat: Seat, act: Act, transfer_s: float) -> None:
    torch.set_num_threads(1)
    try:
        communicator = connect("tcp", seat, ticket, CPU, 10.0, transfer_s)
        _say(pipe, "connected")
        _say(pipe, act(communicator))
        communicator.close()
    except BaseException as error:
        _say(pipe, RuntimeError(f"{type(error).__name__}: {error}"))


def _say(pipe: Any, value: Any) -> None:
    pipe.send_bytes(pickle.dumps(value))  # tensors by value: what is shared goes with the process


@contextmanager
def group(act: Act, size: int = 2, transfer_s: float = 10.0) -> Iterator[tuple[Any, list[Peer]]]:
    """Rank 0 here, connected, and the others where each runs `act`."""
    door = Door()
    peers = [
        Peer(door.ticket, Seat("test", rank, size), act, transfer_s) for rank in range(1, size)
    ]
    try:
        communicator = connect("tcp", Seat("test", 0, size), door, CPU, 10.0, transfer_s)
        try:
            for peer in peers:
                assert peer.result() == "connected"
            yield communicator, peers
        finally:
            communicator.close()
    finally:
        for peer in peers:
            peer.end()


def held() -> tuple[int, set[str]]:
    """Open descriptors, and the names of threads that Python knows or that a line began."""
    names = {thread.name for thread in threading.enumerate()}
    return len(list(Path("/proc/self/fd").iterdir())), names


def native_threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))
