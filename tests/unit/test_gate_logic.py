"""The step gate with a scheduler made of counters."""

import math
import threading
import time

import pytest

from overstory.orchestrator.lease import Command, Lease
from overstory.workers.gate import LeaseBegins, RanksDiverged, StepGate

DEADLINE_S = 10.0


class Scheduler:
    """Stands in for SGLang's: batches launched, work in hand, requests waiting at the socket."""

    def __init__(self, busy=True):
        self.count = 0
        self.busy = busy
        self.input = False
        self.naps = []
        self.drained = 0
        self.asleep = threading.Event()

    def launched(self):
        return self.count

    def running_at(self):
        return self.count if self.busy else -1

    def idle(self):
        return not self.busy

    def input_waits(self, timeout_s, wake_line):
        import select

        self.naps.append(timeout_s)
        self.asleep.set()
        if self.input:
            return True
        select.select([wake_line], [], [], timeout_s)
        return False

    def drain(self):
        self.drained += 1


@pytest.fixture
def begun():
    return []


@pytest.fixture
def gate(begun):
    return StepGate(0, math.inf, begun.append)


def background(function):
    done = []
    thread = threading.Thread(target=lambda: done.append(function()), daemon=True)
    thread.start()
    return thread, done


def finish(thread):
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "still waiting at the gate"


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run_iteration(gate, scheduler, launch=True):
    """One iteration of rank 0: pull, (broadcast), begin, maybe launch a batch."""
    begins = gate.before_pull(scheduler)
    gate.after_broadcast([*begins, "request"], scheduler)
    if launch:
        scheduler.count += 1


def test_a_lease_reaches_every_rank_in_front_of_the_requests(gate, begun):
    scheduler = Scheduler()
    granted = Lease(gate.attach(), 1, 2, "chain")
    gate.offer(granted)
    message = gate.before_pull(scheduler)
    assert message == [LeaseBegins(granted, 0)]
    follower_begun = []
    follower = StepGate(1, math.inf, follower_begun.append)
    for one in (gate, follower):
        assert one.after_broadcast([*message, "a", "b"], scheduler) == ["a", "b"]
        assert one.counters()["policy"] == "chain"
        assert (one.counters()["epoch"], one.counters()["seq"]) == (1, 1)
    assert begun == follower_begun == [granted]


def test_rank_0_stops_when_steps_are_used_up_and_goes_on_with_the_next_lease(gate):
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 3, "plain"))
    for _ in range(3):
        run_iteration(gate, scheduler)
    thread, done = background(lambda: gate.before_pull(scheduler))
    thread.join(0.05)
    assert thread.is_alive()
    assert gate.view().mode == "waiting"
    gate.offer(Lease(epoch, 2, 1, "plain"))
    finish(thread)
    assert done[0][0].lease.seq == 2


def test_a_waiting_rank_goes_on_when_its_controller_lets_go(gate):
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 1, "plain"))
    run_iteration(gate, scheduler)
    thread, done = background(lambda: gate.before_pull(scheduler))
    gate.detach(epoch)
    finish(thread)
    assert done == [[]]


def test_an_idle_replica_sleeps_and_a_lease_wakes_it(gate):
    scheduler = Scheduler(busy=False)
    thread, done = background(lambda: gate.before_pull(scheduler))
    assert scheduler.asleep.wait(DEADLINE_S)
    gate.offer(Lease(gate.attach(), 1, 1, "plain"))
    finish(thread)
    assert [message.lease.seq for message in done[0]] == [1]
    assert scheduler.naps == [pytest.approx(5.0)]


def test_a_lease_offered_before_the_nap_is_not_slept_over(gate):
    scheduler = Scheduler(busy=False)
    gate.offer(Lease(gate.attach(), 1, 1, "plain"))
    assert gate.before_pull(scheduler)
    assert scheduler.naps == [0.0]


def test_a_request_at_the_socket_counts_as_work(gate):
    """Else an idle replica whose steps are used up would launch one batch too many."""
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 1, "plain"))
    run_iteration(gate, scheduler)
    scheduler.busy, scheduler.input = False, True
    thread, _ = background(lambda: gate.before_pull(scheduler))
    thread.join(0.05)
    assert thread.is_alive()
    gate.offer(Lease(epoch, 2, 1, "plain"))
    finish(thread)


@pytest.mark.parametrize(("drain", "times"), [(False, 0), (True, 1)])
def test_only_commands_that_ask_for_it_drain_what_is_in_flight(gate, drain, times):
    scheduler = Scheduler()
    gate.offer(Lease(gate.attach(), 1, 1, "plain", (Command("standing", drain=drain),)))
    run_iteration(gate, scheduler)
    assert scheduler.drained == times


def test_a_rank_that_stands_elsewhere_fails_at_once():
    follower = StepGate(1, math.inf, lambda lease: None)
    scheduler = Scheduler()
    scheduler.count = 4
    message = LeaseBegins(Lease(1, 1, 1, "plain"), launched=5)
    with pytest.raises(RanksDiverged, match=r"rank 1 has launched 4 batches, rank 0 5"):
        follower.after_broadcast([message], scheduler)


def test_a_report_is_due_after_some_batches_or_when_a_lease_is_wanted_or_offered(gate):
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 50, "plain"))
    run_iteration(gate, scheduler)
    gate.await_due(60.0, seen=0, every=1000)  # A lease has begun: the next one is wanted.
    gate.offer(Lease(epoch, 2, 100, "plain"))
    thread, _ = background(lambda: gate.await_due(60.0, seen=0, every=10))
    thread.join(0.05)
    assert thread.is_alive()
    while scheduler.count < 11:
        run_iteration(gate, scheduler)
    finish(thread)
    thread, _ = background(lambda: gate.await_due(60.0, seen=10, every=1000))
    wait_for(lambda: gate._reports_at)
    while scheduler.count < 50:
        run_iteration(gate, scheduler)
    assert thread.is_alive()
    run_iteration(gate, scheduler)
    finish(thread)
    gate.offer(Lease(epoch, 3, 100, "plain"))
    thread, _ = background(lambda: gate.await_due(60.0, seen=53, every=1000))
    thread.join(0.05)
    assert thread.is_alive()
    gate.offer(Lease(epoch, 4, 100, "plain"))
    finish(thread)


