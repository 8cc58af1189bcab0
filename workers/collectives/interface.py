"""What every communicator offers, whatever carries the bytes."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from overstory.workers.collectives.errors import PeerLost

Kind = Literal["nccl", "tcp"]


class Communicator(Protocol):
    """Ranks 0 to `size - 1`, each in a process of its own. One thread at a time.

    Tensors are contiguous and on `device`; both sides name the same number of bytes. Operations are
    ordered; one may still be under way when its call returns (NCCL: on the calling thread's current
    stream). `wait` says when all are done: before that no tensor of theirs may be read or reused by
    the host. After any error only `close` is of use.
    """

    name: str
    rank: int
    size: int
    device: torch.device

    @property
    def lost(self) -> PeerLost | None:
        """The first loss of a rank that was noticed. From any thread."""

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To one rank, which calls `receive`."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """From one rank, into `tensor`."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """From `root` into everyone's `tensor`."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's `tensor`, by rank."""

    def tell(self, word: Any, to: int) -> None:
        """A word (plain values) beside the tensors, over TCP: between rank 0 and any other.

        Raises:
            PeerLost: names the rank.
        """

    def hear(self, timeout_s: float) -> tuple[int, Any]:
        """The next word, and the rank that said it. From any thread.

        Raises:
            PeerLost: none will come any more.
            TimeoutError: none came.
        """

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all operations so far are done.

        Args:
            timeout_s: instead of the communicator's own.

        Raises:
            PeerLost: names the rank.
            TransferTimeout: not in time.
            CollectiveError: anything else that the library below reports.
        """

    def close(self) -> None:
        """Gives everything back: sockets, threads, memory. Waits for nobody. Idempotent.

        For the other ranks this one is lost a second later: a communicator ends as a whole.
        """
