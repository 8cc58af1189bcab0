"""The state machine of a replica's health: by example, and whatever happens in whatever order."""

import pytest
from fake_clock import Clock
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from overstory.orchestrator.replica_health import (
    ALIVE,
    ALLOWED,
    READY,
    HealthLimits,
    ReplicaHealth,
    State,
)

LIMITS = HealthLimits(suspect_s=10, stall_s=60, silence_s=30, failures=3, restarts=3, proven_s=100)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def health(clock: Clock) -> ReplicaHealth:
    """One that has generated."""
    health = ReplicaHealth(LIMITS, clock, "r1")
    health.generated()
    return health


def stay(health: ReplicaHealth, clock: Clock, seconds: int, work: int, **more: bool) -> None:
    """It reports each second and stands still."""
    for _ in range(seconds):
        clock.now += 1
        health.reported(7, work, **more)


def test_it_is_ready_once_it_has_generated(clock: Clock) -> None:
    health = ReplicaHealth(LIMITS, clock, "r1")
    assert (health.state, health.alive, health.ready) == (State.WARMING, True, False)
    health.reported(0, 0)
    assert not health.ready
    health.generated()
    assert (health.state, health.ready, health.generating) == (State.HEALTHY, True, False)
    health.reported(1, 1)
    assert health.generating


def test_idle_for_an_hour_is_healthy(health: ReplicaHealth, clock: Clock) -> None:
    stay(health, clock, 3600, work=0)
    assert health.state is State.HEALTHY
    assert not health.generating
    health.reported(7, 1)  # Work that arrives after a long rest has had no time yet.
    assert health.state is State.HEALTHY


def test_a_standstill_with_work_is_suspect_then_dead(health: ReplicaHealth, clock: Clock) -> None:
    stay(health, clock, 11, work=2)
    assert health.state is State.HEALTHY
    stay(health, clock, 1, work=2)
    assert (health.state, health.ready, health.generating) == (State.SUSPECT, True, False)
    assert "no batch launched" in health.reason
    stay(health, clock, 50, work=2)
    assert health.state is State.DEAD
    assert "2 requests in hand, but no batch launched for 61 s" in health.reason


def test_a_long_prefill_is_no_hang(health: ReplicaHealth, clock: Clock) -> None:
    stay(health, clock, 60, work=1, prefilling=True)
    assert health.state is State.HEALTHY
    stay(health, clock, 2, work=1, prefilling=True)
    assert health.state is State.DEAD, "but it ends some day"


def test_progress_clears_suspicion(health: ReplicaHealth, clock: Clock) -> None:
    stay(health, clock, 12, work=2)
    assert health.state is State.SUSPECT
    health.reported(8, 2)
    assert (health.state, health.reason) == (State.HEALTHY, "")


def test_probes_and_requests_that_fail_are_counted_apart(
    health: ReplicaHealth, clock: Clock
) -> None:
    for _ in range(2):
        health.probe_failed("no answer")
        health.request_failed("lost")
    assert health.state is State.HEALTHY, "two and two are not three"
    health.probe_failed("no answer")
    assert health.state is State.SUSPECT
    assert "3 probes failed: no answer" in health.reason
    health.generated()  # Says nothing about probes.
    assert health.state is State.SUSPECT
    health.probe_answered()
    assert health.state is State.HEALTHY
    for _ in range(3):
        health.request_failed("lost")
    health.probe_answered()  # Says nothing about requests.
    assert health.state is State.SUSPECT
    health.generated()
    assert health.state is State.HEALTHY


def test_neither_failing_probes_nor_failing_requests_are_death(health: ReplicaHealth) -> None:
    for _ in range(1000):
        health.probe_failed("no answer")
        health.request_failed("lost")
    assert health.state is State.SUSPECT


def test_silence_is_suspect_and_never_death(health: ReplicaHealth, clock: Clock) -> None:
    health.reported(7, 2)
    clock.now += 31
    assert (health.state, health.ready) == (State.SUSPECT, True)
    assert "no sign of life for 31 s" in health.reason
    clock.now += 100 * LIMITS.stall_s  # Nobody saw it stand still.
    assert health.state is State.SUSPECT
    health.reported(7, 2)
    assert health.state is State.HEALTHY


def test_reports_that_come_late_tell_of_no_longer_standstill(
    health: ReplicaHealth, clock: Clock
) -> None:
    """A machine with too much to do: it serves, and each word about it takes half an hour."""
    for forwards in range(7, 10):
        for _ in range(4):  # Two words about the same batch may come far apart.
            clock.now += 1800
            health.reported(forwards, 2)
            assert health.ready
        assert health.state is State.SUSPECT
    health.reported(10, 2)
    assert health.state is State.HEALTHY
    for _ in range(6):  # But one that is seen standing still again and again is dead.
        clock.now += 1800
        health.reported(10, 2)
        assert health.alive
    clock.now += 1800
    health.reported(10, 2)
    assert health.state is State.DEAD


def test_any_sign_of_life_ends_silence_alone(health: ReplicaHealth, clock: Clock) -> None:
    for _ in range(10):
        clock.now += 29
        health.heard()
    assert health.state is State.HEALTHY
    clock.now += 31
    assert health.state is State.SUSPECT
    health.heard()
    assert health.state is State.HEALTHY
    stay(health, clock, 12, work=2)
    health.heard()
    assert health.state is State.SUSPECT, "it speaks, and stands still"


