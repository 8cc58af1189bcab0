"""Health of one replica over its lives: a pure state machine; the caller brings the clock.

```
            generated         no progress, silence, failures in a row
 WARMING ------------> HEALTHY -----------------------------------> SUSPECT
    ^  |                  ^  |                                        |  |
    |  |                  |  +--------------- drain ---------------+  |  |
    |  |                  +---- progress, and no failures in a row-+--+  |
    |  |                                                           |     |
    |  |  died (also from HEALTHY, SUSPECT and DRAINING)           v     |
    |  +---------------------------> DEAD <-------- stall ---------+-----+
    |                                 |  |                     DRAINING
    |                budget left      |  |  budget spent           |
    +---------- RESTARTING <----------+  +---------> RETIRED <-----+ ended
```

Judged by progress: a count of launched batches that stands still with work in hand. Neither a
probe nor a request that fails can end a replica, nor silence: they raise suspicion, each counted
apart, and progress clears it. A prefill may take as long as a stall before anyone is suspicious.

On a machine with too much to do, words about a replica come late, or not for a minute, while it
serves. So a standstill is what was seen standing still: it grows with each report that tells of no
progress, by `suspect_s` at most however late that report is. Whoever hears nothing knows nothing;
that a process is gone is for those to say who can see it (`died`).

RETIRED is the end: after a drain, or with the restart budget spent. A life counts against the
budget unless it was healthy for long enough, which makes the budget whole again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """Where a replica stands."""

    WARMING = "WARMING"
    """Its process runs; it has not generated yet."""
    HEALTHY = "HEALTHY"
    """It has generated, and moves on when it has work."""
    SUSPECT = "SUSPECT"
    """It may be about to fail; it still takes requests."""
    DRAINING = "DRAINING"
    """It finishes what it has and takes nothing new."""
    DEAD = "DEAD"
    """It ended without being told to."""
    RESTARTING = "RESTARTING"
    """Its successor has not begun yet."""
    RETIRED = "RETIRED"
    """It is gone and stays gone."""


ALIVE = frozenset({State.WARMING, State.HEALTHY, State.SUSPECT, State.DRAINING})
READY = frozenset({State.HEALTHY, State.SUSPECT})

ALLOWED: dict[State, frozenset[State]] = {
    State.WARMING: frozenset({State.HEALTHY, State.DRAINING, State.DEAD, State.RETIRED}),
    State.HEALTHY: frozenset({State.SUSPECT, State.DRAINING, State.DEAD, State.RETIRED}),
    State.SUSPECT: frozenset({State.HEALTHY, State.DRAINING, State.DEAD, State.RETIRED}),
    State.DRAINING: frozenset({State.DEAD, State.RETIRED}),
    State.DEAD: frozenset({State.RESTARTING, State.RETIRED}),
    State.RESTARTING: frozenset({State.WARMING, State.RETIRED}),
    State.RETIRED: frozenset(),
}
"""Every transition there is."""

HISTORY_KEPT = 20


@dataclass(frozen=True)
class HealthLimits:
    """When what is concluded.

    Attributes:
        suspect_s: standstill with work in hand, outside a prefill, that raises suspicion.
        stall_s: standstill with work in hand that is death.
        silence_s: time without any report that raises suspicion; one that starts has nothing to
            report.
        failures: failed probes in a row, or failed requests in a row, that raise suspicion.
        restarts: lives in a row that may fail before the replica is given up.
        proven_s: a life that was ready for so long makes the budget whole again.
    """

    suspect_s: float = 10.0
    stall_s: float = 300.0
    silence_s: float = 60.0
    failures: int = 3
    restarts: int = 3
    proven_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("suspect_s", "stall_s", "silence_s", "failures", "restarts"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.proven_s < 0:
            raise ValueError(f"proven_s must be at least 0, got {self.proven_s}")


@dataclass(frozen=True)
class Change:
    """One transition, for the status."""

    at_s: float
    before: State
    after: State
    why: str


class ReplicaHealth:
    """The state of one replica and of those that replace it.

    Args:
        limits: see there.
        clock: monotonic seconds.
        name: of the process that has just begun.
        on_change: told each state that it comes to.
    """

    def __init__(
        self,
        limits: HealthLimits,
        clock: Callable[[], float],
        name: str = "",
        on_change: Callable[[State], None] = lambda _: None,
    ) -> None:
        self.limits = limits
        self.name = name
        self.reason = ""
        self.history: deque[Change] = deque(maxlen=HISTORY_KEPT)
        self.probe_failures = 0
        self.request_failures = 0
        self.failed_lives = 0
        self.budget_spent = False
        self._clock = clock
        self._on_change = on_change
        self._state = State.WARMING
        self._draining = False
        self._forwards, self._work, self._prefilling = -1, 0, False
        self._heard_s = self._reported_s = clock()
        self._standing_s = 0.0  # as far as it was seen
        self._ready_s: float | None = None

    # ------------------------------------------------------------------ what is so

    @property
    def state(self) -> State:
        """The state now: time alone may have changed it."""
        self._pass_time()
        return self._state

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.state in ALIVE

    @property
    def ready(self) -> bool:
        """Whether requests may be sent to it."""
        return self.state in READY

    @property
    def generating(self) -> bool:
        """Whether it has work in hand and moves on with it."""
        unseen_s = self._clock() - self._reported_s
        still_s = self._standing_s + unseen_s
        return self.ready and self._work > 0 and still_s < self.limits.suspect_s

    # ------------------------------------------------------------------ what happens

    def begun(self, name: str) -> None:
        """A process has begun in place of the dead one, whose cause stays told until this one is
        healthy: it may begin before anybody has looked. Refused (ValueError) when given up."""
        state = self.state
        if state is State.DEAD:
            self.decide()
            state = self._state
        if state is not State.RESTARTING:
            raise ValueError(f"{name} cannot take the place of {self.name}: it is {state}")
        self.name = name
        self._new_life()
        self._go(State.WARMING, f"{name} has begun; the one before: {self.reason}")

    def succeeded_by(self, other: ReplicaHealth) -> None:
        """The process that `other` has followed from its beginning took this one's place: it goes
        on here, with the lives that have failed here."""
        ready_s = other._ready_s
        self.begun(other.name)
        if ready_s is not None:
            self.generated()
            self._ready_s = ready_s

    def returned(self) -> None:
        """The process that was taken for dead speaks: it was only slow. Its death is taken back."""
        if self.state is State.DEAD:
            self.decide()
        if self._state is State.RESTARTING:
            self.failed_lives = max(0, self.failed_lives - 1)
            self._new_life()
            self._go(State.WARMING, f"{self.name} was only slow to answer")

    def reported(self, forwards: int, work: int, prefilling: bool = False) -> None:
        """It said how far it is.

        Args:
            forwards: batches launched so far.
            work: requests in hand, running or waiting.
            prefilling: whether the batch under way is a prefill.
        """
        self._pass_time()
        if self._state not in ALIVE:
            return
        now = self._clock()
        moved = forwards != self._forwards
        if moved or work == 0 or self._work == 0:
            self._standing_s = 0.0
        else:
            self._standing_s += min(now - self._reported_s, self.limits.suspect_s)
        self._reported_s = now
        self._forwards, self._work, self._prefilling = forwards, work, prefilling
        self.probe_answered()

    def generated(self) -> None:
        """It has committed a token of some request."""
        self._pass_time()
        self.heard()
        self.request_failures = 0
        if self._state is State.WARMING:
            self._ready_s = self._clock()
            self._go(State.HEALTHY, "it has generated")
        self._clear_up()

    def probe_failed(self, why: str) -> None:
        """It did not answer a look at it."""
        self.probe_failures += 1
        self._suspect_after(self.probe_failures, f"{self.probe_failures} probes failed: {why}")

    def heard(self) -> None:
        """A sign of life, whatever it says."""
        self._heard_s = self._clock()
        self._clear_up()

    def probe_answered(self) -> None:
        """It answered a look at it."""
        self.probe_failures = 0
        self.heard()

    def request_failed(self, why: str) -> None:
        """A request failed by its doing, not by the client's."""
        self.request_failures += 1
        self._suspect_after(
            self.request_failures, f"{self.request_failures} requests failed: {why}"
        )

    def drain(self, why: str) -> None:
        """It is to take nothing new. Nothing changes if it is draining or gone."""
        if self.state in ALIVE - {State.DRAINING}:
            self._draining = True
            self._go(State.DRAINING, why)

    def ended(self, why: str) -> None:
        """It ended as it was told to."""
        if self.state in ALIVE:
            self._go(State.RETIRED, why)

    def died(self, cause: str) -> None:
        """It ended, and nobody had told it to."""
        self._pass_time()
        if self._state in ALIVE:
            self._die(cause)

    def decide(self) -> None:
        """What follows a death: RESTARTING, or RETIRED with a spent budget or after a drain."""
        if self.state is not State.DEAD:
            return
        if self._draining:
            self._go(State.RETIRED, f"died while draining: {self.reason}")
        elif self.failed_lives >= self.limits.restarts:
            self.budget_spent = True
            self._go(
                State.RETIRED,
                f"given up: {self.failed_lives} lives in a row failed (restart budget "
                f"{self.limits.restarts}), the last one so: {self.reason}",
            )
        else:
            self._go(State.RESTARTING, self.reason)

    # ------------------------------------------------------------------ picture

    def picture(self) -> dict[str, Any]:
        """JSON-able: `name`, `state`, `alive`, `ready`, `generating`, `reason`, `probe_failures`,
        `request_failures`, `failed_lives`, `restarts`, `work`, `still_s`, `as_told` (it leaves or
        has left as it was told to)."""
        return {
            "name": self.name,
            "state": str(self.state),
            "alive": self.alive,
            "ready": self.ready,
            "generating": self.generating,
            "reason": self.reason,
            "probe_failures": self.probe_failures,
            "request_failures": self.request_failures,
            "failed_lives": self.failed_lives,
            "restarts": self.limits.restarts,
            "work": self._work,
            "still_s": round(self._standing_s, 1),
            "as_told": self._as_told(),
        }

    # ------------------------------------------------------------------ inside

    def _as_told(self) -> bool:
        if self._state is State.RETIRED:
            return self.history[-1].before is not State.DEAD
        return self._state is State.DRAINING

    def _new_life(self) -> None:
        now = self._clock()
        self._heard_s = self._reported_s = now
        self._standing_s = 0.0
        self._ready_s = None
        self._forwards, self._work, self._prefilling = -1, 0, False
        self.probe_failures = self.request_failures = 0

    def _silent_s(self) -> float:
        return self._clock() - self._heard_s

    def _pass_time(self) -> None:
        if self._state not in ALIVE - {State.WARMING}:
            return
        still_s = self._standing_s
        if self._work and still_s > self.limits.stall_s:
            self._die(
                f"{self._work} requests in hand, but no batch launched for {still_s:.0f} s"
                + (" of a prefill" if self._prefilling else "")
            )
        elif self._state is State.HEALTHY and self._stands_still():
            self._go(State.SUSPECT, f"no batch launched for {still_s:.0f} s with work in hand")
        elif self._state is State.HEALTHY and self._silent_s() > self.limits.silence_s:
            self._go(State.SUSPECT, f"no sign of life for {self._silent_s():.0f} s")

    def _stands_still(self) -> bool:
        limit = self.limits.stall_s if self._prefilling else self.limits.suspect_s
        return bool(self._work) and self._standing_s > limit

    def _suspect_after(self, failures: int, why: str) -> None:
        if self.state is State.HEALTHY and failures >= self.limits.failures:
            self._go(State.SUSPECT, why)

    def _clear_up(self) -> None:
        most = max(self.probe_failures, self.request_failures)
        calm = (
            most < self.limits.failures
            and not self._stands_still()
            and self._silent_s() <= self.limits.silence_s
        )
        if self._state is State.SUSPECT and calm:
            self._go(State.HEALTHY, "it moves on")

    def _die(self, cause: str) -> None:
        proven = self._ready_s is not None and self._clock() - self._ready_s >= self.limits.proven_s
        self.failed_lives = 0 if proven else self.failed_lives + 1
        self._work = 0
        self._go(State.DEAD, cause)

    def _go(self, after: State, why: str) -> None:
        before, self._state = self._state, after
        assert after in ALLOWED[before], f"{self.name}: {before} -> {after}"
        self.reason = "" if after is State.HEALTHY else why
        self.history.append(Change(self._clock(), before, after, why))
        self._on_change(after)
