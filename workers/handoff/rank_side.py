"""What a rank actor has of all this. Imports torch only when something is handed over: the actor
must answer before it has imported anything large."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from overstory.workers.digest_gather import DigestGather
from overstory.workers.interfaces import meet_nccl_over_network

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

    from overstory.workers.collectives import Kind
    from overstory.workers.commands import CommandContext, CommandTable
    from overstory.workers.digest import DigestChain
    from overstory.workers.handoff.commands import KvHandoff
    from overstory.workers.handoff.peers import Peers

logger = logging.getLogger(__name__)

HAND_OFF_VARIABLE = "OVERSTORY_HAND_OFF"
"""Set where the deployment hands KV or weights over: a rank then does at its start what would hold
its loop up the first time, while it serves."""
TRANSFER_S = 10.0
"""Longest that an order of another replica's rows may take."""
MEETINGS_KEPT = 4
BUILD_TRANSFERS = 5
"""A new replica builds its model before it asks for weights: a communicator may be idle for so many
times its longest transfer."""


class RankSide:
    """One rank's communicators with other replicas, and its boundary commands. Thread-safe.

    Args:
        device: "cpu" or "cuda".
        ordinal: of the rank's GPU.
        address: of this node, as other nodes reach it.
    """

    def __init__(self, device: str, ordinal: Callable[[], int], address: Callable[[], str]) -> None:
        self._device, self._ordinal, self._address = device, ordinal, address
        self._lock = threading.Lock()
        self._made: tuple[KvHandoff, Peers] | None = None
        self._identity = ""
        self._loaded: dict[str, Any] = {}
        self._meetings: deque[dict[str, Any]] = deque(maxlen=MEETINGS_KEPT)

    def rehearse_meeting(self) -> None:
        """At the start of a rank: imports and library starts that the first meeting would bring. It
        takes the interpreter's lock and the GPU's driver from whatever else runs by then."""
        if HAND_OFF_VARIABLE not in os.environ:
            return
        try:
            self._parts()
            if self._device != "cpu":
                self._rehearse_nccl()
        except Exception as error:  # Whoever meets it finds out again, and does without.
            logger.warning("KV and weights may not come from other replicas: %s", error)

    def rehearse_rows(self, scheduler: Any) -> None:
        """Once there is a KV pool: its rows are copied once, as a hand-off does."""
        if HAND_OFF_VARIABLE not in os.environ:
            return
        try:
            self._parts()[0].rehearse(scheduler)
        except Exception as error:  # As above.
            logger.warning("KV may not come from other replicas: %s", error)

    def _rehearse_nccl(self) -> None:
        import torch

        from overstory.kernels import ops
        from overstory.workers.collectives import Door, Seat, connect
        from overstory.workers.handoff.pieces import Conveyor

        meet_nccl_over_network(self._address())
        device = self._torch_device()
        torch.cuda.set_device(device)  # As SGLang does next. No context on another rank's GPU.
        ops.prepare(device)
        alone = connect("nccl", Seat("rehearsal", 0, 1), Door(self._address()), device)
        try:
            Conveyor(alone, 1 << 16).rehearse()
        finally:
            alone.close()

    def register(self, table: CommandTable) -> None:
        """Adds the boundary commands."""
        for name in ("hold", "take", "let_go"):
            table.register(f"kv_{name}", self._handler(name))

    @contextlib.contextmanager
    def loading(self, server_args: ServerArgs, rank: int, source: str) -> Iterator[None]:
        """While the weights are loaded and graphs captured: from disk, or over the communicator
        `source`, which is closed after it, in a thread: NCCL takes half a second for that."""
        from overstory.workers.collectives import CollectiveError
        from overstory.workers.handoff.identity import identity_of, weights_move, weights_settings
        from overstory.workers.handoff.loading import SHELF

        self._identity = identity_of(server_args, rank)
        SHELF.settings = weights_settings(server_args, rank)
        SHELF.refuses = weights_move(server_args)
        try:
            if source:
                try:
                    SHELF.source = self._peers.taker(source)
                except CollectiveError as error:  # It has been lost since: disk is as good.
                    SHELF.reason = str(error)
            yield
        finally:
            SHELF.source = None
            if source:
                threading.Thread(
                    target=self.close, args=(source,), name="weights-close", daemon=True
                ).start()
            taken = SHELF.taken
            self._loaded = {
                "peer_bytes": taken.bytes,
                "peer_seconds": round(taken.seconds, 3),
                "disk": SHELF.reason,
            }

    def loaded(self) -> dict[str, Any]:
        """How the weights came: `peer_bytes`, `peer_seconds`, and `disk` with the reason if some
        came from there although a peer was named. Empty before."""
        return dict(self._loaded)

    def kind(self) -> Kind:
        """What carries the bytes to and from this rank."""
        return "tcp" if self._device == "cpu" else "nccl"

    def offer(self, name: str) -> bytes:
        """See `Peers.offer`."""
        return self._peers.offer(name)

    def open(
        self,
        name: str,
        kind: Kind,
        ticket: bytes | None,
        init_s: float,
        transfer_s: float = TRANSFER_S,
    ) -> None:
        """See `Peers.open`."""
        from overstory.workers.handoff.peers import IDLE_S
        from overstory.workers.handoff.pieces import PIECE_BYTES

        begun = time.perf_counter()
        if kind == "nccl":
            from overstory.kernels import ops
            from overstory.workers.collectives.nccl import load_nccl

            meet_nccl_over_network(self._address())
            ops.prepare(self._torch_device())  # No boundary is to wait for a build.
            load_nccl()
        ready = time.perf_counter()
        idle_s = max(IDLE_S, BUILD_TRANSFERS * transfer_s)
        self._peers.open(name, kind, ticket, init_s, transfer_s, PIECE_BYTES[kind], idle_s)
        met_s = time.perf_counter() - ready
        told = {"name": name, "at": round(time.time(), 2)}
        self._meetings.append(
            told | {"libraries_s": round(ready - begun, 3), "met_s": round(met_s, 3)}
        )

    def meetings(self) -> list[dict[str, Any]]:
        """The last ones: `name`, `at` (seconds since 1970, its end), `libraries_s` until its
        libraries were there, `met_s` until the other rank was; of those that are over `closed_at`
        and `closed_s`, which closing took."""
        closings = {} if self._made is None else self._made[1].closings()
        ended = {
            name: {"closed_at": round(at, 2), "closed_s": round(took_s, 3)}
            for name, (at, took_s) in closings.items()
        }
        return [met | ended.get(met["name"], {}) for met in list(self._meetings)]

    def close(self, name: str) -> None:
        """See `Peers.close`."""
        self._peers.close(name)

    def arrived(self, key: str, timeout_s: float) -> bool:
        """See `KvTaking.await_part`."""
        return self._parts()[0].arrived(key, timeout_s)

    def digest_gather(self, rank: int, chain: DigestChain) -> DigestGather:
        """Digests compared between the ranks of this replica, by what carries hand-offs."""
        return DigestGather(rank, chain, self.kind(), self._torch_device, self._address)

    def holding(self) -> int:
        """See `KvHandoff.holding`."""
        return 0 if self._made is None else self._made[0].holding()

    def outgoing(self) -> dict[str, Any]:
        """See `KvHandoff.outgoing`."""
        if self._made is None:
            return {"holding": 0, "fetched": []}
        return self._made[0].outgoing()

    def led_by(self, context: CommandContext) -> None:
        """See `KvHandoff.led_by`."""
        if self._made is not None:
            self._made[0].led_by(context)

    def _handler(self, name: str) -> Callable[[CommandContext, Mapping[str, Any]], Any]:
        def act(context: CommandContext, arguments: Mapping[str, Any]) -> Any:
            return getattr(self._kv, name)(context, arguments)

        return act

    @property
    def _kv(self) -> KvHandoff:
        kv = self._parts()[0]
        kv.identity = self._identity
        return kv

    @property
    def _peers(self) -> Peers:
        return self._parts()[1]

    def _parts(self) -> tuple[KvHandoff, Peers]:
        with self._lock:
            if self._made is None:
                from overstory.workers.handoff.commands import KvHandoff
                from overstory.workers.handoff.loading import SHELF
                from overstory.workers.handoff.peers import Peers

                kv = KvHandoff()
                answers = {"kv": kv.give, "weights": SHELF.give}
                kv.peers = Peers(answers, self._torch_device, self._address)
                self._made = kv, kv.peers
            return self._made

    def _torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._ordinal())
