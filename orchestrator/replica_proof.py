"""What a replica generates for nobody before clients may wait for it. Pure.

Whatever a process does for the first time (kernels loaded or compiled, libraries started) holds its
loop up, and with it every stream that it serves by then. Sequences that were cut off elsewhere and
come with their KV are the first of their kind, and several at once: a few rows behind what the
prefix cache has. So a replica proves itself with such ones too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.sampling import Sampling

TOGETHER = 8
"""Requests at a time, at most. The first of them is computed alone, the others as one batch."""
_NEW_TOKENS = 2

Generate = Callable[[GenerateCall], AsyncGenerator[Any, None]]


async def prove(
    generate: Generate, limits: Mapping[str, int], page_size: int, most_running: int | None
) -> None:
    """One request, then several that find its beginning in the prefix cache, greedy and sampled.

    Args:
        generate: as a client's request would be.
        limits: see `replica_setup.engine_limits`.
        page_size: of the KV pool: less than a page of a prompt is not found again.
        most_running: requests that the engine runs at a time; None for its own choice.

    Raises:
        Whatever `generate` raises.
    """
    longest = min(limits["prompt_tokens"], limits["context_tokens"] - _NEW_TOKENS)
    prompt = (0,) * max(1, min(page_size + 1, longest))
    await _generated(generate, prompt, 0)
    together = min(TOGETHER, most_running or TOGETHER)
    await asyncio.gather(*(_generated(generate, prompt, n) for n in range(together)))


async def _generated(generate: Generate, prompt: tuple[int, ...], number: int) -> None:
    sampling = Sampling(
        seed=number, max_new_tokens=_NEW_TOKENS, temperature=1.0 if number % 2 else 0.0
    )
    call = GenerateCall(f"proof-{uuid.uuid4().hex}", prompt, sampling)
    async with aclosing(generate(call)) as chunks:
        async for _ in chunks:
            pass
