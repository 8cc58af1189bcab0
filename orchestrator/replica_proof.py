"""What a replica generates for nobody before clients may wait for it. Pure.

Whatever a process does for the first time (kernels loaded or compiled, libraries started) holds its
loop up, and with it every stream that it serves by then. Sequences that were cut off elsewhere and
come with their KV are the first of their kind: a few rows behind what the prefix cache has, several
at once. So a replica proves itself with such ones too.

On a GPU it does so with every small number of rows. Triton compiles a kernel anew for a size that
is no multiple of 16 where the one before was, and SGLang's Triton experts take other tiles for few
rows: with 8 experts, two of them a row, 1 to 4 rows, 5 to 7 and 8 are three such kernels.
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
FEW_ROWS = 16
"""Rows that are tried by number where kernels are compiled."""
_NEW_TOKENS = 2

Generate = Callable[[GenerateCall], AsyncGenerator[Any, None]]


async def prove(
    generate: Generate,
    limits: Mapping[str, int],
    page_size: int,
    most_running: int | None,
    compiles: bool,
) -> None:
    """One request, then some that find its beginning in the prefix cache: one after another with
    one row, two, and so on where kernels are compiled; several at once, greedy and sampled.

    Args:
        generate: as a client's request would be.
        limits: see `replica_setup.engine_limits`.
        page_size: of the KV pool: less than a page of a prompt is not found again.
        most_running: requests that the engine runs at a time; None for its own choice.
        compiles: whether the engine's kernels are compiled for sizes.

    Raises:
        Whatever `generate` raises.
    """
    longest = min(limits["prompt_tokens"], limits["context_tokens"] - _NEW_TOKENS)
    page = (0,) * min(page_size, max(1, longest - 1))
    prompt = (*page, 0)[: max(1, longest)]
    await _generated(generate, prompt, 0)
    if compiles:
        for rows in range(1, min(FEW_ROWS, longest - len(page)) + 1):
            # Of tokens of its own: no other one is found again beyond the page.
            await _generated(generate, page + (rows,) * rows, rows, new_tokens=1)
    together = min(TOGETHER, most_running or TOGETHER)
    await asyncio.gather(*(_generated(generate, prompt, n) for n in range(together)))


async def _generated(
    generate: Generate, prompt: tuple[int, ...], number: int, new_tokens: int = _NEW_TOKENS
) -> None:
    sampling = Sampling(
        seed=number, max_new_tokens=new_tokens, temperature=1.0 if number % 2 else 0.0
    )
    call = GenerateCall(f"proof-{uuid.uuid4().hex}", prompt, sampling)
    async with aclosing(generate(call)) as chunks:
        async for _ in chunks:
            pass
