"""A rank's communicators with the same rank of other replicas, and what is asked over them.

```
giving rank   offer -> ticket     open: meets, then a thread answers what the taking rank asks
taking rank                       open: meets
              close, on both
```

The giving side needs no boundary to send: what it gives is held and does not change. Whoever opened
a communicator may be gone before it closes it: what is of no more use is closed here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
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
OFFER_S = 60.0
"""An offer that nobody has taken up is withdrawn."""
IDLE_S = 60.0
"""A communicator that nobody uses is closed; its controller, which closes it sooner, is gone."""
LOOK_S = 1.0
_LISTEN_S = 1.0
CLOSINGS_KEPT = 8

Answer = Callable[[Any, int], tuple[Iterable[Piece], Callable[[], bool]]]
"""What is sent for an order, in pieces of at most so many bytes; ValueError refuses it. And what
says, when all is sent, whether it was all the time what was asked for."""


class Refused(CollectiveError):
    """The giving rank does not give that; the communicator goes on."""


class _Side:
    """What both sides are: a communicator that is in use, or has been idle for a while."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._using = threading.Lock()
        self._used = time.monotonic()
        self._ended = False

    def over(self, idle_s: float) -> bool:
        """Whether it is of no more use: its peer is gone, or nobody wanted anything for so long."""
        if self._using.locked():
            return False  # Whoever uses it finds out, and tells why.
        idle = time.monotonic() - self._used > idle_s
        return self._ended or idle or self._communicator.lost is not None

    def close(self) -> None:
        """Ends the communicator; a transfer under way fails."""
        self._ended = True
        self._communicator.close()

    def _done(self) -> None:
        self._used = time.monotonic()


class Giver(_Side):
    """The giving side of a communicator; its thread ends with the communicator."""

    def __init__(
        self, communicator: Communicator, answers: Mapping[str, Answer], piece_bytes: int
    ) -> None:
        super().__init__(communicator)
        self._answers = answers
        self._piece_bytes = piece_bytes
        self._thread = threading.Thread(
            target=self._serve, name=f"giver-{communicator.name}", daemon=True
        )
        self._thread.start()

    def over(self, idle_s: float) -> bool:
        """See `_Side.over`."""
        return not self._thread.is_alive() or super().over(idle_s)

    def close(self) -> None:
        """See `_Side.close`. The thread has ended after it."""
        super().close()
        self._thread.join()

    def _serve(self) -> None:
        if self._communicator.device.type == "cuda":
            torch.cuda.set_device(self._communicator.device)
        conveyor = Conveyor(self._communicator, self._piece_bytes)
        with torch.inference_mode():
            while not self._ended:
                try:
                    _, order = self._communicator.hear(_LISTEN_S)
                    with self._using:
                        self._answer(conveyor, order)
                        self._done()
                except TimeoutError:
                    continue
                except PeerLost:
                    return
                except CollectiveError as error:
                    if not self._ended:
                        logger.warning("giving to a peer ended: %s", error)
                    return
                except Exception:  # The taker must not wait for what does not come.
                    logger.exception("giving to a peer failed")
                    self._communicator.close()
                    return

    def _answer(self, conveyor: Conveyor, order: Any) -> None:
        try:
            if order["piece_bytes"] != conveyor.piece_bytes:
                raise ValueError(
                    f"pieces of {order['piece_bytes']} bytes were asked for, here they have "
                    f"{conveyor.piece_bytes}"
                )
            pieces, stands = self._answers[order["what"]](order, conveyor.piece_bytes)
        except (KeyError, ValueError) as reason:
            self._communicator.tell({"refused": str(reason)}, TAKER)
            return
        self._communicator.tell({"go": True}, TAKER)
        conveyor.send(pieces, TAKER)
        self._communicator.tell({"stands": stands()}, TAKER)


