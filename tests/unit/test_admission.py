import asyncio

import pytest
from fake_clock import Clock

from overstory.orchestrator.admission import Admission, QueueFull, Slot


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_runs_the_limit_queues_the_next_refuses_the_rest_in_order() -> None:
    async def scenario() -> None:
        admission = Admission(2, 2)
        first, second = await admission.acquire(), await admission.acquire()
        order: list[str] = []

        async def wait(name: str) -> Slot:
            slot = await admission.acquire()
            order.append(name)
            return slot

        third = asyncio.create_task(wait("third"))
        fourth = asyncio.create_task(wait("fourth"))
        await _settle()
        assert (admission.running, admission.queued) == (2, 2)
        with pytest.raises(QueueFull):
            await admission.acquire()
        first.release()
        await _settle()
        assert order == ["third"]
        second.release()
        await _settle()
        assert order == ["third", "fourth"]
        assert (admission.running, admission.queued) == (2, 0)
        for task in (third, fourth):
            task.result().release()
        assert admission.running == 0

    asyncio.run(scenario())


def test_a_slot_is_given_back_once() -> None:
    async def scenario() -> None:
        admission = Admission(1, 0)
        slot = await admission.acquire()
        slot.release()
        slot.release()
        assert admission.running == 0
        await admission.acquire()
        with pytest.raises(QueueFull):
            await admission.acquire()

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_a_waiter_who_leaves_loses_no_place(granted: bool) -> None:
    """Cancelled in the queue, or in the moment between being called and waking up."""

    async def scenario() -> None:
        admission = Admission(1, 2)
        slot = await admission.acquire()
        leaver = asyncio.create_task(admission.acquire())
        stayer = asyncio.create_task(admission.acquire())
        await _settle()
        if granted:
            slot.release()
        leaver.cancel()
        await _settle()
        if not granted:
            assert admission.queued == 1
            slot.release()
        (await stayer).release()
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_retry_after_follows_the_pace_and_the_queue() -> None:
    async def scenario() -> None:
        clock = Clock()
        admission = Admission(1, 5, clock)
        for _ in range(50):
            slot = await admission.acquire()
            clock.now += 4.0
            slot.release()
        await admission.acquire()
        waits = [admission.retry_after_s()]
        for _ in range(5):
            asyncio.create_task(admission.acquire())  # noqa: RUF006
            await _settle()
            waits.append(admission.retry_after_s())
        assert waits == [4, 8, 12, 16, 20, 24]
        with pytest.raises(QueueFull) as full:
            await admission.acquire()
        assert full.value.retry_after_s == 24

    asyncio.run(scenario())


def test_the_limit_follows_the_number_of_replicas() -> None:
    async def scenario() -> None:
        admission = Admission(1, 3)
        slots = [await admission.acquire()]
        waiting = [asyncio.create_task(admission.acquire()) for _ in range(3)]
        await _settle()
        admission.set_max_concurrent(3)
        await _settle()
        assert (admission.running, admission.queued) == (3, 1)
        admission.set_max_concurrent(1)
        slots += [task.result() for task in waiting if task.done()]
        for running in (2, 1):
            slots.pop().release()
            await _settle()
            assert (admission.running, admission.queued) == (running, 1)
        slots.pop().release()
        (await waiting[-1]).release()
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_a_request_takes_as_many_places_as_it_has_sequences() -> None:
    async def scenario() -> None:
        admission = Admission(4, 1)
        large = await admission.acquire(3)
        assert admission.running == 3
        small = await admission.acquire()
        waiting = asyncio.create_task(admission.acquire(2))
        await _settle()
        with pytest.raises(QueueFull, match="4 sequences are running and 1 requests are waiting"):
            admission.refuse_if_full()
        small.release()
        await _settle()
        assert (admission.running, admission.queued) == (3, 1), "one place is not two"
        large.release()
        (await waiting).release()
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_small_requests_do_not_overtake_a_large_one_that_waits() -> None:
    async def scenario() -> None:
        admission = Admission(4, 8)
        running = [await admission.acquire() for _ in range(4)]
        order: list[int] = []

        async def wait(sequences: int) -> Slot:
            slot = await admission.acquire(sequences)
            order.append(sequences)
            return slot

        waiting = [asyncio.create_task(wait(sequences)) for sequences in (4, 1, 2)]
        await _settle()
        for slot in running:
            assert order == []
            slot.release()
            await _settle()
        assert (order, admission.running) == ([4], 4)
        (await waiting[0]).release()
        await _settle()
        assert (order, admission.running) == ([4, 1, 2], 3)

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_those_behind_a_large_request_that_leaves_move_up(granted: bool) -> None:
    async def scenario() -> None:
        admission = Admission(3, 8)
        slot = await admission.acquire(2)
        large = asyncio.create_task(admission.acquire(3))
        small = asyncio.create_task(admission.acquire(1))
        await _settle()
        assert not small.done()
        if granted:
            slot.release()
        large.cancel()
        await _settle()
        assert small.done()
        assert admission.running == (1 if granted else 3)
        small.result().release()
        slot.release()
        assert (admission.running, admission.queued) == (0, 0)

    asyncio.run(scenario())


def test_the_limit_never_falls_below_the_largest_request() -> None:
    async def scenario() -> None:
        admission = Admission(6, 2, largest=3)
        assert admission.largest == 3
        first = await admission.acquire(3)
        second = await admission.acquire(3)
        last = asyncio.create_task(admission.acquire(3))
        await _settle()
        admission.set_max_concurrent(3)
        first.release()
        await _settle()
        assert not last.done()
        second.release()
        (await last).release()
        with pytest.raises(AssertionError):
            admission.set_max_concurrent(2)

    asyncio.run(scenario())


@pytest.mark.parametrize(("concurrent", "queued", "key"), [(0, 1, "concurrent"), (1, -1, "queued")])
def test_senseless_limits_are_refused_by_name(concurrent: int, queued: int, key: str) -> None:
    with pytest.raises(ValueError, match=f"gateway.max_{key}_requests"):
        Admission(concurrent, queued)
