"""Rank 0 asks SGLang to read requests only where one of its sockets has something."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from overstory.workers import rank_hooks


class _Sockets:
    """Both of a receiver's sockets, with whoever writes to them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.writers, readers = [], []
        for number in range(2):
            reader = self._context.socket(zmq.PULL)
            reader.bind(f"inproc://pull-{number}")
            writer = self._context.socket(zmq.PUSH)
            writer.connect(f"inproc://pull-{number}")
            readers.append(reader)
            self.writers.append(writer)
        self.receiver = SimpleNamespace(recv_from_tokenizer=readers[0], recv_from_rpc=readers[1])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def sockets() -> Iterator[_Sockets]:
    made = _Sockets()
    yield made
    made.close()


def _read(receiver: Any) -> list[bytes]:
    """As SGLang: until both raise."""
    found = []
    for source in (receiver.recv_from_tokenizer, receiver.recv_from_rpc):
        while True:
            try:
                found.append(source.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
    return found


def _hook(monkeypatch: pytest.MonkeyPatch, begins: list[Any]) -> None:
    gate = SimpleNamespace(before_pull=lambda _view: list(begins))
    monkeypatch.setattr(rank_hooks, "_HOOKED", SimpleNamespace(rank=0, view=object(), gate=gate))


@pytest.mark.parametrize("which", [0, 1])
def test_every_message_is_read_once(
    sockets: _Sockets, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    _hook(monkeypatch, ["lease"])
    for number in range(50):
        sockets.writers[which].send(b"%d" % number)
        if number % 3 == 0:
            sockets.writers[which].send(b"more")
        deadline, got = time.monotonic() + 10, ["lease"]
        while got == ["lease"]:
            assert time.monotonic() < deadline
            got = rank_hooks._pull(_read, sockets.receiver)
        while len(got) < 2 + (number % 3 == 0):
            assert time.monotonic() < deadline
            got += rank_hooks._pull(_read, sockets.receiver)[1:]
        assert got == ["lease", b"%d" % number, *([b"more"] if number % 3 == 0 else [])]
    assert rank_hooks._pull(_read, sockets.receiver) == ["lease"]


def test_nothing_is_read_where_nothing_waits(
    sockets: _Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_receiver: Any) -> Any:
        raise AssertionError("read")

    _hook(monkeypatch, [])
    assert rank_hooks._pull(never, sockets.receiver) == []


def test_what_is_no_socket_is_always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's ring of an embedded server, and no socket at all."""
    _hook(monkeypatch, ["lease"])
    receiver = SimpleNamespace(recv_from_tokenizer=object(), recv_from_rpc=None)
    assert rank_hooks._pull(lambda _: ["request"], receiver) == ["lease", "request"]
