"""Two real ranks under leases granted by hand: where they stop, what they hand out."""

import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from leftovers import wait_until
from live_engine import PROMPT, LiveEngine

from overstory.orchestrator.lease import Command, Lease, LeaseRefused, StaleEpoch

STOPS = 50
FULL_STOPS = 1000
TOKENS = 48
STREAM_TOKENS = 1500
NO_DIGESTS = 10**9
"""As `after_forward`: leave the digests out of a report."""
IDLE_LOOK_S = 8.0
IDLE_SHARE = 0.05


@pytest.fixture(scope="module")
def overlapped() -> Iterator[LiveEngine]:
    engine = LiveEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain_loop() -> Iterator[LiveEngine]:
    engine = LiveEngine(disable_overlap_schedule=True)
    yield engine
    let_go(engine)
    engine.close()


@pytest.fixture
def free(overlapped: LiveEngine) -> Iterator[LiveEngine]:
    """The overlapped engine, handed back idle and without leases whatever the test did."""
    yield overlapped
    let_go(overlapped)


def let_go(engine: LiveEngine) -> None:
    engine.attach()
    engine.detach()
    engine.engine.tokenizer_manager.abort_request(abort_all=True)
    wait_until(lambda: idle(engine), 60, "the engine to be idle")


def idle(engine: LiveEngine) -> bool:
    zero, one = engine.reports(NO_DIGESTS)
    at_rest = zero["iterations"] == one["iterations"] and not engine.engine.running()
    return at_rest and not any(r["load"]["running"] + r["load"]["waiting"] for r in (zero, one))


class Busy:
    """Keeps one request running, whenever the one before has ended."""

    def __init__(self, engine: LiveEngine) -> None:
        self._engine = engine
        self._stream = engine.stream(STREAM_TOKENS)

    def keep(self) -> None:
        if self._stream.done.done():
            self._stream.result()
            self._stream = self._engine.stream(STREAM_TOKENS)


def stopped(engine: LiveEngine, busy: Busy) -> list[dict[str, Any]]:
    """Reports of both ranks once rank 0 waits for a lease and rank 1 has come as far."""

    def waiting() -> bool:
        busy.keep()
        lease = engine.ask(0, "report", NO_DIGESTS)["lease"]
        return lease["mode"] == "waiting" and lease["seq"] == engine.seq

    wait_until(waiting, 30, "rank 0 to stop")
    iteration = engine.ask(0, "report", NO_DIGESTS)["iterations"]
    wait_until(
        lambda: engine.ask(1, "report", NO_DIGESTS)["iterations"] >= iteration, 30, "rank 1 to stop"
    )
    return engine.reports(NO_DIGESTS)


def stop_many_times(engine: LiveEngine, stops: int) -> None:
    engine.attach()
    before = engine.ask(0, "report", NO_DIGESTS)
    busy = Busy(engine)
    for number in range(stops):
        engine.grant(1 + number % 3)
        zero, one = stopped(engine, busy)
        for fact in ("iterations", "forwards", "epoch", "seq", "load"):
            assert zero[fact] == one[fact], f"at stop {number}"
        assert zero["lease"]["lapses"] == before["lease"]["lapses"], "a stop outlasted the time-out"
    assert zero["forwards"] - before["forwards"] >= stops, "the ranks were not working"
    zero, one = engine.reports(before["forwards"])
    assert zero["digests"] == one["digests"]
    # What a lease ran is linked where the next one begins, but for a step that is still in flight.
    assert len(zero["digests"].links) >= stops - 2


@pytest.mark.parametrize("stops", [STOPS, pytest.param(FULL_STOPS, marks=pytest.mark.full)])
def test_overlapped_ranks_stop_at_the_same_iteration(free: LiveEngine, stops: int) -> None:
    stop_many_times(free, stops)


@pytest.mark.full
def test_ranks_without_overlap_stop_at_the_same_iteration(plain_loop: LiveEngine) -> None:
    stop_many_times(plain_loop, FULL_STOPS)


