"""What the controller decides, without Ray and with a clock that stands still."""

import pytest
from fake_clock import Clock

from overstory.orchestrator.controller_state import LOST_KEPT, ControllerState
from overstory.orchestrator.lease import Command
from overstory.orchestrator.spec import ControlSpec
from overstory.workers.digest import LinksKept


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def state(clock):
    return ControllerState("demo", ControlSpec(lease_s=0), clock)


def report(
    rank=0, forwards=0, wants_next=False, digests=(), policy="chain", work=0, tokens=0, **more
):
    return {
        "rank": rank,
        "pid": 4000 + rank,
        "phase": "serving",
        "iterations": forwards,
        "forwards": forwards,
        "policy": policy,
        "lease": {"wants_next": wants_next, "mode": "leased"} if rank == 0 else None,
        "load": {"running": work, "waiting": 0, "free_slots": 5, "max_slots": 9},
        "steps": {"verify": {"chain": {"tokens": tokens, "requests": forwards}}, "prefill": {}},
        "digests": LinksKept(tuple(digests), 0),
        "commands": {},
    } | more


def attached(state, name="r1", ranks=2, epoch=1):
    assert state.found(name, ranks)
    state.attached(name, epoch, "chain")
    return name


def test_a_replica_is_found_once(state):
    assert state.found("r1", 2)
    assert not state.found("r1", 2)
    assert state.phase("r1") == "found"
    assert state.next_lease("r1") is None, "not attached yet"


def test_the_first_lease_begins_at_once_under_the_policy_that_runs(state):
    name = attached(state)
    lease = state.next_lease(name)
    assert (lease.epoch, lease.seq, lease.steps, lease.policy) == (1, 1, 64, "chain")
    assert lease.supersede
    assert state.next_lease(name) is None, "nobody wants another"


def test_the_next_lease_follows_when_rank_0_wants_it_and_only_once(state):
    name = attached(state)
    state.next_lease(name)
    state.reported(name, {0: report(wants_next=True)})
    lease = state.next_lease(name)
    assert (lease.seq, lease.supersede) == (2, False)
    assert state.next_lease(name) is None
    state.reported(name, {1: report(rank=1)})
    assert state.next_lease(name) is None, "only rank 0 asks"


def test_a_new_policy_supersedes_the_present_lease_of_every_replica(state):
    names = [attached(state, name) for name in ("r1", "r2")]
    for name in names:
        state.next_lease(name)
    state.set_policy("tree-31")
    for name in names:
        lease = state.next_lease(name)
        assert (lease.policy, lease.supersede) == ("tree-31", True)
        assert state.next_lease(name) is None


def test_commands_go_out_once_with_a_superseding_lease(state):
    name = attached(state)
    state.next_lease(name)
    state.add_command(name, Command("standing"))
    lease = state.next_lease(name)
    assert [command.name for command in lease.commands] == ["standing"]
    assert lease.supersede
    assert state.next_lease(name) is None


def test_results_of_a_command_are_complete_when_every_rank_has_reported(state):
    name = attached(state)
    state.reported(name, {0: report(commands={"t": "a"}), 1: report(1)})
    assert state.command_results(name, "t") is None
    state.reported(name, {1: report(1, commands={"t": "b"})})
    assert state.command_results(name, "t") == {0: "a", 1: "b"}


def test_a_restarted_controller_takes_over_the_policy_it_finds(state):
    attached(state, epoch=7)
    assert state.status()["policy"] == "chain"
    assert state.next_lease("r1").epoch == 7


def test_a_replica_that_refuses_a_policy_stays_under_its_own_and_says_so(state):
    small, large = attached(state, "small"), attached(state, "large")
    for name in (small, large):
        state.next_lease(name)
        state.reported(name, {0: report()})
    state.set_policy("tree-31")
    refused = state.next_lease(small)
    state.refused(small, refused, "no room")
    again = state.next_lease(small)
    assert (again.seq, again.policy) == (refused.seq, "chain")
    assert state.next_lease(small) is None, "no endless retry"
    assert state.next_lease(large).policy == "tree-31"
    (record,) = (r for r in state.status()["replicas"] if r["name"] == "small")
    assert "tree-31 refused: no room" in record["reason"]


def test_ranks_that_differ_condemn_the_replica_once(state):
    name = attached(state)
    assert state.reported(name, {0: report(digests=[(1, "a"), (2, "b")])}) is None
    verdict = state.reported(name, {1: report(1, digests=[(1, "a"), (2, "x")])})
    assert verdict.replica == name
    assert (verdict.difference.forward, verdict.difference.rank) == (2, 1)
    assert state.reported(name, {0: report(digests=[(3, "c")])}) is None
    assert state.next_lease(name) is None, "no more steps for it"
    assert "differ in the steps up to forward 2" in state.status()["replicas"][0]["reason"]


