"""Two replicas side by side, for the hand-off tests: one in the test process, one in a child.

What runs on the ranks is in functions of this module, which every rank imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.collectives import CollectiveError
from overstory.workers.commands import CommandContext
from overstory.workers.defrag.relocate import pool_buffers
from overstory.workers.environment import prepare_process
from overstory.workers.handoff.commands import KvHandoff
from overstory.workers.handoff.peers import Giver, Peers
from overstory.workers.scheduler_view import SglangScheduler

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from harness import EngineHarness

PIECE_BYTES = 1 << 16
TRANSPORT = os.environ.get("HANDOFF_TEST_TRANSPORT", "")
"""`tcp`: also between GPUs; NCCL does not take two ranks on one."""
START_S = 300.0
IDLE_S = 300.0
"""Longer than engines here compute between two orders."""
ANSWER_S = 120.0
EPOCH = 1

_HANDOFF = KvHandoff()
_PEERS = Peers(
    {"kv": _HANDOFF.give},
    lambda: torch.device("cuda", torch.cuda.current_device()),
    lambda: "127.0.0.1",
)
_HANDOFF.peers = _PEERS
_MET: dict[str, str] = {}

_of: Any = lambda: None  # noqa: E731


def _context(scheduler: Any) -> CommandContext:
    global _of
    if _of() is not scheduler:  # An engine after another one in this process has other buffers.
        _of, _HANDOFF._table = weakref.ref(scheduler), None
    return CommandContext(scheduler.ps.tp_rank, SglangScheduler(scheduler), EPOCH)


# ------------------------------------------------------------------ on every rank


def command(scheduler: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A boundary command."""
    act = {"kv_hold": _HANDOFF.hold, "kv_take": _HANDOFF.take, "kv_let_go": _HANDOFF.let_go}
    with torch.inference_mode():
        return act[name](_context(scheduler), arguments)


def rehearse(scheduler: Any) -> tuple[bool, int]:
    """Whether KV is as before, and how many rows were copied out and in."""
    _context(scheduler)
    table, copied = _HANDOFF._rows(scheduler), 0
    before = [buffer.clone() for buffer in pool_buffers(scheduler)]
    mover = table._mover

    def counted(slots: torch.Tensor, taking_out: bool) -> Any:
        nonlocal copied
        copied += len(slots)
        return mover(slots, taking_out)

    table._mover = counted  # type: ignore[method-assign]
    _HANDOFF.rehearse(scheduler)
    del table._mover
    after = pool_buffers(scheduler)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), copied


def offer(scheduler: Any, name: str) -> bytes:
    return _PEERS.offer(name)


def open_peer(
    scheduler: Any, name: str, tickets: list[bytes] | None, transfer_s: float = 20.0
) -> None:
    ticket = None if tickets is None else tickets[scheduler.ps.tp_rank]
    if scheduler.device == "cpu":
        _PEERS.open(name, "tcp", ticket, 20.0, transfer_s, PIECE_BYTES, IDLE_S)
    elif TRANSPORT == "tcp":
        _PEERS.open(name, "tcp", ticket, 20.0, transfer_s, 64 << 20, IDLE_S)
    else:
        _PEERS.open(name, "nccl", ticket, 20.0, transfer_s, 512 << 20, IDLE_S)


def close_peer(scheduler: Any, name: str) -> None:
    _PEERS.close(name)


def arrived(scheduler: Any, key: str, timeout_s: float) -> bool:
    return _HANDOFF.arrived(key, timeout_s)


def led(scheduler: Any, epoch: int) -> int:
    """A lease begins. How many hand-offs are held after it."""
    context = _context(scheduler)
    _HANDOFF.led_by(CommandContext(context.rank, context.scheduler, epoch))
    return _HANDOFF.holding()


def outgoing(scheduler: Any) -> dict[str, Any]:
    """What a replica that goes stays for."""
    return _HANDOFF.outgoing()


def threads(scheduler: Any) -> list[str]:
    """Those of communicators."""
    names = ("giver", "line", "taker")
    return [t.name for t in threading.enumerate() if t.name.startswith(names)]


def open_beside(scheduler: Any, name: str, tickets: list[bytes], init_s: float) -> None:
    """Meets in a thread of its own, as a rank does."""
    ticket = tickets[scheduler.ps.tp_rank]
    arguments = (name, "tcp", ticket, init_s, 20.0, PIECE_BYTES, IDLE_S)
    threading.Thread(target=_met, args=arguments, name="taker-meets", daemon=True).start()


def _met(name: str, *arguments: Any) -> None:
    try:
        _PEERS.open(name, *arguments)
        _MET[name] = ""
    except CollectiveError as error:
        _MET[name] = str(error)


