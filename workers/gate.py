"""The step gate: where leases enter a replica, at the same iteration on all ranks.

```
rank 0   before SGLang pulls requests:
           nothing to run  -> sleep on its input sockets and a wake-up line, at most `IDLE_WAIT_S`
           steps used up   -> wait for the next lease, at most the lease time-out
           then: leases that begin now go in front of the pulled requests
all      SGLang broadcasts the list, as it does in every iteration
all      after the broadcast: leases are taken out again and begun, before any request is handled
```

Other ranks wait in the broadcast, so no rank can be ahead of rank 0's gate. Nothing here is decided
twice: rank 0's ledger decides, the others obey what the broadcast brings.

This module knows the scheduler only through `SchedulerView`; `overstory.workers.rank_hooks` ties
both.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from overstory.orchestrator.lease import Lease, LeaseLedger, LeaseView
from overstory.workers.wake_line import WakeLine

STAND_S = 0.25
"""An iteration of rank 0 that takes longer is counted and noted: a prefill, a compilation, a
command at a boundary, or a process with no turn on its CPU."""
STANDS_KEPT = 8
IDLE_WAIT_S = 5.0
"""Longest sleep of an idle replica: bounds how late SGLang's own idle housekeeping runs. Must stay
well below the process group's time-out, since the other ranks spend it in a broadcast."""


class SchedulerView(Protocol):
    """What the gate must know and do of a rank's scheduler."""

    def launched(self) -> int:
        """Batches launched so far; equal on all ranks at a boundary."""

    def running_at(self) -> int:
        """`launched` while requests run for certain, else -1: then ask `idle`."""

    def idle(self) -> bool:
        """Whether nothing is running, queued or in flight."""

    def input_waits(self, timeout_s: float, wake_line: int) -> bool:
        """Sleeps until a request can be read: True. False: the wake line rang, or time is up."""

    def drain(self) -> None:
        """Finishes the results of every launched batch."""


@dataclass(frozen=True)
class LeaseBegins:
    """Travels in front of the requests of one iteration.

    Attributes:
        lease: begins at this boundary.
        launched: rank 0's count of launched batches; every rank must have the same.
    """

    lease: Lease
    launched: int


class RanksDiverged(RuntimeError):
    """This rank does not stand where rank 0 stands: going on would corrupt or hang the replica."""


