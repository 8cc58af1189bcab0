"""Who may start now, who waits, who is turned away: the gateway's limit on sequences in flight.

Pure asyncio. A request counts with the number of its sequences, for that is what the engine has to
hold. At most `max_concurrent` sequences run, at most `max_queued` requests wait, strictly in order
of arrival: a large request at the head holds up smaller ones behind it, so that they cannot starve
it. Any other is refused at once with a time after which trying again makes sense.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_MIN_RETRY_S = 1
_MAX_RETRY_S = 60
_SMOOTHING = 0.2


class QueueFull(Exception):
    """The queue is full; `retry_after_s` estimates when a place will be free."""

    def __init__(self, running: int, queued: int, retry_after_s: int) -> None:
        super().__init__(f"{running} sequences are running and {queued} requests are waiting")
        self.retry_after_s = retry_after_s


class Slot:
    """Leave to run some sequences, given back once by `release`; more releases do nothing."""

    def __init__(self, admission: "Admission", sequences: int, started_s: float) -> None:
        self._admission: Admission | None = admission
        self._sequences = sequences
        self._started_s = started_s

    def release(self) -> None:
        """Give the places to whoever waits longest."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release(self._sequences, self._started_s)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    sequences: int
    turn: asyncio.Future[None]


class Admission:
    """The limit. Belongs to one event loop.

    Args:
        max_concurrent: sequences that may run.
        max_queued: requests that may wait.
        clock: seconds.
        largest: most sequences of one request; no later limit may be lower, or a request that
            waits could wait forever. Unset: `max_concurrent`.
    """

    def __init__(
        self,
        max_concurrent: int,
        max_queued: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        largest: int | None = None,
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(
                f"gateway.max_concurrent_requests is {max_concurrent}; it wants at least 1"
            )
        if max_queued < 0:
            raise ValueError(f"gateway.max_queued_requests is {max_queued}; it wants at least 0")
        self._largest = max_concurrent if largest is None else largest
        assert 1 <= self._largest <= max_concurrent, (largest, max_concurrent)
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._clock = clock
        self._waiting: deque[_Waiter] = deque()
        self._running = 0
        self._typical_s = 1.0

    @property
    def max_concurrent(self) -> int:
        """The limit in force."""
        return self._max_concurrent

    @property
    def largest(self) -> int:
        """Most sequences that one request may have."""
        return self._largest

    @property
    def running(self) -> int:
        """Sequences that hold a place."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for theirs."""
        return len(self._waiting)

    def set_max_concurrent(self, max_concurrent: int) -> None:
        """Change the limit; what runs goes on, who waits moves up."""
        assert max_concurrent >= self._largest, (max_concurrent, self._largest)
        self._max_concurrent = max_concurrent
        self._admit()

    async def acquire(self, sequences: int = 1) -> Slot:
        """A slot for `sequences` (at most `largest`), at once or in turn.

        Raises:
            QueueFull: it cannot run now and there is no place to wait.
        """
        self.refuse_if_full(sequences)
        if self._runs_now(sequences):
            self._running += sequences
        else:
            await self._wait(sequences)
        return Slot(self, sequences, self._clock())

    def refuse_if_full(self, sequences: int = 1) -> None:
        """For work on a request before it asks for its slot.

        Raises:
            QueueFull: it could not run and there is no place to wait, now.
        """
        assert 1 <= sequences <= self._largest, (sequences, self._largest)
        if not self._runs_now(sequences) and len(self._waiting) >= self._max_queued:
            raise QueueFull(self._running, len(self._waiting), self.retry_after_s())

    def retry_after_s(self) -> int:
        """Seconds until a newcomer could be served: the queue's length at the pace of late."""
        ahead = sum(waiter.sequences for waiter in self._waiting)
        wait = (ahead + 1) * self._typical_s / self._max_concurrent
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(wait)))

    def _runs_now(self, sequences: int) -> bool:
        return not self._waiting and self._fits(sequences)

    def _fits(self, sequences: int) -> bool:
        return self._running + sequences <= self._max_concurrent

    async def _wait(self, sequences: int) -> None:
        waiter = _Waiter(sequences, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.turn.cancelled():
                self._running -= sequences  # the places were ours already
            self._admit()
            raise

    def _release(self, sequences: int, started_s: float) -> None:
        held_s = self._clock() - started_s
        self._typical_s += _SMOOTHING * (held_s - self._typical_s)
        self._running -= sequences
        self._admit()

    def _admit(self) -> None:
        """Let in from the head of the queue who fits."""
        while self._waiting and (
            self._waiting[0].turn.done() or self._fits(self._waiting[0].sequences)
        ):
            waiter = self._waiting.popleft()
            if not waiter.turn.done():  # else it is leaving
                self._running += waiter.sequences
                waiter.turn.set_result(None)
