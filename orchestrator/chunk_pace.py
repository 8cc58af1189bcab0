"""Fewer, larger chunks of tokens: each message from replica to gateway to client costs the same,
however much is in it, and a small model makes a thousand steps a second.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from overstory.orchestrator.backend import TokenChunk, TokenLogprobs


class _Held:
    """Tokens that came and have not gone out."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._finish: dict[str, object] | None = None
        self._logprobs: list[TokenLogprobs] | None = None
        self._any = False

    def add(self, chunk: TokenChunk) -> None:
        """Behind those that are held."""
        self._ids += chunk.ids
        if chunk.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *chunk.logprobs]
        self._finish, self._any = chunk.finish, True

    def take(self) -> TokenChunk | None:
        """All of them; None if there is nothing, not even an end."""
        if not self._any:
            return None
        taken = TokenChunk(self._ids, self._finish, self._logprobs)
        self.__init__()  # type: ignore[misc]
        return taken


async def paced(
    chunks: AsyncIterator[TokenChunk], hold_s: float
) -> AsyncGenerator[TokenChunk, None]:
    """The same tokens, in chunks that are `hold_s` apart at least, but for the first and the last.

    The first chunk goes out at once, the last with the end; none waits longer than `hold_s`, also
    where the engine comes to a halt. An error comes after the tokens before it.
    """
    if not hold_s:
        async for chunk in chunks:
            yield chunk
        return
    loop = asyncio.get_running_loop()
    held, wake = _Held(), asyncio.Event()
    timer: asyncio.TimerHandle | None = None
    next_s = 0.0

    async def gather() -> None:
        nonlocal timer
        async for chunk in chunks:
            held.add(chunk)
            if chunk.finish is not None or loop.time() >= next_s:
                wake.set()
            elif timer is None:
                timer = loop.call_at(next_s, wake.set)

    gathering = loop.create_task(gather())
    gathering.add_done_callback(lambda _: wake.set())
    try:
        while True:
            await wake.wait()
            wake.clear()
            if timer is not None:
                timer.cancel()
                timer = None
            ended = gathering.done()
            taken = held.take()
            if taken is not None:
                next_s = loop.time() + hold_s
                yield taken
            if ended:
                gathering.result()
                return
    finally:
        if timer is not None:
            timer.cancel()
        if not gathering.done():
            gathering.cancel()
            await asyncio.wait((gathering,))