def met(scheduler: Any, name: str) -> str | None:
    """What came of `open_beside`: empty, why not, or None for nothing yet."""
    return _MET.get(name)


def pid(scheduler: Any) -> int:
    return os.getpid()


def fault(scheduler: Any, kind: str, rank: int) -> None:
    """From the second piece on: the giving rank is killed, stops, sends garbage, or lets go of its
    KV; or the taking one has an error of its own, once."""
    if scheduler.ps.tp_rank != rank:
        return
    _context(scheduler)
    table, count = _HANDOFF._rows(scheduler), 0
    mover = table._mover

    def strange(slots: torch.Tensor, taking_out: bool) -> Any:
        move = mover(slots, taking_out)

        def act(staging: torch.Tensor) -> None:
            nonlocal count
            count += 1
            if kind == "killed" and count == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "stops" and count == 2:
                del table._mover
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "error" and count == 2:
                del table._mover
                raise KeyError("deliberate")
            if kind == "let go" and count == 2:
                with _HANDOFF._lock:
                    _HANDOFF._held.clear()
            move(staging)

        return act

    if kind == "garbage":
        garbled = Giver.__init__.__globals__["Conveyor"]
        seal = garbled._seal

        def wrong(self: Any, staging: torch.Tensor, size: int) -> None:
            seal(self, staging, size)
            staging[size // 2] += 1

        garbled._seal = wrong
    else:
        table._mover = strange


# ------------------------------------------------------------------ the other replica


class OtherReplica:
    """A harness in a child process, told what to do by pipe. Kill-proof: `close` ends it all."""

    def __init__(
        self, model: str, kind: type[EngineHarness], first_gpu: int = 0, **server_args: Any
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon: it has a child of its own at TP 2.
        self.process = context.Process(
            target=_host, args=(theirs, model, kind, first_gpu, server_args)
        )
        self.process.start()
        self.spoilt = False
        """Set by whoever has put a fault into it: it is not to be used again."""
        theirs.close()
        self._hear("ready", START_S)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A method of the harness."""
        self.begin(method, *arguments, **named)
        return self.end()

    def begin(self, method: str, *arguments: Any, **named: Any) -> None:
        self._pipe.send((method, arguments, named))

    def end(self) -> Any:
        return self._hear("did", ANSWER_S)

    def output(self, rid: str) -> Any:
        return self.call("output", rid)

    def close(self) -> None:
        if self.process.is_alive():
            with contextlib.suppress(AssertionError, EOFError, OSError, RuntimeError):
                self.call("close")
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)

    def _hear(self, what: str, deadline_s: float) -> Any:
        assert self._pipe.poll(deadline_s), f"the other replica did not say {what!r}"
        said, value = self._pipe.recv()
        if said == "failed":
            raise RuntimeError(value)
        assert said == what
        return value


def _host(
    pipe: Connection,
    model: str,
    kind: type[EngineHarness],
    first_gpu: int,
    server_args: dict[str, Any],
) -> None:
    prepare_process(kind.device)
    from ddtree_support import policy

    kind.first_gpu = first_gpu
    with policy("tree-15"):
        try:
            harness = kind(model, **server_args)
            pipe.send(("ready", None))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            raise
        while True:
            method, arguments, named = pipe.recv()
            try:
                if method == "output":
                    value: Any = harness.outputs[arguments[0]]
                else:
                    value = getattr(harness, method)(*arguments, **named)
                pipe.send(("did", value))
            except BaseException:
                pipe.send(("failed", traceback.format_exc()))
            if method == "close":
                return


def connect(here: Any, there: OtherReplica, name: str, transfer_s: float = 20.0) -> None:
    """The other replica gives, the one here takes."""
    tickets = there.call("at_boundary", offer, name)
    there.begin("at_boundary", open_peer, name, None, transfer_s)
    here.at_boundary(open_peer, name, tickets, transfer_s)
    there.end()


def take_part(here: Any, order: dict[str, Any], wait_s: float = 60.0) -> list[dict[str, Any]]:
    """One part of an order: asked for, waited for, taken in; the next one is on its way then. What
    the ranks report, with the seconds that they stood in all."""
    first = here.at_boundary(command, "kv_take", order)
    if first[0]["done"] or any(report["bytes"] for report in first):
        return first
    assert all(here.at_boundary(arrived, order["key"], wait_s)), "nothing came"
    then = here.at_boundary(command, "kv_take", order)
    for before, after in zip(first, then, strict=True):
        after["stood"] += before["stood"]
    return then


def take_all(here: Any, order: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """All parts of an order, the last one `done`."""
    parts = [take_part(here, order)]
    while not parts[-1][0]["done"]:
        assert all(here.at_boundary(arrived, order["key"], 60.0)), "nothing came"
        parts.append(here.at_boundary(command, "kv_take", order))
    return parts
