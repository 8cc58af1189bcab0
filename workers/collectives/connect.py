"""Brings a communicator up."""

from __future__ import annotations

import torch

from overstory.workers.collectives.interface import Communicator, Kind
from overstory.workers.collectives.meeting import Door, Seat

INIT_S = 30.0
TRANSFER_S = 60.0


def connect(
    kind: Kind,
    seat: Seat,
    door: Door | bytes,
    device: torch.device,
    init_s: float = INIT_S,
    transfer_s: float = TRANSFER_S,
) -> Communicator:
    """One rank's communicator, once all ranks are there.

    Args:
        kind: what carries the bytes: `nccl` between GPUs, `tcp` between CPUs. Alike on all ranks.
        seat: whose.
        door: on rank 0 its `Door`, which is used up; elsewhere that door's ticket.
        device: where its tensors are; this rank's own GPU for `nccl`, a CPU for `tcp`.
        init_s: how long to wait for the others, and then for the library below.
        transfer_s: longest that a transfer may take.

    Raises:
        RankMissing: names the ranks that did not come.
        CollectivesUnavailable: this process cannot have this kind.
        CollectiveError: anything else.
        ValueError: a kind that there is not, or a device that is not of it.
    """
    if (seat.rank == 0) != isinstance(door, Door):
        raise ValueError("rank 0 brings a Door, the others its ticket")
    if kind == "tcp":
        from overstory.workers.collectives.tcp import TcpCommunicator

        return TcpCommunicator.connect(seat, door, device, init_s, transfer_s)
    if kind == "nccl":
        from overstory.workers.collectives.nccl import NcclCommunicator

        return NcclCommunicator.connect(seat, door, device, init_s, transfer_s)
    raise ValueError(f"kind of communicator: got {kind!r}, wanted 'nccl' or 'tcp'")
