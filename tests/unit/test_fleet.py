"""Which process takes whose place, and when a deployment stops trying."""

import asyncio
import contextlib

import pytest
from fake_clock import Clock
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from overstory.orchestrator.fleet import ABSENT_LOOKS, RETIRED_KEPT, Fleet, GivenUp
from overstory.orchestrator.fleet_watch import FleetWatch
from overstory.orchestrator.replica_health import HealthLimits, State

LIMITS = HealthLimits(restarts=3, proven_s=100, silence_s=1e6)
WORD = {
    "forwards": 1,
    "work": 0,
    "prefilling": False,
    "generated": True,
    "probe_failures": 0,
    "request_failures": 0,
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    """Three replicas, all healthy."""
    fleet = Fleet(clock)
    for name in ("a", "b", "c"):
        fleet.begun(name, f"actor-{name}", LIMITS)
        fleet.said(name, f"actor-{name}", LIMITS, WORD)
    return fleet


def states(fleet: Fleet) -> list[str]:
    return [row["state"] for row in fleet.status()]


def test_a_new_process_takes_the_place_that_has_waited_longest(fleet: Fleet, clock: Clock) -> None:
    fleet.died("b", "killed")
    clock.now += 1
    fleet.died("a", "killed")
    fleet.begun("d", "actor-d", LIMITS)
    assert [row["name"] for row in fleet.status()] == ["a", "d", "c"]
    assert states(fleet) == ["RESTARTING", "WARMING", "HEALTHY"]
    fleet.begun("e", "actor-e", LIMITS)
    fleet.begun("f", "actor-f", LIMITS)  # Nothing waits: a copy more.
    assert [row["name"] for row in fleet.status()] == ["e", "d", "c", "f"]


def test_the_third_failed_start_is_the_last_and_the_others_stay(fleet: Fleet, clock: Clock) -> None:
    clock.now += 200
    assert not fleet.died("b", "killed")
    for number in range(3):
        fleet.begun(f"b{number}", "", LIMITS)
        given_up = fleet.died(f"b{number}", "rank 0 died: no such file")
        assert given_up == (number == 2)
    assert states(fleet) == ["HEALTHY", "RETIRED", "HEALTHY"]
    assert "rank 0 died: no such file" in fleet.given_up()
    with pytest.raises(GivenUp, match="no such file"):
        fleet.begun("b9", "", LIMITS)
    assert fleet.hopeless() == "", "the others serve"
    # One that dies later is another matter.
    assert not fleet.died("a", "killed")
    fleet.begun("a1", "", LIMITS)
    assert states(fleet) == ["WARMING", "RETIRED", "HEALTHY"]
    # A user who asks for three gets a new try.
    fleet.asked_for(3)
    assert fleet.given_up() == ""
    fleet.begun("b10", "", LIMITS)
    assert states(fleet) == ["WARMING", "HEALTHY", "WARMING"]


def test_where_nothing_is_left_the_reason_is_told(clock: Clock) -> None:
    fleet = Fleet(clock)
    for number in range(3):
        assert fleet.hopeless() == ""
        fleet.begun(f"a{number}", "", LIMITS)
        fleet.died(f"a{number}", "rank 0 died: no such file")
    assert "rank 0 died: no such file" in fleet.hopeless()
    fleet.asked_for(1)
    assert fleet.hopeless() == ""


def test_a_process_that_vanishes_without_a_word_is_missed(fleet: Fleet) -> None:
    actors = {"actor-a", "actor-c"}
    for _ in range(ABSENT_LOOKS):
        assert states(fleet)[1] == "HEALTHY"
        assert fleet.look(actors) == 0
    assert states(fleet) == ["HEALTHY", "RESTARTING", "HEALTHY"]
    assert "gone without a word" in fleet.status()[1]["reason"]


def test_a_successor_that_begins_before_the_loss_is_noticed_takes_the_place(
    fleet: Fleet, clock: Clock
) -> None:
    """Serve was faster: for two looks there are four, then one of the four is the other's next."""
    for life in range(2):
        clock.now += 1
        gone = fleet.status()[1]["name"]
        actors = {f"actor-{row['name']}" for row in fleet.status()} - {f"actor-{gone}"}
        fleet.begun(f"new{life}", f"actor-new{life}", LIMITS)
        if life:
            fleet.said(f"new{life}", f"actor-new{life}", LIMITS, WORD)
        for _ in range(ABSENT_LOOKS):
            assert len(states(fleet)) == 4
            assert fleet.look({*actors, f"actor-new{life}"}, (), 3) == 0
        rows = fleet.status()
        assert sorted(row["name"] for row in rows) == sorted(["a", "c", f"new{life}"])
        assert rows[1]["failed_lives"] == life + 1, "its lives count on"
        assert rows[1]["state"] == ("HEALTHY" if life else "WARMING")
        told = "gone without a word" in rows[1]["reason"]
        assert told == (not life), "until it is healthy"
    fleet.begun("new1", "actor-new1", LIMITS)  # Known by now.
    assert len(states(fleet)) == 3


def test_who_waits_for_what_serve_does_not_want_goes(fleet: Fleet) -> None:
    fleet.died("b", "killed")
    everyone = {"actor-a", "actor-c"}
    fleet.look(everyone, (), 3)
    assert states(fleet) == ["HEALTHY", "RESTARTING", "HEALTHY"]
    fleet.look(everyone, (), 2)
    assert states(fleet) == ["HEALTHY", "HEALTHY"]


def test_absence_once_is_not_enough(fleet: Fleet) -> None:
    everyone = {"actor-a", "actor-b", "actor-c"}
    for _ in range(5):
        fleet.look(set())
        fleet.look(everyone)
    assert states(fleet) == ["HEALTHY"] * 3


def test_one_that_was_told_to_end_is_not_replaced(fleet: Fleet) -> None:
    fleet.draining("a", "rolling restart")
    assert fleet.state_of("a") is State.DRAINING
    fleet.ended("a")
    fleet.ended("b")  # Serve's own way: no drain was announced.
    assert states(fleet) == ["RETIRED", "RETIRED", "HEALTHY"]
    fleet.begun("d", "", LIMITS)
    assert states(fleet) == ["RETIRED", "RETIRED", "HEALTHY", "WARMING"]


def test_one_that_serve_takes_out_is_draining_while_its_process_is_there(fleet: Fleet) -> None:
    everyone = {"actor-a", "actor-b", "actor-c"}
    fleet.look(everyone, ["a", "x"])
    assert states(fleet) == ["DRAINING", "HEALTHY", "HEALTHY"]
    fleet.look(everyone - {"actor-b"}, ["b"])  # Gone already: that is a death, not a drain.
    assert states(fleet) == ["DRAINING", "HEALTHY", "HEALTHY"]
    fleet.ended("a")
    assert states(fleet)[0] == "RETIRED"


def test_serve_is_told_of_what_is_given_up_until_it_has_heard_or_a_user_asks_anew() -> None:
    """Serve may be away when the verdict falls, and a user may mend the cause before it is back."""
    told: list[str] = []
    away = [True]

    async def drop() -> None:
        if away[0]:
            raise ConnectionError("Serve's controller is gone")
        told.append("one fewer")

    async def nothing() -> set[str]:
        return set()

    async def view() -> tuple[list[str], int | None]:
        return [], None

    def given_up() -> FleetWatch:
        watch = FleetWatch(Fleet(Clock()), nothing, view, drop)
        for number in range(LIMITS.restarts):
            watch.event("begun", f"a{number}", "", LIMITS, None)
            watch.event("died", f"a{number}", "", LIMITS, "no such file")
        return watch

    async def look(watch: FleetWatch) -> None:
        with contextlib.suppress(ConnectionError):
            await watch.look()

    async def story() -> None:
        first, second = given_up(), given_up()
        await look(first)
        await look(second)
        assert told == []
        second.asked_for(1)
        away[0] = False
        for watch in (first, first, second):
            await look(watch)
        assert told == ["one fewer"]

    asyncio.run(story())


def test_words_about_the_unknown_are_taken_in_or_ignored(fleet: Fleet) -> None:
    for act in (fleet.ended, fleet.draining, fleet.died):
        act(*(("x",) if act == fleet.ended else ("x", "y")))
    assert fleet.state_of("x") is None
    fleet.said("x", "actor-x", LIMITS, WORD)  # A controller that was restarted hears it first so.
    assert fleet.state_of("x") is State.HEALTHY


def test_one_taken_for_dead_that_speaks_is_back_in_its_place(fleet: Fleet) -> None:
    fleet.look(set())
    fleet.look(set())
    assert states(fleet) == ["RESTARTING"] * 3
    fleet.said("b", "actor-b", LIMITS, WORD)
    assert states(fleet) == ["RESTARTING", "HEALTHY", "RESTARTING"]


def test_a_replica_that_is_not_heard_of_stays_while_its_process_is_there(
    fleet: Fleet, clock: Clock
) -> None:
    actors = {"actor-a", "actor-b", "actor-c"}
    for _ in range(100):
        clock.now += 0.5 * LIMITS.silence_s
        fleet.heard("b")  # Its rank reports, though its own words do not come through.
        assert fleet.look(actors) == 0
    assert states(fleet) == ["SUSPECT", "HEALTHY", "SUSPECT"]
    assert [row["failed_lives"] for row in fleet.status()] == [0, 0, 0]
    fleet.heard("x")
    fleet.said("a", "actor-a", LIMITS, WORD)
    assert states(fleet) == ["HEALTHY", "HEALTHY", "SUSPECT"]


def test_probes_that_fail_in_the_replica_make_it_suspect(fleet: Fleet, clock: Clock) -> None:
    for failures in (1, 2, 3):
        fleet.said("a", "actor-a", LIMITS, {**WORD, "probe_failures": failures})
    assert fleet.state_of("a") is State.SUSPECT
    for _ in range(100):  # It speaks: it is not silent, though its rank is.
        clock.now += 0.9 * LIMITS.silence_s
        fleet.said("a", "actor-a", LIMITS, {**WORD, "probe_failures": 9})
    assert fleet.state_of("a") is State.SUSPECT
    fleet.said("a", "actor-a", LIMITS, WORD)
    assert fleet.state_of("a") is State.HEALTHY


def test_requests_that_fail_in_the_replica_make_it_suspect(fleet: Fleet) -> None:
    for failures in (1, 2, 3):
        assert fleet.state_of("a") is State.HEALTHY
        fleet.said("a", "actor-a", LIMITS, {**WORD, "request_failures": failures})
    assert fleet.state_of("a") is State.SUSPECT
    assert "3 requests failed" in fleet.status()[0]["reason"]
    fleet.said("a", "actor-a", LIMITS, WORD)
    assert fleet.state_of("a") is State.HEALTHY


def test_fewer_replicas_end_the_waiting_for_more(fleet: Fleet) -> None:
    fleet.died("a", "killed")
    fleet.died("b", "killed")
    fleet.asked_for(2)
    assert states(fleet) == ["RESTARTING", "HEALTHY"]
    fleet.asked_for(1)
    assert states(fleet) == ["HEALTHY"]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens to three replicas: numbers stay bounded, and what is given up stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fleet = Fleet(self.clock)
        self.begun = 0
        self.refused = False

    def _names(self) -> list[str]:
        return [row["name"] for row in self.fleet.status()]

    @rule()
    def begins(self) -> None:
        waiting = "RESTARTING" in states(self.fleet)
        given_up = bool(self.fleet.given_up())
        self.begun += 1
        try:
            self.fleet.begun(f"r{self.begun}", f"actor-{self.begun}", LIMITS)
        except GivenUp:
            assert given_up
            assert not waiting
        else:
            assert waiting or not given_up

    @rule(data=st.data(), what=st.sampled_from(["said", "died", "ended", "draining"]))
    def is_told(self, data: st.DataObject, what: str) -> None:
        names = self._names()
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        if what == "said":
            self.fleet.said(name, f"actor-{name}", LIMITS, WORD)
        elif what == "ended":
            self.fleet.ended(name)
        elif what == "draining":
            self.fleet.draining(name, "told to")
        else:
            before = len(self.fleet.given_up())
            given_up = self.fleet.died(name, f"cause of {name}")
            assert given_up == (len(self.fleet.given_up()) > before)

    @rule(seconds=st.sampled_from([1, 150]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(present=st.booleans())
    def looks(self, present: bool) -> None:
        actors = {f"actor-{number}" for number in range(self.begun + 1)} if present else set()
        spent = sum(row["failed_lives"] >= LIMITS.restarts for row in self.fleet.status())
        given_up = self.fleet.look(actors)
        after = sum(row["failed_lives"] >= LIMITS.restarts for row in self.fleet.status())
        assert given_up == after - spent

    @invariant()
    def is_sound(self) -> None:
        rows = self.fleet.status()
        assert len(set(self._names())) == len(rows), "a name names one slot"
        assert all(row["state"] != "DEAD" for row in rows), "a death is decided upon at once"
        spent = [row for row in rows if row["failed_lives"] >= LIMITS.restarts]
        retired = [row for row in rows if row["state"] == "RETIRED"]
        assert all(row["state"] == "RETIRED" for row in spent)
        assert len(retired) <= RETIRED_KEPT + len(spent)


TestAnyOrderOfAFleet = AnyOrder.TestCase
