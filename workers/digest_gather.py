"""Digests compared by the ranks themselves, at each boundary where a lease begins.

The controller compares reports, and is told of a difference within a lease; it may be away. This
costs each lease one exchange of 16 bytes, needs no controller, and a rank that differs from rank 0
ends before it steps again.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overstory.workers.digest import DigestChain
from overstory.workers.gate import RanksDiverged

if TYPE_CHECKING:
    import torch

    from overstory.workers.collectives import Communicator, Kind

COMPARE_VARIABLE = "OVERSTORY_COMPARE_DIGESTS"
"""`gather` switches it on (`control.compare_digests`)."""

_INIT_S = 60.0
_EXCHANGE_S = 30.0


class DigestGather:
    """One rank's.

    Args:
        rank: this one.
        chain: its digests.
        kind: what carries them.
        device: for NCCL, of this rank.
        address: of this node, as the other ranks reach it.
    """

    def __init__(
        self,
        rank: int,
        chain: DigestChain,
        kind: Kind,
        device: Callable[[], torch.device],
        address: Callable[[], str],
    ) -> None:
        self._rank, self._chain, self._kind = rank, chain, kind
        self._device, self._address = device, address
        self._communicator: Communicator | None = None

    def compare(self, group: Any) -> None:
        """On every rank, at the same boundary.

        Args:
            group: SGLang's group of the ranks; only to meet, the first time.

        Raises:
            RanksDiverged: this rank has not the digest of rank 0.
            CollectiveError: a rank is gone or does not answer.
        """
        if group.world_size == 1:
            return
        import torch

        communicator = self._communicator
        if communicator is None:
            communicator = self._communicator = self._meet(group)
        count, head = self._chain.head()
        cuda = communicator.device.type == "cuda"
        # Not behind what the engine has under way: it would have to end first.
        aside: Any = contextlib.nullcontext()
        if cuda:
            aside = torch.cuda.stream(torch.cuda.Stream(communicator.device))
        with aside:
            mine = torch.tensor([count, head], dtype=torch.int64).to(communicator.device)
            parts = communicator.all_gather(mine)
            communicator.wait()
            others = [part.tolist() for part in parts]
        if others[self._rank] != others[0]:
            raise RanksDiverged(
                f"rank {self._rank} differs from rank 0 at a boundary: {count} digests ending "
                f"{head & 0xFFFFFFFF:08x}, rank 0 {others[0][0]} ending "
                f"{others[0][1] & 0xFFFFFFFF:08x}"
            )

    def close(self) -> None:
        """Gives the communicator back."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def _meet(self, group: Any) -> Communicator:
        import torch

        from overstory.workers.collectives import Door, Seat, connect

        door = Door(self._address()) if self._rank == 0 else None
        said = [None] if door is None else [(f"digests-{uuid.uuid4().hex}", door.ticket)]
        torch.distributed.broadcast_object_list(said, src=group.ranks[0], group=group.cpu_group)
        assert said[0] is not None
        name, ticket = said[0]
        device = self._device() if self._kind == "nccl" else torch.device("cpu")
        seat = Seat(name, self._rank, group.world_size)
        return connect(self._kind, seat, door or ticket, device, _INIT_S, _EXCHANGE_S)
