"""Step leases: leave for a replica to run some steps under one tree policy. Pure, no Ray.

```
controller --attach--> rank 0      rank 0 issues the epoch: every attach gets a larger one
controller --offer---> rank 0      refused if its epoch is older or its number not the next
rank 0     --boundary-> all ranks  a lease begins when the one before is used up, or at once
(supersede)
```

Rank 0 keeps the ledger; the other ranks only hear, at the same boundary, which lease begins. Only
launched batches use steps: an idle replica keeps its lease. When the steps run out and no next
lease came within the time-out, the replica goes on *free-running* under its last policy, and says
so; the next lease ends that. Before the first attach, and after `detach`, it is *unmanaged* and
never waits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Mode = Literal["unmanaged", "leased", "waiting", "free-running"]


class LeaseRefused(ValueError):
    """A lease that rank 0 does not take; nothing has changed."""


class StaleEpoch(LeaseRefused):
    """The lease comes from a controller that another one has replaced: it must stop granting."""


@dataclass(frozen=True)
class Command:
    """One act that all ranks carry out at the same boundary.

    Attributes:
        name: a handler known to the ranks (`overstory.workers.commands`).
        arguments: plain values; they travel pickled in the request broadcast.
        drain: finish the results of every launched batch first. Needed by whatever touches KV or
        the
            state of requests; under overlap scheduling one batch is otherwise still in flight.
        ticket: names this one command; ranks report its result under it (if not empty).
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    drain: bool = False
    ticket: str = ""

    def __reduce__(self) -> tuple[Any, ...]:  # A mapping proxy does not pickle.
        return (Command, (self.name, dict(self.arguments), self.drain, self.ticket))


@dataclass(frozen=True)
class Lease:
    """Leave for `steps` steps under `policy`.

    Attributes:
        epoch: of the controller that grants it, as `LeaseLedger.attach` gave it.
        seq: 1, 2, 3, ... within the epoch.
        steps: batches that may be launched, at least 1.
        policy: tree policy by name: a fixed one, or ``auto`` or ``auto<=N``.
        commands: carried out at the boundary where the lease begins.
        supersede: begin at the next boundary, whatever the present lease has left.
    """

    epoch: int
    seq: int
    steps: int
    policy: str
    commands: tuple[Command, ...] = ()
    supersede: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a lease needs at least 1 step, got {self.steps}")
        if self.epoch < 1 or self.seq < 1:
            raise ValueError(
                f"epoch and seq of a lease count from 1, got epoch {self.epoch}, seq {self.seq}"
            )


@dataclass(frozen=True)
class Boundary:
    """What to do before an iteration: begin `begins`, then go on, or wait and ask again."""

    begins: tuple[Lease, ...] = ()
    wait_s: float = 0.0

    @property
    def go(self) -> bool:
        """Whether the iteration may start now."""
        return self.wait_s <= 0


@dataclass(frozen=True)
class LeaseView:
    """The ledger at one moment, for reports. `remaining` counts steps of the present lease."""

    mode: Mode
    epoch: int
    seq: int
    steps: int
    remaining: int
    queued: int
    policy: str | None
    free_steps: int
    lapses: int
    wants_next: bool


