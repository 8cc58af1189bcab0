"""The controller's part in handing KV over, before scripted replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from overstory.orchestrator import handoff
from overstory.orchestrator.handoff import (
    FEWEST_BYTES,
    MOST_BYTES,
    HandOffs,
    NotMoved,
    Text,
    next_budget,
)
from overstory.orchestrator.journal import JournalEntry
from overstory.orchestrator.lease import Command
from overstory.orchestrator.rank_group import CONTROL_THREADS
from overstory.orchestrator.sampling import Sampling

ROW = 100


class World:
    """Two replicas of two ranks. `kv` is what the giver's cache has, by rid."""

    def __init__(self) -> None:
        self.replicas = {"old": 2, "new": 2}
        self.kv = {"a": 90, "b": 40}
        self.still_running = 0
        self.log: list[str] = []
        self.open: set[tuple[str, int]] = set()
        self.held: dict[str, list[int]] = {}
        self.taken: dict[tuple[int, int], int] = {}  # rows by rank and text
        self.under_way: dict[tuple[str, int], list[int]] = {}  # lengths, by key and rank
        self.stalled = False
        self.looks = 0
        self.fail: dict[str, str] = {}

    def ranks_of(self, replica: str) -> int:
        if replica not in self.replicas:
            raise NotMoved(f"replica {replica} is not steered from here")
        return self.replicas[replica]

    async def ask(self, replica: str, rank: int, method: str, *arguments: Any) -> Any:
        what, *rest = arguments
        await asyncio.sleep(0)
        if what in self.fail:
            raise RuntimeError(self.fail[what])
        if what == "kind":
            return "tcp"
        if what == "offer":
            return f"{rest[0]}/{rank}".encode()
        if what == "arrived":
            self.looks += 1
            return not self.stalled
        self.log.append(f"{what} {replica} {rank}")
        if what == "open":
            ticket = rest[2]
            gives = rest[0].startswith(f"kv-{replica}-")
            assert ticket == (None if gives else f"{rest[0]}/{rank}".encode())
            self.open.add((replica, rank))
        else:
            self.open.discard((replica, rank))
        return None

    async def carry_out(self, replica: str, command: Command) -> Mapping[int, Any]:
        await asyncio.sleep(0)
        ranks = range(self.ranks_of(replica))
        act = {"kv_hold": self._hold, "kv_take": self._take, "kv_let_go": self._let_go}
        self.log.append(f"{command.name} {replica}")
        return {rank: act[command.name](rank, command.arguments) for rank in ranks}

    def _hold(self, rank: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if "kv_hold" in self.fail:
            return {"refused": self.fail["kv_hold"]}
        if self.still_running:
            self.still_running -= rank
            return {"running": ["a"], "lengths": []}
        lengths = [min(self.kv[t["rid"]], len(t["tokens"])) for t in arguments["texts"]]
        self.held[arguments["key"]] = lengths
        return {"running": [], "lengths": lengths, "row_bytes": ROW}

    def _take(self, rank: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """60 rows a part. The first time nothing has come yet."""
        key = arguments["key"]
        if not arguments["texts"]:
            lengths = self.under_way.get((key, rank), [])
        else:
            assert len(self.open) >= 4, "all ranks have met"
            lengths = self.under_way[key, rank] = [len(text) for text in arguments["texts"]]
            assert lengths == self.held[key]
        told = {"bytes": 0, "seconds": 0.0, "stood": 0.01, "done": True}
        if self.fail.get("kv_take 1"):
            self.under_way.pop((key, rank))
            failed = self.fail.get(f"kv_take {rank}") or "another rank did not get its rows"
            return told | {"cached": [0] * len(lengths), "failed": failed}
        before = [self.taken.get((rank, n), 0) for n in range(len(lengths))]
        if arguments["give_up"]:
            self.under_way.pop((key, rank), None)
            return told | {"cached": before, "failed": "given up"}
        if arguments["texts"]:
            return told | {"cached": before, "failed": "", "done": False}
        left, have = 60, []
        for count, length in zip(before, lengths, strict=True):
            more = min(left, length - count)
            left -= more
            have.append(count + more)
        self.taken |= {(rank, n): count for n, count in enumerate(have)}
        done = have == lengths
        if done:
            self.under_way.pop((key, rank))
        came = {"bytes": (60 - left) * ROW, "seconds": 0.1, "stood": 0.01}
        return came | {"cached": have, "done": done, "failed": ""}

    def _let_go(self, rank: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if rank == 1:
            self.held.pop(arguments["key"], None)
        return {}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting."""
    monkeypatch.setattr(handoff, "LINGER_S", 0.05)
    monkeypatch.setattr(handoff, "HOLD_PAUSE_S", 0.0)
    monkeypatch.setattr(handoff, "STEERED_S", 0.1)


def text(rid: str, length: int = 100) -> Text:
    return Text(rid, tuple(range(length)))


def run(world: World, act: Coroutine[Any, Any, Any], handoffs: HandOffs) -> Any:
    """`act`, and then until the pair has parted."""

    async def whole() -> Any:
        try:
            return await act
        finally:
            while handoffs._pairs:
                await asyncio.sleep(0.01)

    return asyncio.run(whole())


async def together(handoffs: HandOffs, *rids: str) -> list[Any]:
    moves = (handoffs.move("old", "new", text(rid)) for rid in rids)
    return await asyncio.gather(*moves, return_exceptions=True)


def test_sequences_that_leave_together_go_in_one_session() -> None:
    world = World()
    handoffs = HandOffs(world)
    assert run(world, together(handoffs, "a", "b"), handoffs) == [90, 40]
    assert world.log.count("kv_hold old") == 1
    assert world.log.count("kv_take new") == 1 + 3, "60 rows a part"
    assert world.held == {}
    assert world.open == set(), "the ranks have parted"
    assert handoffs.figures.sequences == 2
    assert handoffs.figures.bytes == 2 * 130 * ROW
    assert handoffs.figures.seconds == pytest.approx(0.04)
    assert handoffs.figures.carrying_s == pytest.approx(0.3)
    assert handoffs.figures.meetings == 1
    longest = handoffs.figures.longest_wait_s
    assert 0 < longest <= handoffs.figures.waited_s <= 2 * longest
    parts = (handoffs.figures.meeting_s, handoffs.figures.holding_s, handoffs.figures.taking_s)
    assert min(parts) > 0
    assert sum(parts) < longest
    assert world.under_way == {}


def test_nobody_waits_for_the_giver_to_let_go() -> None:
    world = World()
    handoffs = HandOffs(world)

    async def moved() -> list[str]:
        await handoffs.move("old", "new", text("a"))
        return list(world.log)

    assert "kv_let_go old" not in run(world, moved(), handoffs)
    assert world.log.count("kv_let_go old") == 1


def test_the_ranks_meet_once_for_several_sessions() -> None:
    world = World()
    handoffs = HandOffs(world)

    async def twice() -> list[int]:
        first = await handoffs.move("old", "new", text("a"))
        world.taken.clear()
        return [first, await handoffs.move("old", "new", text("b"))]

    assert run(world, twice(), handoffs) == [90, 40]
    assert sum(line.startswith("open") for line in world.log) == 4
    assert sum(line.startswith("close") for line in world.log) == 4


def test_ranks_that_met_ahead_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there, or not under lease in time, keeps nobody."""
    monkeypatch.setattr(handoff, "LINGER_S", 60.0)
    world = World()
    world.replicas["third"] = 2
    handoffs = HandOffs(world)

    async def ahead() -> int:
        await handoffs.meet_ahead("old", ["new", "third", "unknown"])
        assert world.open == {(who, rank) for who in ("old", "new", "third") for rank in (0, 1)}
        world.log.clear()
        moved = await handoffs.move("old", "new", text("a"))
        await handoffs.part("old")
        return moved

    assert run(world, ahead(), handoffs) == 90
    assert not any(line.startswith("open") for line in world.log)
    assert world.open == {("old", 0), ("old", 1)}, "its processes end"
    assert handoffs.figures.meetings == 2


def test_ranks_that_meet_ahead_have_threads_left_for_leases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An opening takes a rank's control thread until the other rank is there."""
    world = World()
    others = [f"new{number}" for number in range(2 * CONTROL_THREADS)]
    world.replicas |= dict.fromkeys(others, 2)
    handoffs = HandOffs(world)
    ask, opening, most = world.ask, Counter[tuple[str, int]](), 0

    async def counted(replica: str, rank: int, method: str, *arguments: Any) -> Any:
        nonlocal most
        if arguments[0] != "open":
            return await ask(replica, rank, method, *arguments)
        opening[replica, rank] += 1
        most = max(most, opening[replica, rank])
        await asyncio.sleep(0.01)
        opening[replica, rank] -= 1
        return await ask(replica, rank, method, *arguments)

    monkeypatch.setattr(world, "ask", counted)
    run(world, handoffs.meet_ahead("old", others), handoffs)
    assert 1 < most <= CONTROL_THREADS // 2


def test_who_comes_while_ranks_meet_ahead_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    handoffs = HandOffs(world)
    ask, may_open = world.ask, asyncio.Event()

    async def slowly(replica: str, rank: int, method: str, *arguments: Any) -> Any:
        if arguments[0] == "open":
            await may_open.wait()
        return await ask(replica, rank, method, *arguments)

    monkeypatch.setattr(world, "ask", slowly)

    async def both() -> int:
        meeting = asyncio.ensure_future(handoffs.meet_ahead("old", ["new"]))
        await asyncio.sleep(0.01)
        moving = asyncio.ensure_future(handoffs.move("old", "new", text("a")))
        await asyncio.sleep(0.05)
        assert "kv_hold old" not in world.log
        may_open.set()
        await meeting
        return await moving

    assert run(world, both(), handoffs) == 90
    assert handoffs.figures.meetings == 1


def test_who_came_while_ranks_did_not_meet_computes_again() -> None:
    """One limit of a meeting is enough to wait for."""
    world = World()
    world.fail = {"open": "rank 1 did not come"}
    handoffs = HandOffs(world)

    async def both() -> list[Any]:
        meeting = asyncio.ensure_future(handoffs.meet_ahead("old", ["new"]))
        moved = await together(handoffs, "a", "b")
        await meeting
        return moved

    outcomes = run(world, both(), handoffs)
    assert [str(one) for one in outcomes] == ["the ranks did not meet: rank 1 did not come"] * 2
    assert (handoffs.figures.meetings, world.open) == (1, set())


def test_ranks_part_when_a_replica_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is there, and after the sequence that is still coming over."""
    monkeypatch.setattr(handoff, "LINGER_S", 60.0)
    world = World()
    handoffs = HandOffs(world)

    async def going() -> int:
        await handoffs.meet_ahead("old", ["new"])
        moving = asyncio.ensure_future(handoffs.move("old", "new", text("a")))
        await asyncio.sleep(0)
        await handoffs.part("old")
        assert world.open == {("old", 0), ("old", 1)}, "its processes end"
        await handoffs.part("old")
        return await moving

    assert run(world, going(), handoffs) == 90
    assert sum(line.startswith("close new") for line in world.log) == 2


def test_a_request_that_is_still_ending_is_waited_for() -> None:
    world = World()
    world.still_running = 5
    handoffs = HandOffs(world)
    assert run(world, together(handoffs, "a"), handoffs) == [90]
    assert world.log.count("kv_hold old") == 6


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"kv_hold": "the prefix cache is off"}, "the prefix cache is off"),
        ({"kv_take 1": "a wrong checksum"}, "a wrong checksum"),
        ({"open": "rank 1 did not come"}, "the ranks did not meet: rank 1 did not come"),
        ({"offer": "gone"}, "gone"),
    ],
)
def test_what_goes_wrong_is_told_and_nothing_stays(fault: dict[str, str], reason: str) -> None:
    world = World()
    world.fail = fault
    handoffs = HandOffs(world)
    outcomes = run(world, together(handoffs, "a", "b"), handoffs)
    assert [type(outcome) for outcome in outcomes] == [NotMoved, NotMoved]
    assert reason in str(outcomes[0])
    assert world.held == {}
    assert world.open == set()
    assert world.under_way == {}
    assert (handoffs.figures.fallbacks, handoffs.figures.sequences) == (2, 0)
    assert reason in handoffs.status()["last_reason"]
    if "offer" in fault:
        assert "close old 0" in world.log, "an offer before it may stand"


def test_what_takes_too_long_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited has given up by then."""
    monkeypatch.setattr(handoff, "BRING_S", 0.2)
    monkeypatch.setattr(handoff, "LOOK_S", 0.01)
    world = World()
    world.stalled = True
    handoffs = HandOffs(world)
    outcomes = run(world, together(handoffs, "a", "b"), handoffs)
    assert [str(outcome) for outcome in outcomes] == ["not all of it came in 0.2 s"] * 2
    assert world.looks >= 2
    assert world.log.count("kv_take new") == 2
    assert (world.held, world.open, world.under_way) == ({}, set(), {})


def test_a_controller_that_ends_lets_go() -> None:
    world = World()
    handoffs = HandOffs(world)

    async def in_the_middle() -> list[Any]:
        moving = asyncio.ensure_future(together(handoffs, "a", "b"))
        while "kv_take new" not in world.log:
            await asyncio.sleep(0)
        assert world.held
        await handoffs.close()
        return await moving

    outcomes = run(world, in_the_middle(), handoffs)
    assert [str(outcome) for outcome in outcomes] == ["the controller ends"] * 2
    assert (world.held, world.open, world.under_way) == ({}, set(), {})


def test_a_boundary_takes_about_as_long_on_any_link() -> None:
    def after(budget: int, *ranks: tuple[int, float]) -> int:
        return next_budget(budget, [{"bytes": n, "seconds": s} for n, s in ranks])

    assert after(64 << 20, (400_000_000, 1.0)) == 100_000_000
    assert after(64 << 20, (400_000_000, 1.0), (400_000_000, 4.0)) == 25_000_000
    assert after(64 << 20, (1_000_000, 1.0)) == FEWEST_BYTES
    assert after(64 << 20, (64 << 20, 0.0003)) == MOST_BYTES
    assert after(64 << 20, (0, 0.0)) == 64 << 20, "nothing came: nothing is known"


def test_two_hand_offs_at_once() -> None:
    """To one replica, from two: each has its own communicator and lets go of its own."""
    world = World()
    world.replicas["older"] = 2
    handoffs = HandOffs(world)

    async def both() -> list[int]:
        moves = (handoffs.move(giver, "new", text("b")) for giver in ("old", "older"))
        return await asyncio.gather(*moves)

    assert run(world, both(), handoffs) == [40, 40]
    assert (world.held, world.open) == ({}, set())
    assert {line for line in world.log if line.startswith("kv_let_go")} == {
        "kv_let_go old",
        "kv_let_go older",
    }


def test_a_request_that_is_aborted_meanwhile_keeps_nothing() -> None:
    """Its KV may come all the same; the one beside it is not touched."""
    world = World()
    handoffs = HandOffs(world)

    async def one_goes() -> list[Any]:
        moves = [asyncio.ensure_future(handoffs.move("old", "new", text(r))) for r in ("a", "b")]
        while "kv_take new" not in world.log:
            await asyncio.sleep(0)
        moves[0].cancel()
        return await asyncio.gather(*moves, return_exceptions=True)

    gone, other = run(world, one_goes(), handoffs)
    assert isinstance(gone, asyncio.CancelledError)
    assert other == 40
    assert (world.held, world.open) == ({}, set())


def test_a_replica_that_is_not_under_lease_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart drains the next replica as soon as the one before serves."""
    monkeypatch.setattr(handoff, "STEERED_S", 60.0)
    world = World()
    del world.replicas["new"]
    handoffs = HandOffs(world)

    async def later() -> int:
        moving = asyncio.ensure_future(handoffs.move("old", "new", text("a")))
        await asyncio.sleep(0.1)
        world.replicas["new"] = 2
        return await moving

    assert run(world, later(), handoffs) == 90


def test_a_replica_that_is_gone_or_of_another_size() -> None:
    for change in ({"old": 0}, {"new": 3}):
        world = World()
        if change.get("old") == 0:
            del world.replicas["old"]
        else:
            world.replicas |= change
        handoffs = HandOffs(world)
        (outcome,) = run(world, together(handoffs, "a"), handoffs)
        assert isinstance(outcome, NotMoved)
        assert ("not steered" if "old" in change else "not as many ranks") in str(outcome)
        assert world.log == []


def test_the_giver_that_goes_in_the_middle() -> None:
    world = World()
    handoffs = HandOffs(world)
    take = world._take

    def and_then_gone(rank: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        world.replicas.pop("old", None)
        return take(rank, arguments) | {"done": True, "failed": "rank 0 ended", "cached": [0]}

    world._take = and_then_gone  # type: ignore[method-assign]
    (outcome,) = run(world, together(handoffs, "a"), handoffs)
    assert "rank 0 ended" in str(outcome)
    assert ("new", 0) not in world.open


def test_the_journal_says_where_the_kv_is() -> None:
    entry = JournalEntry("r", (1, 2), Sampling(seed=0, max_new_tokens=5), 0.0)
    assert entry.call().kv_at is None
    entry.left("old")
    entry.moves = 1
    assert entry.call().kv_at == ("old", "r")
    entry.left("newer")
    entry.moves = 2
    assert entry.call().kv_at == ("newer", "r.1")
    entry.left("")
    assert entry.call().kv_at is None
