"""Load for two servers that are compared: streamed completions over plain sockets.

Lean on purpose: the client shares the cores with what it measures, and looks into two events of a
stream only, the first one and the one with the usage.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

READ_BYTES = 1 << 16
ANSWER_S = 300.0


@dataclass(frozen=True)
class Timed:
    """One streamed answer: seconds to its first event and to its end, tokens, events."""

    first_s: float
    whole_s: float
    tokens: int
    events: int


async def stream(port: int, body: dict[str, Any]) -> Timed:
    """One completion, on a connection of its own.

    Raises:
        RuntimeError: the answer is not 200 or has no usage.
    """
    begun = time.perf_counter()
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            payload = json.dumps(body).encode()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload)
            )
            writer.write(payload)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{head!r} {await reader.read()!r}")
            pieces, first_s = [], 0.0
            while piece := await reader.read(READ_BYTES):
                if not first_s and b"data:" in piece:
                    first_s = time.perf_counter() - begun
                pieces.append(piece)
        finally:
            writer.close()
    whole_s = time.perf_counter() - begun
    said = b"".join(pieces)
    return Timed(first_s, whole_s, _tokens(said), said.count(b"data:"))


def _tokens(said: bytes) -> int:
    place = said.rfind(b'"completion_tokens":')
    if place < 0:
        raise RuntimeError(f"a stream without usage: {said[-300:]!r}")
    return int(said[place:].split(b":")[1].split(b",")[0].split(b"}")[0])


async def load(port: int, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Timed]:
    """All of them, so many at a time."""
    waiting = list(reversed(bodies))
    done: list[Timed] = []

    async def worker() -> None:
        while waiting:
            done.append(await stream(port, waiting.pop()))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


async def times_of_get(port: int, path: str, count: int) -> list[float]:
    """Seconds of `count` GETs one after another, each on a connection of its own."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        await reader.read()
        writer.close()
        times.append(time.perf_counter() - begun)
    return times