class StepGate:
    """The gate of one rank.

    The loop's thread calls `before_pull` and `after_broadcast`, control threads the rest.

    Args:
        rank: tensor-parallel rank; only rank 0 holds a ledger that counts.
        timeout_s: lease time-out.
        begin: carries out a lease that begins (policy, commands); called on every rank.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        begin: Callable[[Lease], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._begin = begin
        self._ledger = LeaseLedger(timeout_s, clock)
        self._changed = threading.Condition()
        self._wake_line = WakeLine()
        self._napping = False
        self._offers = 0
        self._reports_at: list[int] = []  # batches at which those in `await_due` return
        self._iterations = 0
        self._launched = 0
        self._quiet_until: float = 0  # batches up to which a busy loop need not stop here
        self._idle_s = 0.0
        self._lease_wait_s = 0.0
        self._left_at = math.inf  # when the iteration under way began
        self._stood_s = 0.0
        self._stands: deque[tuple[float, float, int]] = deque(maxlen=STANDS_KEPT)
        self._clock = clock
        self._policy: str | None = None
        self._epoch = self._seq = 0

    # ------------------------------------------------------------------ the loop's thread

    def before_pull(self, scheduler: SchedulerView) -> list[LeaseBegins]:
        """Rank 0, before requests are read: sleeps or waits as the picture above says.

        Returns:
            leases that begin with this iteration, to go in front of its requests.
        """
        assert self._rank == 0, "only rank 0 decides at the gate"
        now = self._clock()
        if now - self._left_at > STAND_S:
            self._note_stand(now - self._left_at, scheduler.launched())
        self._left_at = now
        launched = scheduler.running_at()
        if -1 < launched < self._quiet_until:
            self._launched = launched
            return []
        begins = self._pull(scheduler)
        self._left_at = self._clock()
        return begins

    def _pull(self, scheduler: SchedulerView) -> list[LeaseBegins]:
        begins: list[LeaseBegins] = []
        while True:
            busy = self._has_work(scheduler)
            launched = scheduler.launched()
            with self._changed:
                self._launched = launched
                boundary = self._ledger.boundary(launched, busy)
                begins += [LeaseBegins(lease, launched) for lease in boundary.begins]
                if not begins:  # Else when they have begun, so that the report has that.
                    self._wake_reporters()
                if boundary.go or begins:
                    self._quiet_until = self._ledger.quiet_until()
                    if not self._report_due():  # Else they are awake, and say when to stop again.
                        self._quiet_until = min(self._quiet_until, *self._reports_at, math.inf)
                    return begins
                self._wait_for_lease(boundary.wait_s)

    def after_broadcast(self, requests: list[Any], scheduler: SchedulerView) -> list[Any]:
        """All ranks, with what the broadcast brought: begins leases, gives the requests back alone.

        Raises:
            RanksDiverged: rank 0 has launched another number of batches than this rank.
        """
        self._iterations += 1
        if not requests:
            return requests
        messages = [request for request in requests if isinstance(request, LeaseBegins)]
        if not messages:
            return requests
        self._launched = scheduler.launched()
        for message in messages:
            self._check_step(message)
            if any(command.drain for command in message.lease.commands):
                scheduler.drain()
            self._begin(message.lease)
            self._policy = message.lease.policy
            self._epoch, self._seq = message.lease.epoch, message.lease.seq
        with self._changed:
            self._wake_reporters()
        return [request for request in requests if not isinstance(request, LeaseBegins)]

    # ------------------------------------------------------------------ control threads

    def attach(self, owner: str = "", held: int = 0) -> int:
        """See `LeaseLedger.attach`. Rank 0 only."""
        with self._changed:
            self._quiet_until = 0
            return self._ledger.attach(owner, held)

    def detach(self, epoch: int) -> None:
        """The controller of `epoch` lets go: the replica runs freely and says so."""
        with self._changed:
            self._ledger.detach(epoch)
            self._quiet_until = 0
            self._wake()

    def offer(self, lease: Lease) -> None:
        """Queues a lease; raises `LeaseRefused` as the ledger does."""
        with self._changed:
            self._ledger.offer(lease)
            self._offers += 1
            # Else it begins where the present one ends: there the loop stops anyway.
            if self._ledger.pending(self._launched):
                self._quiet_until = 0
            self._wake()

    def await_due(self, timeout_s: float, seen: int, every: int) -> None:
        """Waits for a reason to report.

        That is: the next lease is due, `every` batches were launched since `seen`, a lease was
        offered meanwhile, or time is up.
        """
        deadline, batches = self._clock() + timeout_s, seen + every
        with self._changed:
            offers = self._offers
            self._reports_at.append(batches)
            try:
                while not self._due_at(batches) and self._offers == offers:
                    left = deadline - self._clock()
                    if left <= 0:
                        return
                    self._quiet_until = min(self._quiet_until, batches)
                    self._changed.wait(left)
            finally:
                self._reports_at.remove(batches)

    def view(self) -> LeaseView:
        """The ledger as rank 0 sees it; meaningless on other ranks."""
        with self._changed:
            return self._ledger.view(self._launched)

    def counters(self) -> dict[str, Any]:
        """Any rank's own count: iterations, lease in force, seconds waited.

        Of rank 0 also `stood_s`, the time of iterations longer than `STAND_S`, and `stands`, the
        last of these: when each ended (seconds since 1970), how long it took, batches by then.
        """
        return {
            "iterations": self._iterations,
            "epoch": self._epoch,
            "seq": self._seq,
            "policy": self._policy,
            "idle_s": round(self._idle_s, 3),
            "lease_wait_s": round(self._lease_wait_s, 3),
            "stood_s": round(self._stood_s, 3),
            "stands": [(round(at, 2), round(s, 3), batches) for at, s, batches in self._stands],
        }

    # ------------------------------------------------------------------ inside

    def _note_stand(self, took_s: float, launched: int) -> None:
        """At the end of an iteration of rank 0, which sleeps and waits for leases between two."""
        self._stood_s += took_s
        self._stands.append((time.time(), took_s, launched))

    def _has_work(self, scheduler: SchedulerView) -> bool:
        """Whether this iteration may launch a batch; an idle scheduler sleeps here first."""
        if not scheduler.idle():
            return True
        with self._changed:
            nap_s = 0.0 if self._ledger.pending(scheduler.launched()) else IDLE_WAIT_S
            self._napping = nap_s > 0
        begun = self._clock()
        arrived = scheduler.input_waits(nap_s, self._wake_line.descriptor)
        self._idle_s += self._clock() - begun
        with self._changed:
            self._napping = False
            self._wake_line.clear()
        return arrived

    def _wait_for_lease(self, wait_s: float) -> None:
        """Holds the lock. Wakes on `offer` and `detach`."""
        begun = self._clock()
        self._changed.wait(None if math.isinf(wait_s) else wait_s)
        self._lease_wait_s += self._clock() - begun

    def _report_due(self) -> bool:
        """Holds the lock: whether somebody who waits for a reason to report has one."""
        return bool(self._reports_at) and self._due_at(min(self._reports_at))

    def _due_at(self, batches: int) -> bool:
        """Holds the lock: whether a report is due to who wants one at so many batches."""
        return self._launched >= batches or self._ledger.due_next()

    def _wake_reporters(self) -> None:
        """Holds the lock. Nobody is woken for nothing: who wakes takes the interpreter's lock from
        the loop."""
        if self._report_due():
            self._changed.notify_all()

    def _wake(self) -> None:
        """Holds the lock: wakes the loop, wherever it waits, and who waits in `await_due`."""
        self._changed.notify_all()
        if self._napping:
            self._wake_line.ring()

    def _check_step(self, message: LeaseBegins) -> None:
        if message.launched != self._launched:
            raise RanksDiverged(
                f"rank {self._rank} has launched {self._launched} batches, rank 0 "
                f"{message.launched}, where lease {message.lease.epoch}.{message.lease.seq} begins"
            )
