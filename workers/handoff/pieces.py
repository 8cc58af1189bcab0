"""Many bytes from one rank to another, in pieces of bounded size, each with its checksum.

On a GPU two stagings take turns: while one is on its way the next is filled, and while one comes in
the one before is taken out.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from overstory.workers.collectives import CollectiveError, Communicator, TransferTimeout

PIECE_BYTES = {"tcp": 64 << 20, "nccl": 512 << 20}
"""Largest piece. Smaller ones leave NVLink waiting between them (docs/hand-off.md)."""
_ROW = 1 << 13
_WORDS = _ROW // 8
_TAIL = 16


class Garbled(CollectiveError):
    """What came is not what was sent."""


@dataclass(frozen=True)
class Piece:
    """A part of what is sent.

    Attributes:
        size: bytes, at most the staging's.
        move: fills (at the sender) or takes out (at the receiver) a staging uint8 [size], on the
            staging's device, on the current stream.
    """

    size: int
    move: Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Carried:
    """What a transfer took."""

    bytes: int
    seconds: float

    def __add__(self, other: Carried) -> Carried:
        return Carried(self.bytes + other.bytes, self.seconds + other.seconds)


class Conveyor:
    """Sends and receives pieces over a communicator, whose own transfers must be over.

    Args:
        communicator: of both ranks.
        piece_bytes: largest piece; twice that is held while a transfer runs.
        limit_s: longest for all pieces that `receive` takes; each has the communicator's own too.
    """

    def __init__(
        self, communicator: Communicator, piece_bytes: int, limit_s: float = math.inf
    ) -> None:
        self._limit_s = limit_s
        self.piece_bytes = -(-piece_bytes // _ROW) * _ROW
        self._communicator = communicator
        self._device = communicator.device
        self._weights = torch.arange(
            1, self.piece_bytes // _ROW + 1, dtype=torch.int64, device=self._device
        )

    def send(self, pieces: Iterable[Piece], to: int) -> Carried:
        """All pieces, in order. Returns when they are on their way for good.

        Raises:
            CollectiveError: see `Communicator.wait`.
        """
        begun, total = time.perf_counter(), 0
        with self._lanes() as lanes:
            for number, piece in enumerate(pieces):
                lane = lanes[number % len(lanes)]
                with lane.filling():
                    piece.move(lane.staging[: piece.size])
                    self._seal(lane.staging, piece.size)
                with lane.carrying():
                    self._communicator.send(lane.staging[: _sealed(piece.size)], to)
                total += piece.size
        return Carried(total, time.perf_counter() - begun)

    def receive(self, pieces: Iterable[Piece], source: int) -> Carried:
        """All pieces, in order, of the same sizes as at the sender.

        Raises:
            Garbled: a checksum differs. All pieces were taken out, wrong or not.
            TransferTimeout: a peer so slow that whoever waits for this has waited long enough.
            CollectiveError: see `Communicator.wait`.
        """
        begun, total = time.perf_counter(), 0
        wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        with self._lanes() as lanes:
            for number, piece in enumerate(pieces):
                lane = lanes[number % len(lanes)]
                with lane.carrying(first=True):
                    self._communicator.receive(lane.staging[: _sealed(piece.size)], source)
                with lane.filling(first=False):
                    wrong += self._broken(lane.staging, piece.size)
                    piece.move(lane.staging[: piece.size])
                total += piece.size
                self._keep_to_the_limit(begun)
        if int(wrong):
            raise Garbled(
                f"communicator {self._communicator.name}: {int(wrong)} pieces came with a wrong "
                "checksum"
            )
        return Carried(total, time.perf_counter() - begun)

    def rehearse(self) -> None:
        """Does once to a staging what transfers do, so that what that needs is loaded."""
        with torch.inference_mode(), self._lanes() as lanes:
            for lane in lanes:
                with lane.filling():
                    self._seal(lane.staging, 1)
                with lane.carrying():
                    self._broken(lane.staging, 1)

    @contextlib.contextmanager
    def _lanes(self) -> Iterator[list[_Lane]]:
        """Stagings to take turns with. At the end all is done; after an error nothing of it is
        under way any more, so that nobody writes to memory that was given back."""
        size = self.piece_bytes + _TAIL
        if self._device.type != "cuda":
            yield [_Lane(torch.empty(size, dtype=torch.uint8))]
            return
        current = torch.cuda.current_stream(self._device)
        # When a piece has arrived the next one may go and the free staging be filled, at once: of
        # equal priority the many blocks of the filling would have their turn before NCCL's few.
        carry = torch.cuda.Stream(self._device, priority=-1)
        fill = torch.cuda.Stream(self._device)
        carry.wait_stream(current)
        fill.wait_stream(current)
        try:
            lanes: list[_Lane] = [
                _CudaLane(torch.empty(size, dtype=torch.uint8, device=self._device), carry, fill)
                for _ in range(2)
            ]
            yield lanes
            with torch.cuda.stream(carry):
                self._communicator.wait()
        except BaseException:
            self._communicator.close()  # Else what is under way might wait for ever.
            raise
        finally:
            for stream in (carry, fill):
                stream.synchronize()

    def _keep_to_the_limit(self, begun: float) -> None:
        if time.perf_counter() - begun > self._limit_s:
            raise TransferTimeout(
                f"communicator {self._communicator.name}: not done in {self._limit_s:g} s"
            )

    def _seal(self, staging: torch.Tensor, size: int) -> None:
        _pad(staging, size)
        tail = _sealed(size) - _TAIL
        staging[tail : tail + _TAIL].view(torch.int64).copy_(self._checksum(staging, size))

    def _broken(self, staging: torch.Tensor, size: int) -> torch.Tensor:
        tail = _sealed(size) - _TAIL
        said = staging[tail : tail + _TAIL].view(torch.int64)
        return (said != self._checksum(staging, size)).any().to(torch.int64)

    def _checksum(self, staging: torch.Tensor, size: int) -> torch.Tensor:
        """int64 [2]: the sum of all words, and the sum of the rows' sums weighted by place."""
        words = staging[: _padded(size)].view(torch.int64).view(-1, _WORDS)
        sums = words.sum(1)
        return torch.stack((sums.sum(), (sums * self._weights[: len(sums)]).sum()))