class Taker(_Side):
    """The taking side of a communicator. One thread at a time.

    Args:
        communicator: with the giving rank.
        piece_bytes: largest piece; as at the giving rank.
        limit_s: longest that one `take` may take.
    """

    def __init__(self, communicator: Communicator, piece_bytes: int, limit_s: float) -> None:
        super().__init__(communicator)
        self._conveyor = Conveyor(communicator, piece_bytes, limit_s)

    @property
    def piece_bytes(self) -> int:
        """Largest piece."""
        return self._conveyor.piece_bytes

    def take(self, order: Mapping[str, Any], pieces: Iterable[Piece]) -> Carried:
        """Asks for something and takes it out.

        Raises:
            Refused: nothing came, the communicator is as before.
            Garbled: all came, some of it wrong; the communicator is as before.
            CollectiveError: it did not come; the communicator is closed.
        """
        with self._using:
            try:
                return self._take(order, pieces)
            except (Refused, Garbled):
                raise
            except BaseException:
                self.close()  # What is still on its way would be the next order's answer.
                raise
            finally:
                self._done()

    def _take(self, order: Mapping[str, Any], pieces: Iterable[Piece]) -> Carried:
        self._communicator.tell({**order, "piece_bytes": self.piece_bytes}, GIVER)
        word = self._hear("go", "refused")
        if "refused" in word:
            raise Refused(word["refused"])
        try:
            carried = self._conveyor.receive(pieces, GIVER)
        except Garbled:
            self._hear("stands")  # It comes all the same, and is not for the next order.
            raise
        if not self._hear("stands")["stands"]:
            raise Garbled("the giving rank let go of it meanwhile")
        return carried

    def _hear(self, *expected: str) -> Mapping[str, Any]:
        """A word that has one of the `expected` keys."""
        name = self._communicator.name
        try:
            word = self._communicator.hear(ANSWER_S)[1]
        except TimeoutError as error:
            raise CollectiveError(
                f"communicator {name}: the giving rank does not answer"
            ) from error
        if not isinstance(word, dict) or not set(expected) & set(word):
            raise CollectiveError(
                f"communicator {name}: wanted {' or '.join(expected)}, the giving rank said "
                f"{str(word)[:80]}"
            )
        return word


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
        self._doors: dict[str, tuple[Door, float]] = {}
        self._open: dict[str, tuple[Giver | Taker, float]] = {}
        self._closings: deque[tuple[str, float, float]] = deque(maxlen=CLOSINGS_KEPT)
        self._keeper: threading.Thread | None = None

    def offer(self, name: str) -> bytes:
        """The giving rank's ticket, for the taking rank's `open` within `OFFER_S`."""
        door = Door(self._address())
        with self._lock:
            before = self._doors.pop(name, None)
            self._doors[name] = door, time.monotonic() + OFFER_S
            self._keep()
        if before is not None:
            before[0].close()
        return door.ticket

    def open(
        self,
        name: str,
        kind: Kind,
        ticket: bytes | None,
        init_s: float,
        transfer_s: float,
        piece_bytes: int,
        idle_s: float = IDLE_S,
    ) -> None:
        """Meets the other rank: with its ticket to take, without one to give.

        Args:
            name: unique to this incarnation.
            kind: what carries the bytes.
            ticket: of the giving rank; None on the giving rank.
            init_s: see `connect`.
            transfer_s: longest that a transfer may take.
            piece_bytes: largest piece, alike on both sides.
            idle_s: it is closed after so long without an order.

        Raises:
            CollectiveError: see `connect`.
            ValueError: nothing was offered here under that name, or it was withdrawn.
        """
        device = self._device() if kind == "nccl" else torch.device("cpu")
        with self._lock:
            offered = self._doors.pop(name, None)
        way = ticket or (offered and offered[0])
        if way is None:
            raise ValueError(f"no communicator {name!r} was offered here in {OFFER_S:g} s")
        seat = Seat(name, GIVER if ticket is None else TAKER, 2)
        communicator = connect(kind, seat, way, device, init_s, transfer_s)
        mine: Giver | Taker
        if ticket is None:
            mine = Giver(communicator, self._answers, piece_bytes)
        else:
            mine = Taker(communicator, piece_bytes, transfer_s)
        with self._lock:
            before = self._open.pop(name, None)
            self._open[name] = mine, idle_s
            self._keep()
        if before is not None:
            before[0].close()

    def taker(self, name: str) -> Taker:
        """Raises CollectiveError where there is none."""
        with self._lock:
            found, _ = self._open.get(name, (None, 0.0))
        if not isinstance(found, Taker):
            raise CollectiveError(f"no communicator {name!r} to take from")
        return found

    def close(self, name: str) -> None:
        """Ends one; no-op for an unknown name."""
        with self._lock:
            door, side = self._doors.pop(name, None), self._open.pop(name, None)
        if door is not None:
            door[0].close()
        if side is not None:
            begun = time.perf_counter()
            side[0].close()
            self._closings.append((name, time.time(), time.perf_counter() - begun))

    def closings(self) -> dict[str, tuple[float, float]]:
        """Of the last communicators that ended, by name: when (seconds since 1970) and how long it
        took."""
        return {name: (at, took_s) for name, at, took_s in list(self._closings)}

    def _keep(self) -> None:
        """Holds the lock: somebody looks after what there is, until there is nothing."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._look, name="peers-keeper", daemon=True)
            self._keeper.start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                if not self._doors and not self._open:
                    self._keeper = None
                    return
                now = time.monotonic()
                useless = [name for name, (_, until) in self._doors.items() if now > until]
                useless += [
                    name for name, (side, idle_s) in self._open.items() if side.over(idle_s)
                ]
            for name in useless:
                logger.info("communicator %s is of no more use, and is closed", name)
                self.close(name)
