"""What a replica would cut short it refuses: SGLang shortens `max_new_tokens` in silence."""

import asyncio
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overstory.orchestrator.engine_errors import RequestRefused
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.replica import Replica
from overstory.orchestrator.replica_setup import engine_limits, refuse_beyond
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


@given(
    page=st.sampled_from([1, 16, 64]),
    pages=st.integers(4, 40),
    context=st.integers(10, 3000),
    share=st.floats(0, 1),
)
def test_what_is_promised_is_not_clipped(page: int, pages: int, context: int, share: float) -> None:
    """By SGLang's own bounds (`Scheduler.init_req_max_new_tokens` and what it is made from); the
    context's, and for single slots the pool's, are promised to the last token."""
    total = page * max(pages, 12)
    longest = min(context - 1, total - 1)
    limits = engine_limits({"max_req_input_len": longest - 5, "max_total_num_tokens": total}, page)
    prompt = 1 + int(share * (limits["prompt_tokens"] - 1))
    asked = limits["context_tokens"] - prompt
    paged = -(-prompt // page) * page
    given_tokens = min(longest - prompt - 1, total - paged - page - 1)
    assert asked <= given_tokens
    assert page > 1 or asked == given_tokens