@pytest.mark.parametrize(("steps", "between"), [(64, 32), (1, 1)])
def test_half_a_lease_lies_between_reports(clock, steps, between):
    state = ControllerState("demo", ControlSpec(lease_steps=steps, lease_s=0), clock)
    assert state.report_every(attached(state)) == between


@pytest.mark.parametrize(
    ("steps_per_s", "steps"),
    [(0, 64), (100, 64), (128, 64), (400, 200), (1300, 650), (10_000, 1024)],
)
def test_a_fast_replica_gets_longer_leases(clock, steps_per_s, steps):
    state = ControllerState("demo", ControlSpec(lease_s=0.5), clock)
    name = attached(state)
    assert state.next_lease(name).steps == 64, "its pace is not known yet"
    state.reported(name, {0: report()})
    clock.now += 0.25
    state.reported(name, {0: report(forwards=steps_per_s // 4, wants_next=True)})
    assert state.next_lease(name).steps == steps
    assert state.report_every(name) == steps // 2
    clock.now += 1.0
    state.reported(name, {0: report(forwards=steps_per_s // 4 + 1, wants_next=True)})
    assert state.next_lease(name).steps == 64, "it has slowed down"


def test_reports_that_cross_do_not_make_a_slow_replica_a_fast_one(clock):
    """A status is read while the lease's own report is on its way: a step, and no time, apart."""
    state = ControllerState("demo", ControlSpec(lease_s=0.5), clock)
    name = attached(state)
    state.next_lease(name)
    state.reported(name, {0: report()})
    for forwards in range(40, 201, 40):
        clock.now += 1.0
        state.reported(name, {0: report(forwards=forwards, wants_next=True)})
        clock.now += 0.0002
        state.reported(name, {0: report(forwards=forwards + 1, wants_next=True)})
        assert state.next_lease(name).steps == 64
        (rank,) = state.status()["replicas"][0]["ranks"]
        assert rank["steps_per_s"] == pytest.approx(40, rel=0.01)
        assert rank["forwards"] == forwards + 1


@pytest.mark.parametrize("event", ["lost", "replaced"])
def test_a_replica_that_left_gets_no_lease_and_says_why(state, event):
    name = attached(state)
    getattr(state, event)(name, "because")
    assert state.phase(name) == event
    assert state.next_lease(name) is None
    assert state.leased() == []
    assert state.status()["replicas"][0]["reason"] == "because"


def test_only_the_latest_losses_are_kept(state):
    for number in range(LOST_KEPT + 5):
        attached(state, f"r{number}")
        state.lost(f"r{number}", "gone")
    names = [replica["name"] for replica in state.status()["replicas"]]
    assert names == [f"r{number}" for number in range(5, LOST_KEPT + 5)]


def test_status_gives_rates_between_reports_and_judges_progress(state, clock):
    name = attached(state)
    state.reported(name, {0: report(forwards=10, work=1, tokens=30)})
    clock.now += 2.0
    state.reported(name, {0: report(forwards=20, work=1, tokens=70)})
    (rank,) = state.status()["replicas"][0]["ranks"]
    assert (rank["steps_per_s"], rank["tokens_per_s"], rank["tokens_per_forward"]) == (
        5.0,
        20.0,
        4.0,
    )
    assert rank["health"] == "busy"
    for _ in range(7):
        clock.now += 10.0
        state.reported(name, {0: report(forwards=20, work=1, tokens=70)})
    (rank,) = state.status()["replicas"][0]["ranks"]
    assert rank["health"] == "stalled"
    assert "no batch launched for 70 s" in rank["health_reason"]
    clock.now += 31.0
    (rank,) = state.status()["replicas"][0]["ranks"]
    assert rank["health"] == "silent"


def test_a_lost_replica_is_taken_up_again_only_with_all_its_ranks(state):
    name = attached(state, epoch=4)
    state.lost(name, "gone")
    assert not state.found(name, 1), "what is left of it"
    assert state.found(name, 2)
    assert (state.phase(name), state.epoch(name)) == ("found", 4)


def test_a_condemned_replica_is_never_taken_up_again(state):
    name = attached(state)
    state.reported(name, {0: report(digests=[(1, "a")]), 1: report(1, digests=[(1, "b")])})
    state.unreachable(name, "slow")
    state.attached(name, 2, "chain")
    assert state.phase(name) == "condemned"
    state.lost(name, "its rank was ended")
    assert not state.found(name, 2)
    assert "differ in the steps up to forward 1" in state.status()["replicas"][0]["reason"]
