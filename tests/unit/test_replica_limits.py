"""What a replica would cut short it refuses: SGLang shortens `max_new_tokens` in silence."""

import asyncio
import types

import pytest

from overstory.orchestrator.engine_errors import RequestRefused
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.replica import Replica
from overstory.orchestrator.replica_setup import refuse_beyond
from overstory.orchestrator.sampling import Sampling

LIMITS = {"context_tokens": 20, "prompt_tokens": 15}


def call(prompt: int, output: int) -> GenerateCall:
    return GenerateCall("r", tuple(range(prompt)), Sampling(seed=1, max_new_tokens=output))


def test_what_fits_is_taken_and_what_does_not_is_refused_with_the_way_out() -> None:
    refuse_beyond(LIMITS, call(12, 8))
    with pytest.raises(
        RequestRefused, match=r"take 21 tokens, this replica has room for 20 .*max_"
    ):
        refuse_beyond(LIMITS, call(12, 9))


def test_a_replica_looks_before_its_engine_does() -> None:
    replica = object.__new__(Replica)
    replica._limits = LIMITS
    replica._lines = types.SimpleNamespace(deliver=lambda chunks, _: chunks)

    async def ask() -> None:
        async for _ in replica.generate(call(12, 9)):
            pass

    with pytest.raises(RequestRefused, match="room for 20"):
        asyncio.run(ask())
