"""Which calls have to leave their replica, when, and which replicas get nothing new."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest

from overstory.orchestrator.replica_board import PlacedCall, ReplicaBoard, until


def play(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story()

    asyncio.run(bounded())


async def _settled(call: PlacedCall) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return call.leave.is_set()


def test_a_call_leaves_a_replica_that_goes_where_another_runs() -> None:
    async def story() -> None:
        board = ReplicaBoard()
        board.update(["a", "b"])
        with board.following("on-a") as on_a, board.following("on-b") as on_b:
            board.routed("on-a", "a")
            board.routed("on-b", "b")
            assert not await _settled(on_a)
            board.update(["b"])
            assert await _settled(on_a)
            assert not await _settled(on_b)
            with board.following("late") as late:  # routed by a router that did not know yet
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
            board.routed("x", "a")
            board.update([])
            assert not await _settled(call)
            board.update(["a"])  # Serve's own controller had restarted, say
            await asyncio.sleep(0.4)
            assert not call.leave.is_set()
            board.update([])
            await call.leave.wait()

    play(story)


def test_a_new_replica_is_somewhere_to_go() -> None:
    async def story() -> None:
        board = ReplicaBoard(drain_s=60)
        board.update(["a"])
        with board.following("x") as call:
            board.routed("x", "a")
            board.update([])
            assert not await _settled(call)
            threading.Thread(target=board.update, args=(["b"],)).start()  # Serve's router loop
            await call.leave.wait()

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


@pytest.mark.parametrize("stopped", [False, True])
def test_items_until(stopped: bool) -> None:
    closed = []

    async def endless(count: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(count):
                yield number
            if stopped:
                await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def story() -> None:
        stop, seen = asyncio.Event(), []
        items = endless(3)
        async for number in until(items, stop):
            seen.append(number)
            if number == 2 and stopped:
                asyncio.get_running_loop().call_later(0.05, stop.set)
        assert seen == [0, 1, 2]
        await items.aclose()
        assert closed == [True]

    play(story)


def test_items_until_pass_on_errors_and_cancellation() -> None:
    async def broken() -> AsyncGenerator[int, None]:
        yield 1
        raise ValueError("no")

    async def stuck() -> AsyncGenerator[int, None]:
        await asyncio.Event().wait()
        yield 1

    async def drain(items: AsyncGenerator[int, None]) -> None:
        async for _ in until(items, asyncio.Event()):
            pass

    async def story() -> None:
        with pytest.raises(ValueError, match="no"):
            await drain(broken())
        task = asyncio.create_task(drain(stuck()))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    play(story)
