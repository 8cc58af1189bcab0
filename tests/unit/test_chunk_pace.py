"""Chunks of tokens that are held together for a moment."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs
from overstory.orchestrator.chunk_pace import paced
from overstory.orchestrator.service import stream_hold_s

LONG_S = 60.0


def _logprobs(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5 * token, ((token, -0.5 * token),)) for token in ids]


async def _steps(*, logged: bool = True) -> AsyncIterator[TokenChunk]:
    for ids in ([1], [2], [3]):
        await asyncio.sleep(0)
        yield TokenChunk(ids, None, _logprobs(ids) if logged else None)
    await asyncio.sleep(0)
    yield TokenChunk([4, 5], {"type": "length"}, _logprobs([4, 5]) if logged else None)


async def _collect(steps: AsyncIterator[TokenChunk], hold_s: float) -> list[TokenChunk]:
    return [chunk async for chunk in paced(steps, hold_s)]


@pytest.mark.parametrize(
    ("hold_s", "expected"), [(0.0, [[1], [2], [3], [4, 5]]), (LONG_S, [[1], [2, 3, 4, 5]])]
)
def test_the_first_goes_at_once_and_the_rest_together(
    hold_s: float, expected: list[list[int]]
) -> None:
    chunks = asyncio.run(_collect(_steps(), hold_s))
    assert [chunk.ids for chunk in chunks] == expected
    assert [chunk.logprobs for chunk in chunks] == [_logprobs(ids) for ids in expected]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_chunks_without_log_probabilities_stay_so() -> None:
    chunks = asyncio.run(_collect(_steps(logged=False), LONG_S))
    assert chunks[1] == TokenChunk([2, 3, 4, 5], {"type": "length"}, None)


def test_what_is_held_goes_out_though_nothing_more_comes() -> None:
    async def stalled(more: asyncio.Event) -> AsyncIterator[TokenChunk]:
        yield TokenChunk([1])
        await more.wait()
        yield TokenChunk([2])
        await asyncio.Event().wait()

    async def first_two() -> list[TokenChunk]:
        more = asyncio.Event()
        chunks = paced(stalled(more), 0.01)
        found = [await anext(chunks)]
        more.set()
        found.append(await anext(chunks))
        await chunks.aclose()
        return found

    found = asyncio.run(asyncio.wait_for(first_two(), LONG_S))
    assert [chunk.ids for chunk in found] == [[1], [2]]


def test_an_error_comes_after_the_tokens_before_it() -> None:
    async def broken() -> AsyncIterator[TokenChunk]:
        yield TokenChunk([1])
        yield TokenChunk([2])
        raise RuntimeError("lost")

    ids: list[int] = []

    async def follow() -> None:
        async for chunk in paced(broken(), LONG_S):
            ids.extend(chunk.ids)

    with pytest.raises(RuntimeError, match="lost"):
        asyncio.run(follow())
    assert ids == [1, 2]


def test_closing_ends_the_source() -> None:
    ended = []

    async def endless() -> AsyncIterator[TokenChunk]:
        try:
            while True:
                await asyncio.sleep(0)
                yield TokenChunk([1])
        finally:
            ended.append(True)

    async def follow() -> None:
        chunks = paced(endless(), LONG_S)
        await anext(chunks)
        await chunks.aclose()
        assert ended, "the source runs on"

    asyncio.run(follow())


def test_many_streams_send_no_more_messages_than_few() -> None:
    assert stream_hold_s(1) == 0.005
    assert 32 / stream_hold_s(32) == pytest.approx(1500.0)
    assert stream_hold_s(10_000) == 0.05