def test_leases_and_drains_do_not_change_what_comes_out(free: LiveEngine) -> None:
    expected = free.generate(TOKENS)
    free.attach()
    stream = free.stream(TOKENS)
    number = 0
    while not stream.done.done():
        number += 1
        free.grant(1, "tree-7", Command("standing", drain=number % 2 == 0, ticket=str(number)))
        wait_until(
            lambda: stream.done.done() or free.ask(0, "exchange", 0, NO_DIGESTS, 0.2), 30, "a step"
        )
    assert stream.result() == expected
    zero, one = free.reports()
    assert zero["commands"] == one["commands"]
    assert any(result["requests"] for result in zero["commands"].values())


def test_policies_switch_at_a_boundary_and_keep_greedy_output(free: LiveEngine) -> None:
    expected = free.generate(TOKENS)
    free.attach()
    stream = free.stream(TOKENS)
    policies = ("plain", "chain", "tree-5", "spine-7")
    for policy in policies * 2:
        free.grant(2, policy)
        wait_until(
            lambda policy=policy: (
                stream.done.done()
                or {report["policy"] for report in free.reports(NO_DIGESTS)} == {policy}
            ),
            30,
            f"{policy} on both ranks",
        )
    free.detach()
    assert stream.result() == expected
    wait_until(lambda: idle(free), 30, "both ranks to have taken in the last batch")
    zero, one = free.reports()
    assert zero["digests"] == one["digests"]
    assert set(policies) <= set(zero["steps"]["verify"]) | {"plain"}


def test_an_older_epoch_is_refused_by_the_rank(free: LiveEngine) -> None:
    free.attach()
    old = free.epoch
    free.attach()
    with pytest.raises(StaleEpoch, match=f"epoch {old} is over"):
        free.ask(0, "grant", Lease(old, 1, 1, "plain"))
    with pytest.raises(LeaseRefused, match="not the next"):
        free.ask(0, "grant", Lease(free.epoch, 7, 1, "plain"))
    with pytest.raises(ValueError, match="at most 7"):
        free.ask(0, "grant", Lease(free.epoch, 1, 1, "tree-63"))
    with pytest.raises(ValueError, match="unknown boundary command"):
        free.ask(0, "grant", Lease(free.epoch, 1, 1, "plain", (Command("no-such"),)))


def test_a_late_lease_delays_a_stream_but_does_not_end_it(free: LiveEngine) -> None:
    expected = free.generate(TOKENS)
    free.attach()
    free.grant(4)
    stream = free.stream(TOKENS)
    assert stream.result() == expected
    gaps = [after - before for before, after in zip(stream.times, stream.times[1:], strict=False)]
    assert max(gaps) >= free.engine.group.plan.lease_timeout_s * 0.9
    lease = free.ask(0, "report")["lease"]
    assert lease["mode"] == "free-running"
    assert lease["lapses"] >= 1
    assert lease["free_steps"] > 0


def test_closing_a_stream_aborts_it_in_the_engine(free: LiveEngine) -> None:
    before = [report["load"] for report in free.reports(NO_DIGESTS)]
    stream = free.stream(STREAM_TOKENS)
    stream.wait_for(4)
    stream.cancel()
    wait_until(lambda: idle(free), 30, "the request to be gone")
    after = [report["load"] for report in free.reports(NO_DIGESTS)]
    for old, new in zip(before, after, strict=True):
        assert old["free_slots"] + old["cached_slots"] == old["max_slots"], "idle before"
        assert new["free_slots"] + new["cached_slots"] == new["max_slots"], "a slot is lost"
        assert new["cached_slots"] - old["cached_slots"] < len(PROMPT) + STREAM_TOKENS, "it ran on"
    assert after[0] == after[1]


def test_an_idle_replica_does_not_spin(free: LiveEngine) -> None:
    wait_until(lambda: idle(free), 30, "the engine to be idle")
    processes = [psutil.Process(i.pid) for i in free.engine.group.identities] + [psutil.Process()]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def look() -> float:
        begun, before = time.monotonic(), cpu_s()
        time.sleep(IDLE_LOOK_S)
        return (cpu_s() - before) / (time.monotonic() - begun)

    # The least of some looks: what spins is in all of them, what a busy machine adds is not.
    shares: list[float] = []
    while len(shares) < 3 and min(shares, default=1.0) >= IDLE_SHARE:
        shares.append(look())
    assert min(shares) < IDLE_SHARE, f"ranks and front half use {shares} of a core when idle"
