"""One client's connection: uvicorn's HTTP/1.1 protocol with bounds on what a client may hold.

uvicorn by itself waits for ever for a request's head, takes heads of any size, keeps a client that
no longer reads, and loses the body of a request that offers an upgrade. Its own answers are plain
text; here they are errors in OpenAI's shape with an `x-request-id`, as all others.
"""

import asyncio
import contextlib
import uuid
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from overstory.orchestrator import openai_errors, openai_responses
from overstory.orchestrator.openai_errors import ApiError

_LINGER_S = 1.0
"""How long a client that was refused may go on sending before the connection is closed: closed at
once, its system would throw the answer away with what it has sent."""

_OFFERS = {b"upgrade", b"http2-settings"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client may hold.

    Attributes:
        head_bytes: request line and headers together.
        head_s: for a whole head, from its first byte.
        idle_s: for its first byte.
        stalled_s: a client that takes nothing of its answer for so long is gone.
        connections: at a time, of all clients.
    """

    head_bytes: int = 64 * 2**10
    head_s: float = 20.0
    idle_s: float = 75.0
    stalled_s: float = 60.0
    connections: int = 10_000


class GuardedProtocol(HttpToolsProtocol):
    """A connection within `limits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._refused = False
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(openai_errors.unavailable("Too many connections", "too_many_connections"))
        else:
            self._await_head(self._limits.idle_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio."""
        self._stop_head_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio."""
        if self._over():
            return
        self._unset_keepalive_if_required()
        rest: bytes | None = data
        while rest is not None:
            rest = self._feed(rest)
        if self._over():
            return
        if self._in_head:
            self._head_bytes += len(data)
            self._judge_head(self._head_bytes)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head(self._limits.head_s)

    def pause_writing(self) -> None:
        """asyncio."""
        super().pause_writing()
        self._look_for_progress(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """asyncio."""
        self._stop_stall_timer()
        super().resume_writing()

    # ------------------------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        """httptools."""
        self._in_head, self._head_bytes = True, 0
        self._stop_head_timer()  # That of the connection's first byte.
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """httptools."""
        self._in_head = False
        self._stop_head_timer()
        if self.parser.should_upgrade():  # It begins once more, without the offer.
            return
        self._judge_head(len(self.url) + sum(len(n) + len(value) for n, value in self.headers))
        if not self._over():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """httptools."""
        if not self._over():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """httptools."""
        if not self.parser.should_upgrade() and not self._over():
            super().on_message_complete()

    # ------------------------------------------------------------------ inside

    def _feed(self, data: bytes) -> bytes | None:
        """Parses; gives what is to be parsed in place of a request that offers an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            return self._without_offer(data[offered.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(openai_errors.bad_http(str(error)))
        return None

    def _without_offer(self, rest: bytes) -> bytes | None:
        """The request as if it had offered no upgrade, which a server may ignore. Java's client
        offers h2c with every request, and httptools takes the body for the other protocol's."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(openai_errors.bad_http("CONNECT is for proxies"))
            return None
        head = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                kept = (part.strip() for part in value.split(b","))
                value = b", ".join(part for part in kept if part.lower() not in _OFFERS)
            if name not in _OFFERS:
                head.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's own.
        return b"\r\n".join(head) + b"\r\n\r\n" + rest

    def _await_head(self, limit_s: float) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(limit_s, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(openai_errors.too_slow(f"no whole head in {self._limits.head_s:g} s"))
        else:  # It has asked nothing: there is nothing to answer.
            self.transport.close()

    def _judge_head(self, size: int) -> None:
        if size > self._limits.head_bytes:
            self._refuse(openai_errors.head_too_large(self._limits.head_bytes))

    def _look_for_progress(self, unsent: int) -> None:
        """Drops a client of whose unsent bytes none has gone when the time is over."""

        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unsent:
                self._look_for_progress(left)
            else:
                self.transport.abort()

        self._stall_timer = self.loop.call_later(self._limits.stalled_s, look)

    def _over(self) -> bool:
        """Whether nothing that still comes counts."""
        return self._refused or self.transport.is_closing()

    def _refuse(self, error: ApiError) -> None:
        """Answers in place of the application and closes. Where an answer has begun, which this
        one would corrupt, it only closes."""
        if self._over():
            return
        self._refused = True
        cycle = self.cycle if self.cycle is not None and not self.cycle.response_complete else None
        if cycle is not None:  # The application has nobody to answer any more.
            cycle.disconnected = True
            cycle.message_event.set()
        if self.pipeline or (cycle is not None and cycle.response_started):
            self.transport.close()
            return
        self.transport.write(_answer(error, self.server_state.default_headers))
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # It may be gone already.
                self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def _answer(error: ApiError, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    body = openai_responses.json_bytes(error.body())
    headers = [
        *default_headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        (b"connection", b"close"),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return STATUS_LINE[error.status] + lines + b"\r\n" + body
