"""What a rank actor has of all this. Imports torch only when something is handed over: the actor
must answer before it has imported anything large."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sglang.srt.server_args import ServerArgs

    from overstory.workers.collectives import Kind
    from overstory.workers.commands import CommandContext, CommandTable
    from overstory.workers.handoff.commands import KvHandoff
    from overstory.workers.handoff.peers import Peers

TRANSFER_S = 10.0
"""Longest that the ranks of a replica wait for rows of another one: they stand still meanwhile."""


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

    def register(self, table: CommandTable) -> None:
        """Adds the boundary commands."""
        for name in ("hold", "take", "let_go"):
            table.register(f"kv_{name}", self._handler(name))

    def identify(self, server_args: ServerArgs, rank: int) -> None:
        """Before the weights are loaded; see `identity_of`."""
        from overstory.workers.handoff.identity import identity_of

        self._identity = identity_of(server_args, rank)

    def kind(self) -> Kind:
        """What carries the bytes to and from this rank."""
        return "tcp" if self._device == "cpu" else "nccl"

    def offer(self, name: str) -> bytes:
        """See `Peers.offer`."""
        return self._peers.offer(name)

    def open(self, name: str, kind: Kind, ticket: bytes | None, init_s: float) -> None:
        """See `Peers.open`."""
        from overstory.workers.handoff.pieces import PIECE_BYTES

        self._peers.open(name, kind, ticket, init_s, TRANSFER_S, PIECE_BYTES[kind])

    def close(self, name: str) -> None:
        """See `Peers.close`."""
        self._peers.close(name)

    def holding(self) -> int:
        """See `KvHandoff.holding`."""
        return 0 if self._made is None else self._made[0].holding()

    def _handler(self, name: str) -> Callable[[CommandContext, Mapping[str, Any]], Any]:
        def act(context: CommandContext, arguments: Mapping[str, Any]) -> Any:
            return getattr(self._kv, name)(context, arguments)

        return act

    @property
    def _kv(self) -> KvHandoff:
        return self._parts()[0]

    @property
    def _peers(self) -> Peers:
        return self._parts()[1]

    def _parts(self) -> tuple[KvHandoff, Peers]:
        with self._lock:
            if self._made is None:
                from overstory.workers.handoff.commands import KvHandoff
                from overstory.workers.handoff.peers import Peers

                kv = KvHandoff()
                kv.identity = self._identity
                kv.peers = Peers({"kv": kv.give}, self._torch_device, self._address)
                self._made = kv, kv.peers
            return self._made

    def _torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._ordinal())
