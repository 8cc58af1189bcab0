"""The gateway's end of token lines: replicas deliver tokens here, past Serve's streaming calls.

Serve's call of the replica stays what it is, the request's life: it carries the request there,
errors back, and cancellation; it ends when the request does, and breaks when the replica is lost.
Only the tokens take the shorter way: a chunk through Serve costs both processes 1 to 2 ms of CPU, a
frame on a line less than a tenth of that. A replica that cannot reach the gateway's port yields its
chunks to Serve instead, and both ways end in the same `Inbox`.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Iterator
from typing import cast

from overstory.orchestrator.backend import ReplicaLost, TokenChunk
from overstory.orchestrator.journal import SinkAddress
from overstory.orchestrator.listening import listening, notice_silence
from overstory.orchestrator.token_wire import SECRET_BYTES, BadLine, Frame, LineReader

logger = logging.getLogger(__name__)

GREETING_S = 10.0
"""How long a connection may stay open without the secret."""

MOST_LINES = 256
"""Connections at a time; a replica has one. Whoever else comes finds the port closed, so that no
stranger takes the files that the gateway needs for clients."""

FLUSH_S = 12.0
"""How long the last frames may take after Serve's call has ended: until a line on which nothing
comes through any more has broken (`notice_silence`), so that the next call gets another."""


class Inbox:
    """What comes for one call, from a line or from Serve."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[TokenChunk | BaseException] = asyncio.Queue()
        self._frames = 0
        self._line: object = None
        self.finished = asyncio.Event()
        """The last chunk is here, or what ended the call instead."""

    def take(self, frame: Frame, line: object = None) -> None:
        """A frame of a line. One that is missing ends the call: its tokens are lost."""
        self._line = line
        if frame.number != self._frames:
            self.end(ReplicaLost(f"frame {frame.number} of its tokens came for {self._frames}"))
            return
        self._frames += 1
        self.put(frame.chunk())

    def broken(self, line: object) -> None:
        """A line has broken: where it was this call's, frames may be lost with it."""
        if self._line is line:
            self.end(ReplicaLost("the line on which its tokens came has broken"))

    def put(self, chunk: TokenChunk) -> None:
        """Tokens, in order."""
        if self.finished.is_set():
            return
        self._items.put_nowait(chunk)
        if chunk.finish is not None:
            self.finished.set()

    def end(self, error: BaseException) -> None:
        """What ends the call, after the tokens that are here; nothing where it has ended."""
        if not self.finished.is_set():
            self._items.put_nowait(error)
            self.finished.set()

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Chunks up to one with a finish reason. Raises what ends the call instead."""
        while True:
            item = await self._items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
            if item.finish is not None:
                return


class TokenSink:
    """Takes lines at one port. Belongs to one event loop; without `open` it expects everything
    from Serve."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._inboxes: dict[str, Inbox] = {}
        self._lines: set[asyncio.Transport] = set()
        self._server: asyncio.Server | None = None
        self.address: SinkAddress | None = None

    async def open(self, host: str, port: int = 0) -> None:
        """Listens on an address that replicas reach; port 0 draws a free one.

        Raises:
            CannotListen: as `listening`.
        """
        loop = asyncio.get_running_loop()
        taken = await asyncio.to_thread(listening, host, port, "gateway.token_port")
        self._server = await loop.create_server(lambda: _Line(self), sock=taken)
        drawn = taken.getsockname()[1]
        self.address = SinkAddress(host, drawn, self._secret)

    def close(self) -> None:
        """Takes nothing more."""
        self.address = None
        if self._server is not None:
            self._server.close()
        for line in tuple(self._lines):
            line.abort()

    @contextlib.contextmanager
    def expecting(self, rid: str) -> Iterator[Inbox]:
        """The inbox of a call while the block runs; frames that come later are dropped."""
        inbox = self._inboxes[rid] = Inbox()
        try:
            yield inbox
        finally:
            del self._inboxes[rid]

    def _came(self, frame: Frame, line: object = None) -> None:
        inbox = self._inboxes.get(frame.rid)
        if inbox is not None:
            inbox.take(frame, line)

    def _broke(self, line: object) -> None:
        for inbox in self._inboxes.values():
            inbox.broken(line)


class _Line(asyncio.Protocol):
    """One connection of a replica."""

    def __init__(self, sink: TokenSink) -> None:
        self._sink = sink
        self._reader = LineReader(sink._secret)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        if len(self._sink._lines) >= MOST_LINES:
            self._transport.abort()
            return
        self._sink._lines.add(self._transport)
        notice_silence(transport)
        asyncio.get_running_loop().call_later(GREETING_S, self._greeted_or_gone)

    def _greeted_or_gone(self) -> None:
        if not self._reader.greeted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        try:
            frames = self._reader.feed(data)
        except BadLine as error:
            logger.warning("a token line is closed: %s", error)
            self._transport.abort()
            return
        for frame in frames:
            self._sink._came(frame, self)

    def connection_lost(self, _: Exception | None) -> None:
        """asyncio."""
        self._sink._lines.discard(self._transport)
        self._sink._broke(self)
