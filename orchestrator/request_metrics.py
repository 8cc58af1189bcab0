"""What a gateway measures of its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overstory.orchestrator.generation import Piece
from overstory.orchestrator.meters import Meters
from overstory.orchestrator.openai_errors import ApiError
from overstory.orchestrator.openai_responses import Usage
from overstory.orchestrator.service import EndpointService, RunningRequest

GAUGES_EVERY_S = 5.0


class RequestWatch:
    """One request to generate, from its arrival to its end."""

    def __init__(
        self, meters: Meters, endpoint: str, clock: Callable[[], float], streamed: bool
    ) -> None:
        self._meters = meters
        self._endpoint = endpoint
        self._clock = clock
        self._streamed = streamed
        self._arrived_s = clock()
        self._first_s: float | None = None
        self._first_tokens = 0
        self._last_s: dict[int, float] = {}
        self._ended = False

    @contextmanager
    def until_admitted(self) -> Iterator[None]:
        """Around all that comes before the engine; an error ends the request."""
        try:
            yield
        except ApiError as error:
            self.ended(error.code or str(error.status), Usage(0, 0))
            raise
        except BaseException:
            self.ended("aborted", Usage(0, 0))
            raise

    def admitted(self, queued_s: float) -> None:
        """It has its place, after a wait."""
        self._meters.observe("queue_seconds", queued_s)

    def piece(self, piece: Piece, usage: Usage) -> None:
        """A piece of an answer came; `usage` includes it."""
        now = self._clock()
        if self._first_s is None:
            self._first_s, self._first_tokens = now, usage.completion_tokens
            waited = now - self._arrived_s
            self._meters.observe("time_to_first_token_seconds", waited, endpoint=self._endpoint)
        elif self._streamed and piece.index in self._last_s:
            since = now - self._last_s[piece.index]
            self._meters.observe("inter_chunk_seconds", since, endpoint=self._endpoint)
        self._last_s[piece.index] = now

    def ended(self, outcome: str, usage: Usage) -> None:
        """It is over; only the first word counts."""
        if self._ended:
            return
        self._ended = True
        now, labels = self._clock(), {"endpoint": self._endpoint}
        self._meters.add("requests", 1, outcome=outcome, **labels)
        self._meters.add("prompt_tokens", usage.prompt_tokens, **labels)
        self._meters.add("generated_tokens", usage.completion_tokens, **labels)
        self._meters.observe("request_seconds", now - self._arrived_s, **labels)
        further = usage.completion_tokens - self._first_tokens
        if self._first_s is not None and further > 0:
            each = (now - self._first_s) / further
            self._meters.observe("time_per_output_token_seconds", each, **labels)


class WatchedRequest:
    """A running request whose pieces and end are measured; used as `RunningRequest` is."""

    def __init__(self, running: RunningRequest, watch: RequestWatch) -> None:
        self._running = running
        self._watch = watch

    @property
    def usage(self) -> Usage:
        """See `RunningRequest.usage`."""
        return self._running.usage

    async def pieces(self) -> AsyncIterator[Piece]:
        """See `RunningRequest.pieces`."""
        try:
            async for piece in self._running.pieces():
                self._watch.piece(piece, self.usage)
                yield piece
            self._watch.ended("ok", self.usage)
        except ApiError as error:
            self._watch.ended(error.code or str(error.status), self.usage)
            raise

    async def aclose(self) -> None:
        """See `RunningRequest.aclose`; one that has not ended by now was left by its client."""
        try:
            await self._running.aclose()
        finally:
            self._watch.ended("aborted", self.usage)


class AnswerCount:
    """Counts HTTP answers by status, as an ASGI layer."""

    def __init__(self, app: ASGIApp, meters: Meters) -> None:
        self._app = app
        self._meters = meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._meters.add("http_answers", status=str(message["status"]))
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def set_gauges(meters: Meters, service: EndpointService) -> None:
    """What holds at this moment."""
    meters.set("sequences_running", service.admission.running)
    meters.set("sequences_limit", service.admission.max_concurrent)
    meters.set("requests_queued", service.admission.queued)
    meters.set("ready", float(service.readiness.ready))


async def keep_gauges(meters: Meters, service: EndpointService) -> None:
    """Sets them again and again, for Ray, which is not asked before it exports."""
    while True:
        set_gauges(meters, service)
        await asyncio.sleep(GAUGES_EVERY_S)
