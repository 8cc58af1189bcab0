"""Leases: when they begin, run out, are waited for and refused."""

import math
import pickle

import pytest
from fake_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from overstory.orchestrator.lease import (
    Command,
    Lease,
    LeaseLedger,
    LeaseRefused,
    StaleEpoch,
)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return LeaseLedger(timeout_s=2.0, clock=clock)


def lease(epoch, seq, steps=4, policy="plain", **fields):
    return Lease(epoch, seq, steps, policy, **fields)


def test_without_a_controller_nothing_waits(ledger):
    assert ledger.boundary(0, has_work=True).go
    assert ledger.view(0).mode == "unmanaged"
    assert not ledger.view(0).wants_next, "nobody is there to ask"


def test_a_lease_begins_at_the_next_boundary_and_counts_launched_batches_only(ledger):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1))
    assert ledger.boundary(10, has_work=True).begins == (lease(epoch, 1),)
    for launched in (10, 10, 10, 13):
        assert ledger.boundary(launched, has_work=True).go
    assert ledger.view(13).remaining == 1
    assert not ledger.boundary(14, has_work=True).go


def test_the_next_lease_is_wanted_as_soon_as_one_begins(ledger):
    epoch = ledger.attach()
    assert ledger.due_next()
    ledger.offer(lease(epoch, 1))
    assert not ledger.due_next(), "one is queued"
    ledger.boundary(0, has_work=True)
    assert ledger.due_next()
    ledger.offer(lease(epoch, 2))
    assert not ledger.due_next()


def test_a_ledger_is_quiet_until_the_present_lease_is_used_up(ledger):
    assert ledger.quiet_until() == math.inf
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1, steps=4))
    ledger.boundary(10, has_work=True)
    ledger.offer(lease(epoch, 2, steps=3))
    assert ledger.quiet_until() == 14
    ledger.boundary(14, has_work=True)
    assert ledger.quiet_until() == 17
    ledger.detach(epoch)
    assert ledger.quiet_until() == math.inf


def test_a_queued_lease_begins_when_the_present_one_is_used_up(ledger):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1))
    ledger.boundary(0, has_work=True)
    ledger.offer(lease(epoch, 2, policy="chain"))
    assert ledger.boundary(3, has_work=True).begins == ()
    assert ledger.boundary(4, has_work=True).begins == (lease(epoch, 2, policy="chain"),)


def test_a_superseding_lease_begins_at_once_and_keeps_queued_commands(ledger):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1))
    ledger.boundary(0, has_work=True)
    ledger.offer(lease(epoch, 2, commands=(Command("standing"),)))
    ledger.offer(lease(epoch, 3, policy="tree-7", commands=(Command("other"),), supersede=True))
    (begun,) = ledger.boundary(1, has_work=True).begins
    assert begun.seq == 3
    assert [command.name for command in begun.commands] == ["standing", "other"]
    assert ledger.view(1).queued == 0


def test_a_late_lease_is_waited_for_then_the_replica_runs_free(ledger, clock):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1))
    ledger.boundary(0, has_work=True)
    assert ledger.boundary(4, has_work=True).wait_s == pytest.approx(2.0)
    assert ledger.view(4).mode == "waiting"
    clock.now = 1.5
    assert ledger.boundary(4, has_work=True).wait_s == pytest.approx(0.5)
    clock.now = 2.0
    assert ledger.boundary(4, has_work=True).go
    assert ledger.boundary(9, has_work=True).go, "free-running does not wait again"
    view = ledger.view(9)
    assert (view.mode, view.lapses, view.free_steps, view.policy) == ("free-running", 1, 5, "plain")
    ledger.offer(lease(epoch, 2))
    assert ledger.boundary(9, has_work=True).begins
    assert (ledger.view(12).mode, ledger.view(12).free_steps) == ("leased", 5)


def test_idle_iterations_neither_use_nor_await_a_lease(ledger):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1))
    ledger.boundary(0, has_work=False)
    for _ in range(100):
        assert ledger.boundary(0, has_work=False).go
    assert ledger.view(0).remaining == 4
    assert ledger.boundary(4, has_work=False).go, "used up, but nothing to run"
    assert not ledger.boundary(4, has_work=True).go


