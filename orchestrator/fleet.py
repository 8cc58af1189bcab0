"""All replicas of a deployment by their health: which process takes whose place, and when to stop.

Pure; the caller brings the clock. A slot is one of the deployment's copies of the model over its
lives (`ReplicaHealth`). Serve does not say which dead replica a new one replaces: it is the one
that has waited longest. A new process for which no slot waits is a new slot (deploy, scale, surge).

Serve sees a process vanish at once, a fleet some looks later: the successor may have begun by then,
in a slot of its own. Where more wait and live than Serve wants, the youngest was that successor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.replica_health import ALIVE, HealthLimits, ReplicaHealth, State

RETIRED_KEPT = 10
"""Retired slots that stay in the status, to say why they went."""
FAULTS = ("SUSPECT", "DEAD", "given_up")
"""What is counted: states that a replica comes to unasked, and restart budgets that are spent. One
that is DEAD is so for no look of anybody's (what follows is decided at once), so states that are
seen do not count it."""
ABSENT_LOOKS = 2
"""Looks in a row that miss a replica's process before it counts as dead: its own words, which know
the cause, may be on their way."""


class GivenUp(RuntimeError):
    """The restart budget is spent: no process may take the replica's place until a user acts."""


@dataclass
class _Slot:
    health: ReplicaHealth
    actor: str = ""
    absent: int = 0
    waits_since_s: float = 0.0
    begun_s: float = 0.0