class _Lane:
    """A staging on a CPU: everything happens in order."""

    def __init__(self, staging: torch.Tensor) -> None:
        self.staging = staging

    def filling(self, first: bool = True) -> Any:
        return contextlib.nullcontext()

    def carrying(self, first: bool = False) -> Any:
        return contextlib.nullcontext()


class _CudaLane(_Lane):
    """A staging on a GPU: whoever is first in a turn waits for the end of the turn before."""

    def __init__(
        self, staging: torch.Tensor, carry: torch.cuda.Stream, fill: torch.cuda.Stream
    ) -> None:
        super().__init__(staging)
        self._carry, self._fill = carry, fill
        self._done = torch.cuda.Event()
        self._half = torch.cuda.Event()

    def filling(self, first: bool = True) -> Any:
        return self._turn(self._fill, first)

    def carrying(self, first: bool = False) -> Any:
        return self._turn(self._carry, first)

    @contextlib.contextmanager
    def _turn(self, stream: torch.cuda.Stream, first: bool) -> Any:
        stream.wait_event(self._done if first else self._half)
        with torch.cuda.stream(stream):
            yield
        (self._half if first else self._done).record(stream)


def _padded(size: int) -> int:
    return -(-size // _ROW) * _ROW


def _sealed(size: int) -> int:
    """Bytes of a piece on its way: padded, with its checksum behind."""
    return _padded(size) + _TAIL


def _pad(staging: torch.Tensor, size: int) -> None:
    end = _padded(size)
    if end > size:
        staging[size:end].zero_()
