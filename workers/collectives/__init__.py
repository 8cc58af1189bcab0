"""Tensors between processes, apart from the engine's own groups: hand-off, weights, digests.

`connect` gives a `Communicator`: by NCCL (through CuPy) for GPUs, by TCP for CPUs. Each is private
to whoever made it: no default group, no detached actor, no name that outlives it.
"""

from overstory.workers.collectives.connect import connect
from overstory.workers.collectives.errors import (
    CollectiveError,
    CollectivesUnavailable,
    PeerLost,
    RankMissing,
    TransferTimeout,
)
from overstory.workers.collectives.interface import Communicator, Kind
from overstory.workers.collectives.meeting import Door, Seat

__all__ = [
    "CollectiveError",
    "CollectivesUnavailable",
    "Communicator",
    "Door",
    "Kind",
    "PeerLost",
    "RankMissing",
    "Seat",
    "TransferTimeout",
    "connect",
]
