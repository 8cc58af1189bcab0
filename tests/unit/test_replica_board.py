"""Which calls have to leave their replica, when, and which replicas get nothing new."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest

from overstory.orchestrator import replica_board
from overstory.orchestrator.affinity import Affinity, LoadBound
from overstory.orchestrator.replica_board import PlacedCall, ReplicaBoard


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story()

    asyncio.run(bounded())


def _told(call: PlacedCall) -> asyncio.Event:
    told = asyncio.Event()
    call.on_leave = told.set
    return told


async def _settled(told: asyncio.Event) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return told.is_set()


def test_a_call_leaves_a_replica_that_goes_where_another_runs() -> None:
    async def story() -> None:
        board = ReplicaBoard()
        board.update(["a", "b"])
        with board.following("on-a") as call_a, board.following("on-b") as call_b:
            on_a, on_b = _told(call_a), _told(call_b)
            board.routed("on-a", "a")
            board.routed("on-b", "b")
            assert not await _settled(on_a)
            board.update(["b"])
            assert await _settled(on_a)
            assert not await _settled(on_b)
            with board.following("late") as call:  # routed by a router that did not know yet
                late = _told(call)
                board.routed("late", "a")
                assert await _settled(late)
        board.routed("on-a", "b")  # ended meanwhile
        board.update(["c"])

    play(story)


def test_a_call_stays_while_there_is_nowhere_to_go_but_not_for_ever() -> None:
    async def story() -> None:
        board = ReplicaBoard(drain_s=0.2)
        board.update(["a"])
        with board.following("x") as call:
            told = _told(call)
            board.routed("x", "a")
            board.update([])
            assert not await _settled(told)
            board.update(["a"])  # Serve's own controller had restarted, say
            await asyncio.sleep(0.4)
            assert not told.is_set()
            board.update([])
            await told.wait()

    play(story)


def test_calls_stay_until_what_comes_before_is_done() -> None:
    async def story() -> None:
        board = ReplicaBoard()
        asked: list[tuple[str, list[str]]] = []
        board.before_leaving = lambda *who: asked.append(who)
        board.update(["a", "c", "b"])
        with board.following("x") as one, board.following("y") as other:
            told, too = _told(one), _told(other)
            board.routed("x", "a")
            board.routed("y", "a")
            board.update(["c", "b"])
            assert not await _settled(told)
            assert asked == [("a", ["b", "c"])], "once for all its calls, without the lock"
            board.may_leave("a")
            assert await _settled(told)
            assert await _settled(too)
            with board.following("late") as call:
                late = _told(call)
                board.routed("late", "a")
                assert await _settled(late)
        board.may_leave("nobody")
        board.update(["b"])
        assert (len(asked), board._stay_until) == (1, {})

    play(story)


def test_calls_do_not_stay_for_ever_for_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_board, "PREPARE_S", 0.1)

    async def story() -> None:
        board = ReplicaBoard(drain_s=60)
        board.before_leaving = lambda *_: None
        board.update(["a", "b"])
        with board.following("x") as call:
            told = _told(call)
            board.routed("x", "a")
            board.update(["b"])
            assert not await _settled(told)
            await told.wait()

    play(story)


def test_how_many_run_is_told_at_once() -> None:
    board, told = ReplicaBoard(), list[int]()
    board.on_running = told.append
    for running in (["a"], ["a", "b"], []):
        board.update(running)
    assert told == [1, 2, 0]


def test_a_new_replica_is_somewhere_to_go() -> None:
    async def story() -> None:
        board = ReplicaBoard(drain_s=60)
        board.update(["a"])
        with board.following("x") as call:
            told = _told(call)
            board.routed("x", "a")
            board.update([])
            assert not await _settled(told)
            threading.Thread(target=board.update, args=(["b"],)).start()  # Serve's router loop
            await told.wait()

    play(story)


def test_a_shunned_replica_gets_nothing_for_a_while() -> None:
    now = [0.0]
    board = ReplicaBoard(clock=lambda: now[0])
    board.update(["a", "b"])
    board.shun("a", 5.0)
    board.shun(None, 5.0)
    assert [board.usable(name) for name in "ab"] == [False, True]
    now[0] = 5.0
    assert board.usable("a")
    board.shun("a", 5.0)
    board.update(["b"])
    board.update(["a", "b"])  # gone and back
    assert board.usable("a")


def test_a_call_counts_where_the_router_wants_it_before_it_is_routed() -> None:
    async def story() -> None:
        board = ReplicaBoard()
        board.update(["a", "b"])
        with board.following("one"), board.following("two"), board.following("three"):
            board.chosen("one", "a")
            board.chosen("two", "a")
            assert board.loads() == {"a": 2}
            board.chosen("two", "b")  # its queue was full, the router looked again
            board.routed("one", "a")
            board.routed("two", "a")  # and Serve sent it there after all
            assert board.loads() == {"a": 2}
            board.chosen("gone", "b")
        assert board.loads() == {}

    play(story)


def test_calls_that_are_chosen_for_at_one_go_keep_to_the_bound() -> None:
    """Serve chooses for all that wait before it tells of the first that it is routed."""

    async def story() -> None:
        board, affinity = ReplicaBoard(), Affinity("session_sticky")
        board.update(["a", "b"])
        with ExitStack() as calls:
            for n in range(32):
                calls.enter_context(board.following(f"{n}"))
            for n in range(32):
                wanted = affinity.prefers([1, 2, 3], "one", board.loads(), ["a", "b"])
                assert wanted is not None
                board.chosen(f"{n}", wanted)
            loads = board.loads()
        assert max(loads.values()) <= LoadBound().most(loads, loads)
        assert min(loads.values()) > 0

    play(story)
