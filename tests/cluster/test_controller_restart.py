"""The controller as an actor over real ranks: steering, dying, coming back."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import ray
from leftovers import actors_of, wait_until
from live_engine import PROMPT, LiveEngine, Stream

from overstory.orchestrator.controller_actor import end_controller, ensure_controller
from overstory.orchestrator.defrag import DefragOrder
from overstory.orchestrator.defrag_plan import Plan, SlotPicture, measure
from overstory.orchestrator.lease import Command
from overstory.orchestrator.spec import ControlSpec

LEASE_STEPS = 8
CONTROL = ControlSpec(lease_steps=LEASE_STEPS, lease_s=0)
LEASE_TIMEOUT_S = 2.0
TOKENS = 120
NOTICE_S = 60.0


@pytest.fixture(scope="module")
def live() -> Iterator[LiveEngine]:
    engine = LiveEngine(lease_timeout_s=LEASE_TIMEOUT_S)
    yield engine
    engine.close()


@contextmanager
def steering(live: LiveEngine, **settings: Any) -> Iterator[Any]:
    """A controller that leases the replica, found by its ranks' names alone."""
    actor = ensure_controller(live.deployment, CONTROL.model_copy(update=settings))
    wait_until(lambda: replica(actor) and replica(actor)["phase"] == "leased", NOTICE_S, "a lease")
    try:
        yield actor
    finally:
        end_controller(live.deployment)
        wait_until(
            lambda: not [n for n in actors_of(live.deployment) if "controller" in n], 10, "end"
        )


@pytest.fixture
def controller(live: LiveEngine) -> Iterator[Any]:
    with steering(live) as actor:
        yield actor


def replica(actor: Any) -> dict[str, Any] | None:
    replicas = ray.get(actor.status.remote(), timeout=30)["replicas"]
    return replicas[0] if replicas else None


def lease(live: LiveEngine) -> dict[str, Any]:
    return live.ask(0, "report", 10**9)["lease"]


def test_a_stream_under_leases_equals_a_free_one_and_is_reported(
    live: LiveEngine, controller: Any
) -> None:
    expected = live.generate(TOKENS)
    before = lease(live)
    assert live.generate(TOKENS) == expected
    after = lease(live)
    assert after["seq"] - before["seq"] >= TOKENS // 8 // LEASE_STEPS

    def at_rest() -> bool:
        """Both ranks have taken in the last results, and their digests were compared."""
        row = replica(controller)
        return (
            row is not None
            and [rank["health"] for rank in row["ranks"]] == ["idle", "idle"]
            and row["digests_equal_up_to"] > 0
        )

    wait_until(at_rest, NOTICE_S, "both ranks idle and compared")
    status = replica(controller)
    assert status is not None
    ranks = status["ranks"]
    assert ranks[0]["forwards"] == ranks[1]["forwards"] > 0
    verify = ranks[0]["steps"]["verify"]["tree-7"]
    assert verify["tokens"] >= TOKENS
    assert len(verify["accepted_by_depth"]) >= 1


def test_a_policy_and_a_command_reach_all_ranks(live: LiveEngine, controller: Any) -> None:
    ray.get(controller.set_policy.remote("chain"), timeout=30)
    wait_until(lambda: {r["policy"] for r in live.reports()} == {"chain"}, 30, "the policy")
    answer = ray.get(controller.run_command.remote(Command("standing", drain=True)), timeout=60)
    assert answer["r1"][0] == answer["r1"][1]
    with pytest.raises(ValueError, match="at most 7"):
        ray.get(controller.set_policy.remote("tree-63"), timeout=30)
    assert {r["policy"] for r in live.reports()} == {"chain"}
    ray.get(controller.set_policy.remote("tree-7"), timeout=30)