def test_one_that_starts_may_be_silent(clock: Clock) -> None:
    health = ReplicaHealth(LIMITS, clock, "r1")
    clock.now += 3600
    assert health.state is State.WARMING


def test_one_that_was_only_slow_comes_back(health: ReplicaHealth, clock: Clock) -> None:
    health.died("its process was not seen")
    health.decide()
    assert (health.state, health.failed_lives) == (State.RESTARTING, 1)
    health.returned()
    health.generated()
    assert (health.state, health.failed_lives) == (State.HEALTHY, 0)
    health.returned()
    assert health.state is State.HEALTHY, "nothing to take back"


def fail_life(health: ReplicaHealth, number: int) -> None:
    health.died(f"start {number} failed")
    health.decide()


def test_a_replica_that_fails_three_times_at_its_start_is_given_up(
    health: ReplicaHealth, clock: Clock
) -> None:
    stay(health, clock, 100, work=0)
    fail_life(health, 0)  # Of a proven life: not held against it.
    for number in (1, 2, 3):
        assert health.state is State.RESTARTING
        health.begun(f"r{number + 1}")
        fail_life(health, number)
    assert health.state is State.RETIRED
    assert health.budget_spent
    assert "3 lives in a row failed" in health.reason
    assert "start 3 failed" in health.reason
    with pytest.raises(ValueError, match="it is RETIRED"):
        health.begun("r9")
    assert health.state is State.RETIRED


def test_a_life_that_lasts_makes_the_budget_whole(health: ReplicaHealth, clock: Clock) -> None:
    for number in range(20):
        fail_life(health, number)
        health.begun("next")
        if number % 2:
            health.generated()
            stay(health, clock, 100, work=0)
    assert health.alive


def test_one_that_keeps_dying_young_is_given_up(health: ReplicaHealth, clock: Clock) -> None:
    for number in range(3):
        health.generated()
        stay(health, clock, 99, work=0)
        fail_life(health, number)
        if health.state is State.RESTARTING:
            health.begun("next")
    assert health.budget_spent


def test_draining_ends_retired_and_never_restarts(health: ReplicaHealth, clock: Clock) -> None:
    health.drain("rolling restart")
    assert (health.state, health.alive, health.ready) == (State.DRAINING, True, False)
    assert health.picture()["as_told"]
    health.generated()
    assert health.state is State.DRAINING
    health.ended("all streams handed over")
    assert health.state is State.RETIRED
    assert health.picture()["as_told"]
    assert not health.budget_spent


def test_a_death_while_draining_is_no_reason_to_restart(health: ReplicaHealth) -> None:
    health.drain("rolling restart")
    fail_life(health, 1)
    assert health.state is State.RETIRED
    assert not health.budget_spent
    assert not health.picture()["as_told"]  # What it did was lost, told to leave or not.


@pytest.mark.parametrize(
    "wrong", [{"stall_s": 0}, {"suspect_s": -1}, {"failures": 0}, {"restarts": 0}, {"proven_s": -1}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HealthLimits(**wrong)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens: only transitions of the table, each with a reason, and RETIRED is final."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.health = ReplicaHealth(LIMITS, self.clock, "r0")
        self.forwards = 0
        self.lives = 0
        self.told = False

    @rule(seconds=st.sampled_from([0.5, 5, 29, 31, 61, 101]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(steps=st.integers(0, 2), work=st.integers(0, 3), prefilling=st.booleans())
    def reports(self, steps: int, work: int, prefilling: bool) -> None:
        self.forwards += steps
        self.health.reported(self.forwards, work, prefilling)

    @rule()
    def generates(self) -> None:
        self.health.generated()

    @rule()
    def fails_a_probe(self) -> None:
        before = self.health.request_failures
        self.health.probe_failed("no answer")
        assert self.health.request_failures == before

    @rule()
    def fails_a_request(self) -> None:
        before = self.health.probe_failures
        self.health.request_failed("lost")
        assert self.health.probe_failures == before

    @rule()
    def drains(self) -> None:
        self.told = self.told or self.health.alive
        self.health.drain("told to")

    @rule()
    def ends(self) -> None:
        self.health.ended("told to")

    @rule()
    def dies(self) -> None:
        self.health.died("killed")

    @rule()
    def decides(self) -> None:
        self.health.decide()

    @rule()
    def speaks_again(self) -> None:
        self.health.returned()

    @rule()
    def begins_anew(self) -> None:
        if self.health.state in (State.DEAD, State.RESTARTING) and not self.told:
            self.health.decide()
            if self.health.state is State.RESTARTING:
                self.lives += 1
                self.health.begun(f"r{self.lives}")

    @invariant()
    def is_sound(self) -> None:
        health = self.health
        state = health.state
        assert health.alive == (state in ALIVE)
        assert health.ready == (state in READY)
        assert not health.generating or health.ready
        assert health.failed_lives <= LIMITS.restarts
        assert not health.budget_spent or state is State.RETIRED
        assert (health.reason == "") == (state is State.HEALTHY or not health.history)
        for change in health.history:
            assert change.after in ALLOWED[change.before]
            assert change.why
        for one, after in zip(list(health.history), list(health.history)[1:], strict=False):
            assert one.after is after.before
            assert one.after is not State.RETIRED
        if self.told:
            assert state in (State.DRAINING, State.DEAD, State.RETIRED)


TestAnyOrder = AnyOrder.TestCase