class LeaseLedger:
    """Rank 0's account of leases. Not thread-safe: its owner holds a lock.

    Args:
        timeout_s: how long a replica with work waits for a late lease; infinity waits for ever.
        clock: monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        if not timeout_s > 0:
            raise ValueError(f"lease_timeout_s must be above 0, got {timeout_s}")
        self._timeout_s = timeout_s
        self._clock = clock
        self._mode: Mode = "unmanaged"
        self._epoch = 0
        self._owner = ""
        self._last_seq = 0
        self._current: Lease | None = None
        self._queued: list[Lease] = []
        self._begun_at = 0  # launched batches when the present lease began
        self._waiting_since: float | None = None
        self._free_since: int | None = None
        self._free_steps = 0
        self._lapses = 0

    def attach(self, owner: str = "", held: int = 0) -> int:
        """A controller takes over; leases of any epoch before are refused from now on.

        Args:
            owner: names the controller beyond doubt.
            held: the epoch it had, if it attaches again because a call went unanswered; 0 if it
                comes anew. Who comes again must not take over from who came meanwhile.

        Returns:
            its epoch. The present lease and what is queued stay in force until it grants its own.

        Raises:
            StaleEpoch: `held` is given, but another controller has attached since.
        """
        if held and owner != self._owner:
            self._check_epoch(held)
        self._owner = owner
        self._epoch += 1
        self._last_seq = 0
        return self._epoch

    def detach(self, epoch: int) -> None:
        """The controller of `epoch` lets go: no more waiting for leases until the next attach.

        Raises:
            StaleEpoch: another controller has attached since.
        """
        self._check_epoch(epoch)
        self._mode = "unmanaged"
        self._current, self._queued, self._waiting_since = None, [], None

    def offer(self, lease: Lease) -> None:
        """Queues `lease`; a superseding one replaces those queued before, but keeps their commands.

        Raises:
            StaleEpoch: another controller has attached since.
            LeaseRefused: not the next number, or from an epoch never given.
        """
        self._check_epoch(lease.epoch)
        if lease.seq != self._last_seq + 1:
            raise LeaseRefused(
                f"lease {lease.epoch}.{lease.seq} is not the next one: {self._last_seq + 1} is"
            )
        self._last_seq = lease.seq
        if lease.supersede:
            earlier = tuple(
                itertools.chain.from_iterable(queued.commands for queued in self._queued)
            )
            lease = Lease(
                lease.epoch, lease.seq, lease.steps, lease.policy, earlier + lease.commands, True
            )
            self._queued.clear()
        self._queued.append(lease)

    def boundary(self, launched: int, has_work: bool) -> Boundary:
        """Judges the boundary before the next iteration.

        Args:
            launched: batches launched so far by this replica.
            has_work: whether the iteration may launch a batch.
        """
        begins = []
        while self.pending(launched):
            begins.append(self._begin(self._queued.pop(0), launched))
        if self._mode == "unmanaged" or self._remaining(launched) > 0 or not has_work:
            return Boundary(tuple(begins))
        if self._mode == "free-running":
            return Boundary(tuple(begins))
        return Boundary(tuple(begins), self._wait_or_lapse(launched))

    def pending(self, launched: int) -> bool:
        """Whether a queued lease begins at the next boundary."""
        return bool(self._queued) and (self._queued[0].supersede or self._remaining(launched) == 0)

    def due_next(self) -> bool:
        """Whether the controller should grant now: nothing is queued. So one lease is always ahead,
        asked for where the one before it begins: the loop stops there anyway."""
        return self._epoch > 0 and not self._queued

    def quiet_until(self) -> float:
        """Number of launched batches at which this ledger next has something to say unasked: the
        present lease is used up. Infinity: never.

        Call it after `boundary`.
        """
        if self._current is None or self._mode in ("unmanaged", "free-running"):
            return math.inf
        return self._begun_at + self._current.steps

    def view(self, launched: int) -> LeaseView:
        """The ledger now, for reports."""
        current = self._current
        running_free = 0 if self._free_since is None else launched - self._free_since
        return LeaseView(
            mode=self._mode,
            epoch=self._epoch,
            seq=current.seq if current else 0,
            steps=current.steps if current else 0,
            remaining=self._remaining(launched),
            queued=len(self._queued),
            policy=current.policy if current else None,
            free_steps=self._free_steps + running_free,
            lapses=self._lapses,
            wants_next=self.due_next(),
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(
                f"controller epoch {epoch} is over: epoch {self._epoch} has attached since"
            )
        if epoch > self._epoch:
            raise LeaseRefused(
                f"controller epoch {epoch} was never given; {self._epoch} is current"
            )

    def _begin(self, lease: Lease, launched: int) -> Lease:
        if self._free_since is not None:
            self._free_steps += launched - self._free_since
            self._free_since = None
        self._current, self._begun_at = lease, launched
        self._mode, self._waiting_since = "leased", None
        return lease

    def _remaining(self, launched: int) -> int:
        if self._current is None:
            return 0
        return max(0, self._current.steps - (launched - self._begun_at))

    def _wait_or_lapse(self, launched: int) -> float:
        """Seconds still to wait, or 0 after turning free-running."""
        now = self._clock()
        if self._waiting_since is None:
            self._waiting_since, self._mode = now, "waiting"
        left = self._waiting_since + self._timeout_s - now
        if left > 0:
            return left if math.isfinite(left) else math.inf
        self._mode, self._waiting_since = "free-running", None
        self._free_since = launched
        self._lapses += 1
        return 0.0