def test_streams_go_on_through_defrag_passes(live: LiveEngine, controller: Any) -> None:
    prompts = [PROMPT, [*PROMPT[:20], 7, 8, 9], list(range(90, 190)), [*range(90, 150), 5]]

    def streams() -> list[Stream]:
        return [live.stream(2 * TOKENS, prompt) for prompt in prompts]

    expected = [stream.result() for stream in streams()]
    under_way = streams()
    for stream in under_way:
        stream.wait_for(10)
    dry = ray.get(controller.defrag.remote(DefragOrder(dry_run=True, rows=256)), timeout=60)["r1"]
    assert dry["passes"] == []
    assert dry["before"] == dry["after"]
    passes: list[dict[str, Any]] = []
    while not all(stream.done.done() for stream in under_way):
        done = ray.get(controller.defrag.remote(DefragOrder(rows=256, passes=1)), timeout=60)
        passes += done["r1"]["passes"]
    assert [stream.result() for stream in under_way] == expected
    assert sum(one["rows"] for one in passes) > 0, "the pool was contiguous: nothing was shown"
    assert live.generate(2 * TOKENS, prompts[2]) == expected[2], "from the relocated prefix cache"
    status = replica(controller)
    assert status is not None
    assert (status["phase"], status["reason"]) == ("leased", "")
    assert status["fragmentation"]["free"] > 0


def test_a_controller_that_is_told_to_look_does(live: LiveEngine) -> None:
    def looked(actor: Any) -> bool:
        row = replica(actor)
        return row is not None and row["fragmentation"] is not None

    with steering(live, defrag_every_s=0.2, defrag_below=1.0) as actor:
        stream = live.stream(TOKENS)
        wait_until(lambda: looked(actor), NOTICE_S, "a look at the replica's slots")
        assert len(stream.result()) == TOKENS


def test_plans_that_do_not_fit_are_refused_on_all_ranks_and_nothing_moves(
    live: LiveEngine, controller: Any
) -> None:
    status = replica(controller)
    assert status is not None
    size, epoch = status["ranks"][0]["load"]["max_slots"], status["epoch"]
    seen = measure(SlotPicture(size, (), np.arange(1, size + 1)))
    for plan, why in (
        (Plan(epoch + 1, size, (1,), (2,), seen, seen), f"epoch {epoch + 1}"),
        (Plan(epoch, size, (1, 2), (3, 3), seen, seen), "used twice"),
        (Plan(epoch, size, (1,), (size + 1,), seen, seen), "out of range"),
        (None, "wants a plan"),
    ):
        command = Command("relocate", {"plan": plan}, drain=True)
        answer = ray.get(controller.run_command.remote(command), timeout=60)["r1"]
        assert [why in answer[rank]["refused"] for rank in (0, 1)] == [True, True]
    with pytest.raises(ValueError, match="it is unknown; known"):
        ray.get(controller.defrag.remote(DefragOrder(), "r9"), timeout=60)
    assert len(live.generate(20)) == 20


def test_a_killed_controller_harms_no_stream_and_comes_back(
    live: LiveEngine, controller: Any
) -> None:
    expected = live.generate(TOKENS)
    epoch, pid = lease(live)["epoch"], ray.get(controller.pid.remote(), timeout=30)
    stream = live.stream(TOKENS)
    stream.wait_for(20)
    os.kill(pid, signal.SIGKILL)
    assert stream.result() == expected
    wait_until(lambda: lease(live)["epoch"] > epoch, NOTICE_S, "the next controller to attach")
    wait_until(lambda: lease(live)["mode"] == "leased", NOTICE_S, "its first lease")
    assert live.generate(TOKENS) == expected
    back = replica(controller)
    assert back is not None
    assert back["phase"] == "leased"


def test_without_a_controller_the_replica_runs_free_under_the_last_policy_and_says_so(
    live: LiveEngine, controller: Any
) -> None:
    expected = live.generate(TOKENS)
    ray.get(controller.set_policy.remote("tree-5"), timeout=30)
    wait_until(lambda: {r["policy"] for r in live.reports()} == {"tree-5"}, 30, "the policy")
    lapses = lease(live)["lapses"]
    ray.kill(controller, no_restart=True)
    assert live.generate(TOKENS) == expected
    alone = lease(live)
    assert alone["mode"] == "free-running"
    assert alone["lapses"] == lapses + 1
    assert alone["free_steps"] > 0
    assert {r["policy"] for r in live.reports()} == {"tree-5"}
    successor = ensure_controller(live.deployment, CONTROL)
    wait_until(lambda: lease(live)["mode"] == "leased", NOTICE_S, "the successor's lease")
    assert ray.get(successor.status.remote(), timeout=30)["policy"] == "tree-5"
