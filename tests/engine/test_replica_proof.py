"""What a replica generates for nobody is what sequences that come with their KV are: a few rows
behind what the prefix cache has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import policy, server_args

from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.replica_proof import FEW_ROWS, TOGETHER, prove
from overstory.orchestrator.replica_setup import engine_limits

if TYPE_CHECKING:
    from harness import EngineHarness

Engine = Callable[..., "EngineHarness"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_few_rows_and_several_at_once_behind_a_cached_prefix(
    engine: Engine, pair: tuple[str, str], page_size: int
) -> None:
    harness = engine(
        max_running_requests=16, page_size=page_size, context_length=256, **server_args(pair[1])
    )
    extends: list[tuple[list[int], list[int]]] = []
    run_batch = harness.scheduler.run_batch

    def noted(batch: Any, *rest: Any) -> Any:
        if batch.forward_mode.is_extend():
            extends.append((list(batch.prefix_lens), list(batch.extend_lens)))
        return run_batch(batch, *rest)

    async def generate(call: GenerateCall) -> AsyncGenerator[list[int], None]:
        rid = harness.submit(list(call.input_ids), call.sampling.engine_params(), rid=call.rid)
        await asyncio.sleep(0)  # Those beside it come first.
        while not harness.outputs[rid].done:
            harness.step()
        yield harness.outputs[rid].ids

    harness.scheduler.run_batch = noted
    limits = engine_limits(harness.scheduler.get_init_info(), page_size)
    try:
        with policy("tree-7"):
            asyncio.run(prove(generate, limits, page_size, None, compiles=True))
    finally:
        harness.scheduler.run_batch = run_batch
    assert extends == [
        ([0], [page_size + 1]),
        *(([page_size], [rows]) for rows in range(1, FEW_ROWS + 1)),
        ([page_size] * TOGETHER, [1] * TOGETHER),
    ]
    harness.assert_no_leak()
