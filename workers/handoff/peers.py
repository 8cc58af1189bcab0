"""A rank's communicators with the same rank of other replicas, and what is asked over them.

```
giving rank   offer -> ticket     open: meets, then a thread answers what the taking rank asks
taking rank                       open: meets
              close, on both
```

The giving side needs no boundary to send: what it gives is held and does not change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from overstory.workers.collectives import (
    CollectiveError,
    Communicator,
    Door,
    Kind,
    PeerLost,
    Seat,
    connect,
)
from overstory.workers.handoff.pieces import Carried, Conveyor, Garbled, Piece

logger = logging.getLogger(__name__)

GIVER, TAKER = 0, 1
ANSWER_S = 10.0
_LISTEN_S = 1.0

Answer = Callable[[Any, int], tuple[Iterable[Piece], Callable[[], bool]]]
"""What is sent for an order, in pieces of at most so many bytes; ValueError refuses it. And what
says, when all is sent, whether it was all the time what was asked for."""


class Refused(CollectiveError):
    """The giving rank does not give that; the communicator goes on."""


class Giver:
    """The giving side of a communicator; its thread ends with the communicator."""

    def __init__(
        self, communicator: Communicator, answers: Mapping[str, Answer], piece_bytes: int
    ) -> None:
        self._communicator = communicator
        self._answers = answers
        self._piece_bytes = piece_bytes
        self._ending = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, name=f"giver-{communicator.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, waiting for a transfer under way to fail."""
        self._ending.set()
        self._communicator.close()
        self._thread.join()

    def _serve(self) -> None:
        if self._communicator.device.type == "cuda":
            torch.cuda.set_device(self._communicator.device)
        conveyor = Conveyor(self._communicator, self._piece_bytes)
        with torch.inference_mode():
            while not self._ending.is_set():
                try:
                    _, order = self._communicator.hear(_LISTEN_S)
                    self._answer(conveyor, order)
                except TimeoutError:
                    continue
                except PeerLost:
                    return
                except CollectiveError as error:
                    if not self._ending.is_set():
                        logger.warning("giving to a peer ended: %s", error)
                    return
                except Exception:  # The taker must not wait for what does not come.
                    logger.exception("giving to a peer failed")
                    self._communicator.close()
                    return

    def _answer(self, conveyor: Conveyor, order: Any) -> None:
        try:
            pieces, stands = self._answers[order["what"]](order, self._piece_bytes)
        except (KeyError, ValueError) as reason:
            self._communicator.tell({"refused": str(reason)}, TAKER)
            return
        self._communicator.tell({"go": True}, TAKER)
        conveyor.send(pieces, TAKER)
        self._communicator.tell({"stands": stands()}, TAKER)


class Taker:
    """The taking side of a communicator. One thread at a time."""

    def __init__(self, communicator: Communicator, piece_bytes: int) -> None:
        self._communicator = communicator
        self._conveyor = Conveyor(communicator, piece_bytes)

    @property
    def piece_bytes(self) -> int:
        """Largest piece."""
        return self._conveyor.piece_bytes

    def take(self, order: Mapping[str, Any], pieces: Iterable[Piece]) -> Carried:
        """Asks for something and takes it out.

        Raises:
            Refused: nothing came, the communicator is as before.
            Garbled: all came, some of it wrong.
            CollectiveError: the communicator is of no more use.
        """
        self._communicator.tell(dict(order), GIVER)
        word = self._hear()
        if "refused" in word:
            raise Refused(word["refused"])
        carried = self._conveyor.receive(pieces, GIVER)
        if not self._hear()["stands"]:
            raise Garbled("the giving rank let go of it meanwhile")
        return carried

    def _hear(self) -> Any:
        try:
            return self._communicator.hear(ANSWER_S)[1]
        except TimeoutError as error:
            raise CollectiveError(
                f"communicator {self._communicator.name}: the giving rank does not answer"
            ) from error

    def close(self) -> None:
        """Ends the communicator."""
        self._communicator.close()


class Peers:
    """All of a rank's, by name. Thread-safe.

    Args:
        answers: by name of what is asked for.
        device: of the rank: where NCCL's tensors are.
        address: this node's, for others to reach.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer],
        device: Callable[[], torch.device],
        address: Callable[[], str],
    ) -> None:
        self._answers, self._device, self._address = answers, device, address
        self._lock = threading.Lock()
        self._doors: dict[str, Door] = {}
        self._open: dict[str, Giver | Taker] = {}

    def offer(self, name: str) -> bytes:
        """The giving rank's ticket, for the taking rank's `open`."""
        door = Door(self._address())
        with self._lock:
            before = self._doors.pop(name, None)
            self._doors[name] = door
        if before is not None:
            before.close()
        return door.ticket

    def open(
        self,
        name: str,
        kind: Kind,
        ticket: bytes | None,
        init_s: float,
        transfer_s: float,
        piece_bytes: int,
    ) -> None:
        """Meets the other rank: with its ticket to take, without one to give.

        Raises:
            CollectiveError: see `connect`.
        """
        device = self._device() if kind == "nccl" else torch.device("cpu")
        with self._lock:
            door = self._doors.pop(name, None)
        way = ticket or door
        if way is None:
            raise ValueError(f"no communicator {name!r} was offered here")
        seat = Seat(name, GIVER if ticket is None else TAKER, 2)
        communicator = connect(kind, seat, way, device, init_s, transfer_s)
        mine: Giver | Taker
        if ticket is None:
            mine = Giver(communicator, self._answers, piece_bytes)
        else:
            mine = Taker(communicator, piece_bytes)
        with self._lock:
            before = self._open.pop(name, None)
            self._open[name] = mine
        if before is not None:
            before.close()

    def taker(self, name: str) -> Taker:
        """Raises CollectiveError where there is none."""
        with self._lock:
            found = self._open.get(name)
        if not isinstance(found, Taker):
            raise CollectiveError(f"no communicator {name!r} to take from")
        return found

    def close(self, name: str) -> None:
        """Ends one; no-op for an unknown name."""
        with self._lock:
            parts = [self._doors.pop(name, None), self._open.pop(name, None)]
        for part in parts:
            if part is not None:
                part.close()
