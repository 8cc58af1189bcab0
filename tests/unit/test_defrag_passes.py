"""Defragmentation of a replica from the controller's side: orders, passes, refusals, texts."""

import asyncio
import dataclasses
import re
import sys
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from overstory.orchestrator import cli
from overstory.orchestrator.controller import Controller
from overstory.orchestrator.defrag import (
    FEWEST_ROWS,
    DefragOrder,
    DefragRefused,
    OrderFault,
    RanksMovedApart,
    defragment,
    rows_for_pause,
)
from overstory.orchestrator.defrag_plan import (
    MOST_ROWS,
    Fragmentation,
    Plan,
    PlanRefused,
    SlotPicture,
    SlotSequence,
    check_plan,
    measure,
    permutation,
)
from overstory.orchestrator.defrag_text import render_defrag
from overstory.orchestrator.lease import Command
from overstory.orchestrator.rank_directory import RankGone
from overstory.orchestrator.spec import ControlSpec
from overstory.orchestrator.status_text import render
from overstory.workers.death_note import EXIT_DIVERGED

EPOCH = 4


class FakeReplica:
    """Two ranks that hold one picture; plays the controller's part towards them too."""

    def __init__(self, requests: int = 4, rows: int = 64) -> None:
        size = requests * rows
        sequences = tuple(
            SlotSequence(f"r{i}", np.arange(1 + i, size + 1, requests)) for i in range(requests)
        )
        self.picture = SlotPicture(size, sequences, np.zeros(0, np.int64), row_bytes=10)
        self.epoch = EPOCH
        self.commands: list[Command] = []
        self.seen: list[Fragmentation] = []
        self.refusal = ""
        self.pause_ms = 1.0
        self.apart = False

    def epoch_under_lease(self, replica: str) -> int:
        return self.epoch

    async def carry_out(self, replica: str, command: Command) -> dict[int, Any]:
        assert command.drain
        self.commands.append(command)
        if self.refusal and command.name == self.refusal:
            return {0: {"forwards": 1}, 1: {"forwards": 1, "refused": "no such luck"}}
        if command.name == "slot_picture":
            return {0: {"fragmentation": {}}, 1: {}}
        plan: Plan = command.arguments["plan"]
        try:
            check_plan(plan, self.epoch, self.picture.size, MOST_ROWS)
        except PlanRefused as reason:
            return {rank: {"refused": str(reason)} for rank in (0, 1)}
        self.picture = self.picture.renumbered(permutation(plan))
        done = {"plan": plan.digest, "state": "x", "rows": plan.rows, "copy_ms": 0.1}
        return {
            0: {**done, "pause_ms": self.pause_ms},
            1: {**done, "pause_ms": 0.5, "state": "y" if self.apart else "x"},
        }

    async def fetch_picture(self, replica: str, key: str) -> SlotPicture:
        assert key == self.commands[-1].arguments["key"]
        return self.picture

    def pictured(self, replica: str, seen: Fragmentation) -> None:
        self.seen.append(seen)


def run(ranks: FakeReplica, **order: Any) -> dict[str, Any]:
    return asyncio.run(defragment(ranks, "r", DefragOrder(**order)))


def test_passes_go_on_until_nothing_is_worth_moving() -> None:
    ranks = FakeReplica()
    done = run(ranks, rows=64, passes=20)
    assert done["before"]["runs"] == 256
    assert done["after"]["runs"] == 4
    assert done["next"] is None
    assert 1 < len(done["passes"]) < 20
    assert all(one["rows"] == one["planned"] for one in done["passes"])
    assert [command.arguments.get("strict") for command in ranks.commands[:3]] == [
        True,
        None,
        False,
    ]
    assert ranks.seen[-1] == measure(ranks.picture)


def test_only_as_many_passes_as_ordered() -> None:
    done = run(FakeReplica(), rows=32, passes=2)
    assert len(done["passes"]) == 2
    assert done["next"]["rows"] > 0
    assert done["next"]["bytes"] == 10 * done["next"]["rows"]
    assert "moves" not in done["next"]


def test_a_dry_run_moves_nothing() -> None:
    ranks = FakeReplica()
    done = run(ranks, rows=32, dry_run=True)
    assert [command.name for command in ranks.commands] == ["slot_picture"]
    assert done["passes"] == []
    assert done["before"] == done["after"]
    assert len(done["next"]["moves"]) == done["next"]["rows"] > 0
    assert done["next"]["after"]["runs"] < done["after"]["runs"]


def test_a_pool_that_is_good_enough_is_left_alone() -> None:
    ranks = FakeReplica()
    for below, passes in ((0.0, 0), (0.5, 1)):
        assert bool(run(ranks, below=below)["passes"]) == bool(passes)
    assert run(ranks, below=0.5)["passes"] == []


