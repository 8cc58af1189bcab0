import asyncio
from collections.abc import AsyncIterator

import pytest

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs
from overstory.orchestrator.generation import held_together


def _logprobs(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-0.5 * token, ((token, -0.5 * token),)) for token in ids]


@pytest.mark.parametrize(
    ("hold_s", "expected"),
    [
        (0.0, [[1], [2], [3], [4, 5]]),
        (2.0, [[1, 2], [3, 4, 5]]),
        (99.0, [[1, 2, 3, 4, 5]]),
    ],
)
def test_tokens_held_together_are_the_same_tokens(hold_s: float, expected: list[list[int]]) -> None:
    now = 0.0

    async def steps() -> AsyncIterator[TokenChunk]:
        nonlocal now
        for ids in ([1], [2], [3]):
            now += 1.0
            yield TokenChunk(ids, None, _logprobs(ids))
        now += 1.0
        yield TokenChunk([4, 5], {"type": "length"}, _logprobs([4, 5]))

    async def collect() -> list[TokenChunk]:
        return [chunk async for chunk in held_together(steps(), hold_s, lambda: now)]

    chunks = asyncio.run(collect())
    assert [chunk.ids for chunk in chunks] == expected
    assert [chunk.logprobs for chunk in chunks] == [_logprobs(ids) for ids in expected]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_chunks_without_log_probabilities_stay_so() -> None:
    async def steps() -> AsyncIterator[TokenChunk]:
        yield TokenChunk([1])
        yield TokenChunk([2], {"type": "length"})

    async def collect() -> list[TokenChunk]:
        return [chunk async for chunk in held_together(steps(), 9.0, lambda: 0.0)]

    assert asyncio.run(collect()) == [TokenChunk([1, 2], {"type": "length"}, None)]