def test_an_older_epoch_is_refused_and_changes_nothing(ledger):
    old = ledger.attach()
    ledger.offer(lease(old, 1))
    ledger.boundary(0, has_work=True)
    new = ledger.attach()
    assert new > old
    before = ledger.view(1)
    with pytest.raises(StaleEpoch, match=f"epoch {old} is over"):
        ledger.offer(lease(old, 2))
    with pytest.raises(StaleEpoch):
        ledger.detach(old)
    assert ledger.view(1) == before
    ledger.offer(lease(new, 1))


def test_a_lease_out_of_order_or_of_an_unknown_epoch_is_refused(ledger):
    epoch = ledger.attach()
    with pytest.raises(LeaseRefused, match="not the next"):
        ledger.offer(lease(epoch, 2))
    with pytest.raises(LeaseRefused, match="never given"):
        ledger.offer(lease(epoch + 1, 1))
    ledger.offer(lease(epoch, 1))
    with pytest.raises(LeaseRefused, match="not the next"):
        ledger.offer(lease(epoch, 1))


def test_after_detach_nothing_waits_and_nothing_queued_begins(ledger):
    epoch = ledger.attach()
    ledger.offer(lease(epoch, 1, steps=1))
    ledger.boundary(0, has_work=True)
    ledger.offer(lease(epoch, 2))
    ledger.detach(epoch)
    boundary = ledger.boundary(1, has_work=True)
    assert boundary.go
    assert boundary.begins == ()


def test_an_endless_time_out_waits_for_ever():
    ledger = LeaseLedger(math.inf, lambda: 0.0)
    ledger.offer(lease(ledger.attach(), 1, steps=1))
    ledger.boundary(0, has_work=True)
    assert ledger.boundary(1, has_work=True).wait_s == math.inf


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan])
def test_a_time_out_must_be_positive(timeout_s):
    with pytest.raises(ValueError, match="lease_timeout_s"):
        LeaseLedger(timeout_s, lambda: 0.0)


@pytest.mark.parametrize("fields", [(1, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_a_senseless_lease_is_refused(fields):
    with pytest.raises(ValueError, match=r"lease needs|count from 1"):
        Lease(*fields, policy="plain")


def test_leases_travel_pickled():
    sent = lease(1, 2, commands=(Command("standing", {"a": [1]}, drain=True, ticket="t"),))
    assert pickle.loads(pickle.dumps(sent)) == sent


@given(
    st.lists(st.tuples(st.sampled_from(["offer", "supersede", "run", "attach"]), st.integers(1, 5)))
)
def test_batches_under_leases_never_exceed_the_steps_granted(events):
    """Whatever a controller does, a leased replica launches at most what the leases allow."""
    ledger = LeaseLedger(math.inf, lambda: 0.0)
    epoch, seq, launched, allowed = 0, 0, 0, 0
    for event, number in events:
        if event == "attach":
            epoch, seq = ledger.attach(), 0
        elif event in ("offer", "supersede") and epoch:
            seq += 1
            ledger.offer(lease(epoch, seq, steps=number, supersede=event == "supersede"))
        elif event == "run":
            for _ in range(number):
                boundary = ledger.boundary(launched, has_work=True)
                for begun in boundary.begins:
                    allowed = launched + begun.steps
                if ledger.view(launched).mode != "unmanaged":
                    assert boundary.go == (launched < allowed)
                if boundary.go:
                    launched += 1


def test_attaching_again_keeps_out_of_the_way_of_a_newer_controller():
    ledger = LeaseLedger(5.0, lambda: 0.0)
    first = ledger.attach("a")
    again = ledger.attach("a", held=first)
    assert again == first + 1
    newer = ledger.attach("b")
    with pytest.raises(StaleEpoch, match=f"epoch {again} is over"):
        ledger.attach("a", held=again)
    assert ledger.view(0).epoch == newer