def test_runs_that_are_long_enough_are_left_alone() -> None:
    ranks = FakeReplica(requests=1, rows=200)
    ranks.picture = SlotPicture(
        400, (SlotSequence("r", np.r_[1:101, 201:301]),), np.r_[101:201, 301:401]
    )
    assert run(ranks)["next"] is None
    done = run(ranks, long_run=100)
    assert (done["before"]["runs"], done["after"]["runs"]) == (2, 1)
    assert sum(one["rows"] for one in done["passes"]) == 100


def test_rows_follow_the_pause() -> None:
    assert rows_for_pause(1000, 40.0, 20.0) == 500
    assert rows_for_pause(1000, 1.0, 20.0) == 2000
    assert rows_for_pause(1000, 1e6, 20.0) == FEWEST_ROWS
    assert rows_for_pause(16, 1e6, 20.0) == 16
    assert rows_for_pause(MOST_ROWS, 0.0, 20.0) == MOST_ROWS
    ranks = FakeReplica(requests=8, rows=256)
    ranks.pause_ms = 80.0
    done = run(ranks, rows=1024, passes=3)
    assert len(done["passes"]) == 3
    for one, limit in zip(done["passes"], (1024, 256, 64), strict=True):
        assert 0 < one["planned"] <= limit


@pytest.mark.parametrize("command", ["slot_picture", "relocate"])
def test_a_refusal_of_one_rank_ends_it(command: str) -> None:
    ranks = FakeReplica()
    ranks.refusal = command
    with pytest.raises(DefragRefused, match="replica r, rank 1: no such luck"):
        run(ranks)


def test_a_plan_of_an_epoch_that_is_over_is_refused_untouched() -> None:
    """The controller had to attach again between picture and pass, on the ranks' side only."""
    ranks = FakeReplica()
    before, stale = ranks.picture, ranks.epoch
    ranks.epoch = EPOCH + 1
    ranks.epoch_under_lease = lambda replica: stale  # type: ignore[method-assign]
    with pytest.raises(DefragRefused, match="the plan is of controller epoch 4"):
        run(ranks)
    assert ranks.picture is before


def test_ranks_that_differ_after_a_pass_are_reported() -> None:
    ranks = FakeReplica()
    ranks.apart = True
    with pytest.raises(RanksMovedApart, match="ranks report") as apart:
        run(ranks)
    assert apart.value.rank == 1


