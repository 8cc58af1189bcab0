"""Who may start now, who waits, who is turned away: the gateway's limit on requests in flight.

Pure asyncio. At most `max_concurrent` requests run, at most `max_queued` wait in order of arrival,
any other is refused at once with a time after which trying again makes sense.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

_MIN_RETRY_S = 1
_MAX_RETRY_S = 60
_SMOOTHING = 0.2


class QueueFull(Exception):
    """The queue is full; `retry_after_s` estimates when a place will be free."""

    def __init__(self, running: int, queued: int, retry_after_s: int) -> None:
        super().__init__(f"{running} requests are running and {queued} are waiting")
        self.retry_after_s = retry_after_s


class Slot:
    """Leave to run, given back once by `release`; more releases do nothing."""

    def __init__(self, admission: "Admission", started_s: float) -> None:
        self._admission: Admission | None = admission
        self._started_s = started_s

    def release(self) -> None:
        """Give the place to whoever waits longest."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release(self._started_s)


class Admission:
    """The limit. Belongs to one event loop; `clock` gives seconds."""

    def __init__(
        self, max_concurrent: int, max_queued: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_concurrent < 1:
            raise ValueError(
                f"gateway.max_concurrent_requests is {max_concurrent}; it wants at least 1"
            )
        if max_queued < 0:
            raise ValueError(f"gateway.max_queued_requests is {max_queued}; it wants at least 0")
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running = 0
        self._typical_s = 1.0

    @property
    def max_concurrent(self) -> int:
        """The limit in force."""
        return self._max_concurrent

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    def set_max_concurrent(self, max_concurrent: int) -> None:
        """Change the limit; what runs goes on, who waits moves up."""
        assert max_concurrent >= 1, max_concurrent
        self._max_concurrent = max_concurrent
        while self._waiting and self._running < self._max_concurrent:
            self._running += 1
            self._hand_on()

    async def acquire(self) -> Slot:
        """A slot, at once or in turn.

        Raises:
            QueueFull: no slot and no place to wait.
        """
        self.refuse_if_full()
        if self._running < self._max_concurrent:
            self._running += 1
        else:
            await self._wait()
        return Slot(self, self._clock())

    def refuse_if_full(self) -> None:
        """For work on a request before it asks for its slot.

        Raises:
            QueueFull: no slot and no place to wait, now.
        """
        if self._running >= self._max_concurrent and len(self._waiting) >= self._max_queued:
            raise QueueFull(self._running, len(self._waiting), self.retry_after_s())

    def retry_after_s(self) -> int:
        """Seconds until a newcomer could be served: the queue's length at the pace of late."""
        wait = (len(self._waiting) + 1) * self._typical_s / self._max_concurrent
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, math.ceil(wait)))

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._hand_on()  # the place was ours already
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _release(self, started_s: float) -> None:
        held_s = self._clock() - started_s
        self._typical_s += _SMOOTHING * (held_s - self._typical_s)
        self._hand_on()

    def _hand_on(self) -> None:
        while self._waiting and self._running <= self._max_concurrent:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the count passes to the waiter
                return
        self._running -= 1
