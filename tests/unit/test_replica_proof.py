"""What a replica generates before clients wait for it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.replica_proof import FEW_ROWS, TOGETHER, prove

LIMITS = {"prompt_tokens": 100, "context_tokens": 105}


class Engine:
    """Keeps every request until all that are there have come."""

    def __init__(self, awaited: list[int]) -> None:
        self.calls: list[GenerateCall] = []
        self.running = self.most = 0
        self._awaited = awaited
        self._all = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Any, None]:
        self.calls.append(call)
        self.running += 1
        self.most = max(self.most, self.running)
        everybody = self._all
        if self.running == self._awaited[0]:
            everybody.set()
            self._awaited.pop(0)
            self._all = asyncio.Event()
        await everybody.wait()
        self.running -= 1
        yield [7]


def proof(
    page_size: int = 1,
    most_running: int | None = None,
    limits: dict[str, int] = LIMITS,
    compiles: bool = False,
) -> Engine:
    together = min(TOGETHER, most_running or TOGETHER)

    async def whole() -> Engine:
        alone = min(FEW_ROWS, limits["prompt_tokens"] - page_size) if compiles else 0
        engine = Engine([1, *[1] * alone, together])
        async with asyncio.timeout(20):
            await prove(engine.generate, limits, page_size, most_running, compiles)
        return engine

    return asyncio.run(whole())


def test_one_and_then_several_at_once_that_begin_alike() -> None:
    engine = proof()
    assert (len(engine.calls), engine.most) == (1 + TOGETHER, TOGETHER)
    assert {call.input_ids for call in engine.calls} == {(0, 0)}
    assert {call.sampling.temperature for call in engine.calls[1:]} == {0.0, 1.0}
    assert len({call.rid for call in engine.calls}) == 1 + TOGETHER


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_whole_page_is_found_again_and_a_row_is_left(page_size: int) -> None:
    assert {len(call.input_ids) for call in proof(page_size).calls} == {page_size + 1}


@pytest.mark.parametrize(("page_size", "most"), [(1, FEW_ROWS), (16, FEW_ROWS), (94, 6)])
def test_where_kernels_are_compiled_every_small_number_of_rows(page_size: int, most: int) -> None:
    """Each behind the page, and none behind more: none begins as another one goes on."""
    texts = [call.input_ids for call in proof(page_size, compiles=True).calls]
    page = (0,) * page_size
    few = texts[1 : 1 + most]
    assert all(text[:page_size] == page for text in texts)
    assert [len(text) - page_size for text in few] == list(range(1, most + 1))
    assert len({text[page_size] for text in [texts[0], *few]}) == 1 + most
    assert len(texts) == 1 + most + TOGETHER


def test_no_more_than_the_engine_runs_or_takes() -> None:
    assert len(proof(most_running=3).calls) == 1 + 3
    assert {
        len(call.input_ids) for call in proof(64, limits=LIMITS | {"prompt_tokens": 9}).calls
    } == {9}
    few = {"prompt_tokens": 9, "context_tokens": 4}
    engine = proof(64, limits=few)
    assert {len(c.input_ids) + c.sampling.max_new_tokens for c in engine.calls} == {4}


def test_what_fails_is_told() -> None:
    async def broken(call: GenerateCall) -> AsyncGenerator[Any, None]:
        if call.sampling.seed == 1:
            raise RuntimeError("no")
        yield [7]

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(prove(broken, LIMITS, 1, 2, False))
