"""A replica's end of token lines; see `token_sink` for what they are."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

from overstory.orchestrator.backend import TokenChunk
from overstory.orchestrator.journal import GenerateCall, SinkAddress
from overstory.orchestrator.listening import notice_silence
from overstory.orchestrator.token_wire import encoded

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
RETRY_S = 30.0


class LineLost(ConnectionError):
    """The line broke while a call sent on it: what was on its way may not have come."""


class _Line(asyncio.Protocol):
    """One connection to a gateway. What is sent within one turn of the loop goes as one write."""

    def __init__(self) -> None:
        self.open = False
        self._transport: asyncio.Transport | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._gathered: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        notice_silence(transport)
        self.open = True

    def connection_lost(self, _: Exception | None) -> None:
        self.open = False
        self._room.set()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def write(self, data: bytes) -> None:
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append(data)

    def _flush(self) -> None:
        data, self._gathered = b"".join(self._gathered), []
        if self.open and self._transport is not None:
            self._transport.write(data)

    async def send(self, data: bytes) -> None:
        """Raises `LineLost`. Waits while the gateway is behind."""
        if not self._room.is_set():
            await self._room.wait()
        if not self.open:
            raise LineLost("the line to the gateway broke")
        self.write(data)


class TokenLines:
    """Lines of one replica, one to each gateway. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lines: dict[SinkAddress, asyncio.Task[_Line | None]] = {}

    async def deliver(
        self, chunks: AsyncIterator[TokenChunk], call: GenerateCall
    ) -> AsyncGenerator[TokenChunk, None]:
        """Sends the chunks along the line of the call; yields them where there is none, for Serve
        to carry.

        Raises:
            LineLost: the line broke under the call, which cannot go on: tokens may be missing.
        """
        line = None if call.sink is None else await self._line(call.sink)
        if line is None:
            async for chunk in chunks:
                yield chunk
            return
        number = 0
        async for chunk in chunks:
            await line.send(encoded(call.rid, number, chunk))
            number += 1

    async def _line(self, address: SinkAddress) -> _Line | None:
        known = self._lines.get(address)
        if known is None or (known.done() and not _usable(known)):
            known = self._lines[address] = asyncio.create_task(_connected(address))
        line = await asyncio.shield(known)
        if line is None and self._lines.get(address) is known:
            # Not asked again by each call: to a port that drops packets that would take seconds.
            asyncio.get_running_loop().call_later(RETRY_S, self._forget, address, known)
        return line

    def _forget(self, address: SinkAddress, failed: "asyncio.Task[_Line | None]") -> None:
        if self._lines.get(address) is failed:
            del self._lines[address]


def _usable(connecting: "asyncio.Task[_Line | None]") -> bool:
    """Whether it is still open, or not to be tried again for now."""
    line = connecting.result()
    return line is None or line.open


async def _connected(address: SinkAddress) -> _Line | None:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, line = await loop.create_connection(_Line, address.host, address.port)
    except (OSError, TimeoutError) as error:
        logger.warning(
            "tokens go through Serve, at a higher cost: the gateway's port for them, %s:%d, cannot "
            "be reached from here (%s); gateway.token_port sets one that a firewall can let pass",
            address.host,
            address.port,
            error or "time-out",
        )
        return None
    line.write(address.secret)
    return line