def test_who_waits_to_report_is_woken_when_the_lease_has_begun(begun):
    """On every rank what comes before it is linked, and its commands are carried out."""
    seen = []
    gate = StepGate(0, math.inf, lambda lease: begun.append(lease.seq) or finish_unless(thread))
    scheduler = Scheduler()

    def finish_unless(waiting):
        waiting.join(0.05)
        seen.append(waiting.is_alive())

    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 3, "plain"))
    thread, _ = background(lambda: gate.await_due(60.0, seen=0, every=1000))
    wait_for(lambda: gate._reports_at)
    run_iteration(gate, scheduler)
    finish(thread)
    assert (begun, seen) == ([1], [True])


@pytest.fixture
def looked(gate, monkeypatch):
    """Batches at which the gate looked at its leases."""
    found = []
    boundary = gate._ledger.boundary

    def noted(launched, has_work):
        found.append(launched)
        return boundary(launched, has_work)

    monkeypatch.setattr(gate._ledger, "boundary", noted)
    return found


def test_a_busy_loop_stops_at_the_gate_only_where_something_is_due(gate, looked):
    """Each step pays for what is done here: a lease of 100 steps is looked at once."""
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 100, "plain"))
    for _ in range(60):
        run_iteration(gate, scheduler)
    assert looked == [0]
    assert gate.view().remaining == 41
    gate.offer(Lease(epoch, 2, 10, "plain", supersede=True))
    run_iteration(gate, scheduler)
    assert gate.counters()["seq"] == 2
    gate.offer(Lease(epoch, 3, 10, "plain"))
    thread, _ = background(lambda: gate.await_due(60.0, seen=61, every=3))
    wait_for(lambda: gate._reports_at == [64])
    for _ in range(3):
        assert thread.is_alive()
        run_iteration(gate, scheduler)
    run_iteration(gate, scheduler)
    finish(thread)
    assert looked[1:] == [60, 64]


def test_a_lease_that_comes_in_time_stops_the_loop_only_where_it_begins(gate, looked):
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 100, "plain"))
    for _ in range(60):
        run_iteration(gate, scheduler)
    gate.offer(Lease(epoch, 2, 100, "chain"))
    for _ in range(41):
        run_iteration(gate, scheduler)
    assert looked == [0, 100]
    assert (gate.counters()["seq"], gate.view().remaining) == (2, 100)


@pytest.mark.parametrize("first", [5, 9])
def test_each_of_several_who_wait_is_woken_at_its_batch(gate, first):
    """One left behind by its caller waits beside the one that came after it."""
    scheduler = Scheduler()
    epoch = gate.attach()
    gate.offer(Lease(epoch, 1, 100, "plain"))
    run_iteration(gate, scheduler)
    gate.offer(Lease(epoch, 2, 100, "plain"))
    waiting = {}
    for every in (first, 14 - first):
        waiting[every], _ = background(lambda every=every: gate.await_due(60.0, 0, every))
        wait_for(lambda every=every: every in gate._reports_at)
    for _ in range(5):
        run_iteration(gate, scheduler)
    finish(waiting[5])
    assert waiting[9].is_alive()
    for _ in range(4):
        run_iteration(gate, scheduler)
    finish(waiting[9])


def test_a_loop_that_runs_freely_is_stopped_by_who_comes(gate):
    scheduler = Scheduler()
    for _ in range(5):
        run_iteration(gate, scheduler)
    gate.offer(Lease(gate.attach(), 1, 1, "chain"))
    run_iteration(gate, scheduler)
    assert gate.counters()["policy"] == "chain"
    thread, _ = background(lambda: gate.before_pull(scheduler))
    thread.join(0.05)
    assert thread.is_alive(), "its one step is used up"
    gate.detach(1)
    finish(thread)


def test_a_loop_that_turns_idle_under_a_lease_still_sleeps(gate):
    scheduler = Scheduler()
    gate.offer(Lease(gate.attach(), 1, 100, "plain"))
    run_iteration(gate, scheduler)
    scheduler.busy, scheduler.input = False, True
    gate.before_pull(scheduler)
    assert scheduler.naps == [5.0]


def test_iterations_that_take_long_are_noted():
    """What rank 0 sleeps for want of work, or waits for a lease, is no iteration."""
    now = [100.0]
    gate = StepGate(0, math.inf, lambda lease: None, clock=lambda: now[0])
    scheduler = Scheduler()
    for seconds in (0.1, 0.2, 0.7, 0.05, 1.5, 0.1):
        gate.before_pull(scheduler)
        scheduler.count += 1
        now[0] += seconds
    gate.before_pull(scheduler)
    told = gate.counters()
    assert told["stood_s"] == pytest.approx(2.2)
    assert [(seconds, batches) for _, seconds, batches in told["stands"]] == [(0.7, 3), (1.5, 5)]
    assert abs(told["stands"][-1][0] - time.time()) < DEADLINE_S

    def sleeps(timeout_s, wake_line):
        now[0] += 4.0
        return True

    scheduler.busy, scheduler.input_waits = False, sleeps
    gate.before_pull(scheduler)
    scheduler.busy = True
    gate.before_pull(scheduler)
    assert gate.counters()["stood_s"] == pytest.approx(2.2)