class Fleet:
    """Slots of one deployment.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: list[_Slot] = []
        self._faults: Counter[str] = Counter(dict.fromkeys(FAULTS, 0))

    # ------------------------------------------------------------------ what replicas say

    def begun(self, name: str, actor: str, limits: HealthLimits) -> None:
        """A replica's process has begun; `actor` is Ray's name of it, if it has one.

        Raises:
            GivenUp: Serve starts it in place of one that was given up.
        """
        if self._find(name) is not None:
            return
        if waiting := self._waiting():
            slot = min(waiting, key=lambda one: one.waits_since_s)
            slot.health.begun(name)
            slot.actor, slot.absent, slot.begun_s = actor, 0, self._clock()
            return
        for slot in self._slots:
            if slot.health.budget_spent:
                raise GivenUp(slot.health.reason)
        self._add(name, actor, limits)

    def said(self, name: str, actor: str, limits: HealthLimits, word: dict[str, Any]) -> None:
        """A replica's regular word about itself.

        Args:
            name: of its process.
            actor: as in `begun`.
            limits: as in `begun`; for one that this fleet does not know yet.
            word: `forwards`, `work`, `prefilling`, `generated`, `probe_failures`,
                `request_failures`.
        """
        slot = self._find(name)
        if slot is None:
            try:
                self.begun(name, actor, limits)
            except GivenUp:  # It has begun before this fleet gave up: it may stay.
                self._add(name, actor, limits)
            slot = self._find(name)
            assert slot is not None
        health = slot.health
        health.returned()
        if word["generated"]:
            health.generated()
        if word["request_failures"]:
            health.request_failures = word["request_failures"] - 1
            health.request_failed("see the replica's log")
        if word["probe_failures"]:
            health.heard()
            health.probe_failures = word["probe_failures"] - 1
            health.probe_failed("its rank 0 does not answer")
        else:
            health.reported(word["forwards"], word["work"], word["prefilling"])

    def heard(self, name: str) -> None:
        """A sign of life of it that came another way than its words (a report of its rank). Its
        words come through Serve's controller, which a busy machine starves first. Unknown names
        are ignored, here and below."""
        if slot := self._find(name):
            slot.health.heard()

    def draining(self, name: str, why: str) -> None:
        """It takes nothing new."""
        if slot := self._find(name):
            slot.health.drain(why)

    def ended(self, name: str) -> None:
        """It ended as it was told to."""
        if slot := self._find(name):
            slot.health.ended("it was told to end")
            self._forget_old()

    def died(self, name: str, cause: str) -> bool:
        """It ended by itself. True if it is given up now: there should be one replica fewer."""
        slot = self._find(name)
        if slot is None or slot.health.state not in ALIVE:
            return False
        slot.health.died(cause)
        return self._decide(slot)

    # ------------------------------------------------------------------ what is seen

    def look(
        self, actors: Collection[str], leaving: Collection[str] = (), wanted: int | None = None
    ) -> int:
        """Compares with what Ray and Serve know; what time and absence have ended is decided.

        Args:
            actors: names of the actors that Ray knows.
            leaving: names of the replicas that Serve is taking out.
            wanted: how many replicas Serve wants; None if it does not say.

        Returns:
            number of replicas that are given up now.
        """
        given_up = 0
        for slot in list(self._slots):
            if slot.health.name in leaving and slot.actor in actors:
                slot.health.drain("Serve is taking it out")
            if slot.health.state in ALIVE and slot.actor:
                slot.absent = 0 if slot.actor in actors else slot.absent + 1
                if slot.absent >= ABSENT_LOOKS:
                    slot.health.died("its process is gone without a word (killed, or its node is)")
            given_up += self._decide(slot)
        if wanted is not None:
            self._find_successors(wanted)
        return given_up

    def asked_for(self, replicas: int) -> None:
        """A user asks for so many replicas: what was given up is forgotten, and with it what waits
        for a successor beyond that number."""
        self._slots = [slot for slot in self._slots if not slot.health.budget_spent]
        for slot in self._waiting()[max(0, replicas - len(self._lasting())) :]:
            self._slots.remove(slot)

    # ------------------------------------------------------------------ picture

    def state_of(self, name: str) -> State | None:
        """Where the replica stands whose process has this name; None if none has."""
        slot = self._find(name)
        return slot.health.state if slot is not None else None

    def given_up(self) -> str:
        """Why replicas were given up; empty if none was."""
        reasons = [slot.health.reason for slot in self._slots if slot.health.budget_spent]
        return "; ".join(dict.fromkeys(reasons))

    def hopeless(self) -> str:
        """Why nothing will come back by itself: `given_up` where no replica is left; else empty."""
        left = [slot for slot in self._slots if slot.health.state is not State.RETIRED]
        return "" if left else self.given_up()

    def status(self) -> list[dict[str, Any]]:
        """`ReplicaHealth.picture` of each slot."""
        return [slot.health.picture() for slot in self._slots]

    def faults(self) -> dict[str, int]:
        """How often each of `FAULTS` has come about since this fleet began."""
        return dict(self._faults)

    # ------------------------------------------------------------------ inside

    def _changed(self, state: State) -> None:
        if state in FAULTS:
            self._faults[state] += 1

    def _add(self, name: str, actor: str, limits: HealthLimits) -> None:
        health = ReplicaHealth(limits, self._clock, name, self._changed)
        self._slots.append(_Slot(health, actor, begun_s=self._clock()))

    def _lasting(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.health.state in ALIVE - {State.DRAINING}]

    def _waiting(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.health.state is State.RESTARTING]

    def _find_successors(self, wanted: int) -> None:
        """Slots that wait for what has begun already, or for what nobody wants, wait no more."""
        waiting = sorted(self._waiting(), key=lambda slot: slot.waits_since_s)
        for slot in waiting[: max(0, len(self._lasting()) + len(waiting) - wanted)]:
            later = [one for one in self._lasting() if one.begun_s > slot.begun_s]
            if later:
                youngest = max(later, key=lambda one: one.begun_s)
                self._slots.remove(youngest)
                slot.health.succeeded_by(youngest.health)
                slot.actor, slot.absent = youngest.actor, youngest.absent
                slot.begun_s = youngest.begun_s
            else:
                self._slots.remove(slot)

    def _find(self, name: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.health.name == name), None)

    def _decide(self, slot: _Slot) -> bool:
        if slot.health.state is not State.DEAD:
            return False
        slot.health.decide()
        slot.waits_since_s = self._clock()
        self._faults["given_up"] += slot.health.budget_spent
        self._forget_old()
        return slot.health.budget_spent

    def _forget_old(self) -> None:
        retired = [slot for slot in self._slots if slot.health.state is State.RETIRED]
        for slot in [one for one in retired if not one.health.budget_spent][:-RETIRED_KEPT]:
            self._slots.remove(slot)