def test_ranks_that_differ_after_a_pass_do_not_go_on() -> None:
    """The one to blame is ended with the cause; its replica sees that and ends itself."""
    ended: list[tuple[Any, ...]] = []

    class Ranks:
        async def call(self, name: str, rank: int, method: str, *given: Any, timeout_s: float):
            ended.append((name, rank, method, *given))
            raise RankGone("it ended")

    steering, ranks = controller("leased"), FakeReplica()
    ranks.apart = True
    steering._ranks = Ranks()  # type: ignore[assignment]
    steering.carry_out = ranks.carry_out  # type: ignore[method-assign]
    steering.fetch_picture = ranks.fetch_picture  # type: ignore[method-assign]
    ranks.epoch = steering._state.epoch("r")
    with pytest.raises(RanksMovedApart):
        asyncio.run(steering.defrag(DefragOrder(), "r"))
    ((name, rank, method, cause, code),) = ended
    assert (name, rank, method, code) == ("r", 1, "end", EXIT_DIVERGED)
    assert "ranks differ after a relocation pass" in cause
    assert steering._state.phase("r") == "lost"
    assert "relocation pass" in steering._state.standing("r")
    assert not steering._defragmenting


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rows": 0}, "rows: got 0"),
        ({"rows": MOST_ROWS + 1}, "wanted 1..4096"),
        ({"passes": 0}, "passes: got 0"),
        ({"pause_ms": 0.0}, "pause_ms: got 0.0"),
        ({"long_run": 0}, "long_run: got 0"),
        ({"below": 1.5}, "below: got 1.5"),
    ],
)
def test_orders_that_make_no_sense(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(OrderFault, match=why):
        DefragOrder(**fields)


def test_the_command_line_refuses_a_bad_order_before_ray_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = CliRunner().invoke(cli.app, ["defrag", "--rows", "0"])
    assert answer.exit_code == 2
    assert "'--rows': got '0', wanted a whole number, at least 1 and at most 4096" in answer.stderr


def controller(phase: str, reason: str = "") -> Controller:
    made = Controller("d", ControlSpec(), ranks=None)  # type: ignore[arg-type]
    made._state.found("r", 2)
    made._state._replicas["r"].phase = phase  # type: ignore[assignment]
    made._state._replicas["r"].reason = reason
    return made


@pytest.mark.parametrize("phase", ["found", "condemned", "replaced", "lost", "draining"])
def test_a_replica_that_is_not_steered_is_refused_with_its_phase(phase: str) -> None:
    steering = controller(phase, "as told")
    with pytest.raises(DefragRefused, match=rf"it is {phase} \(as told\)"):
        asyncio.run(steering.defrag(DefragOrder(), "r"))
    with pytest.raises(DefragRefused, match="no replica is under lease"):
        asyncio.run(steering.defrag(DefragOrder()))


def test_a_replica_that_is_to_go_is_refused_and_left_out() -> None:
    steering = controller("leased")
    steering._draining = lambda name: name == "r"
    with pytest.raises(DefragRefused, match="replica r cannot be defragmented: it is draining"):
        asyncio.run(steering.defrag(DefragOrder(), "r"))
    with pytest.raises(DefragRefused, match="no replica is under lease"):
        asyncio.run(steering.defrag(DefragOrder()))
    assert not steering._defragmenting


def test_unknown_replicas_and_second_jobs_are_refused() -> None:
    steering = controller("leased")
    with pytest.raises(DefragRefused, match=r"it is unknown; known: \['r'\]"):
        asyncio.run(steering.defrag(DefragOrder(), "other"))
    steering._defragmenting.add("r")
    with pytest.raises(DefragRefused, match="being defragmented already"):
        asyncio.run(steering.defrag(DefragOrder(), "r"))


def test_replicas_that_stepped_since_their_picture_are_looked_at_again() -> None:
    state = controller("leased")._state
    assert state.worked() == []
    state._replicas["r"].reports[0] = {"forwards": 5}
    assert state.worked() == ["r"]
    state.pictured("r", {})
    assert state.worked() == []
    state._replicas["r"].reports[0] = {"forwards": 6}
    assert state.worked() == ["r"]


def test_a_controller_that_is_told_to_look_does_so_and_survives_refusals() -> None:
    async def watch() -> list[tuple[str, float]]:
        steering = controller("leased")
        steering._defrag_every_s, steering._defrag_order = 0.001, DefragOrder(below=0.7)
        steering._state._replicas["r"].reports[0] = {"forwards": 5}
        looks: list[tuple[str, float]] = []
        twice = asyncio.Event()

        async def look(name: str, order: DefragOrder) -> dict[str, Any]:
            looks.append((name, order.below))
            if len(looks) == 1:
                raise DefragRefused("busy")
            steering._state.pictured("r", {})
            twice.set()
            return {}

        worked, more = steering._state.worked, asyncio.Semaphore(0)

        def counting() -> list[str]:
            more.release()
            return worked()

        steering._state.worked = counting  # type: ignore[method-assign]
        steering._defragment = look  # type: ignore[method-assign]
        steering._watch = asyncio.create_task(steering._watch_fragmentation())
        await asyncio.wait_for(twice.wait(), 30)
        for _ in range(5):  # Further looks find that the replica has not stepped since.
            await asyncio.wait_for(more.acquire(), 30)
        steering._state._replicas["r"].phase = "lost"
        await steering.close()
        assert steering._watch.cancelled()
        return looks

    assert asyncio.run(watch()) == [("r", 0.7)] * 2


def test_the_texts() -> None:
    ranks = FakeReplica()
    dry = render_defrag({"r": run(ranks, rows=32, dry_run=True)}, dry_run=True)
    assert "now: 4 requests, 256 rows in 256 runs (64.0 a request, worst 64)" in dry
    assert re.search(r"plan: 3\d rows .*expected gain \d\d runs of requests", dry)
    assert re.search(r"moves: \d+ -> \d+, .* and 2\d more", dry)
    wet = render_defrag({"r": run(ranks, rows=256, passes=9)}, dry_run=False)
    assert "pass 1: 2" in wet
    assert "100.0% contiguous" in wet
    assert wet.endswith("nothing worth moving")


def test_the_status_shows_the_last_picture() -> None:
    seen = {**dataclasses.asdict(measure(FakeReplica().picture)), "age_s": 3.2}
    replica = {
        "name": "r", "phase": "leased", "reason": "", "digests_equal_up_to": 1, "ranks": [],
        "fragmentation": seen,
    }  # fmt: skip
    picture = {
        "name": "d", "model": "m", "endpoint": "e", "ready": True, "reason": "", "serve": None,
        "controller": {"policy": "p", "lease_steps": 1, "uptime_s": 1.0, "replicas": [replica]},
    }  # fmt: skip
    assert "KV, 3 s ago: 4 requests, 256 rows in 256 runs" in render(picture)
    replica["fragmentation"] = None
    assert "KV," not in render(picture)
