"""The HTTP routes. Thin: parse, hand to the service, put its pieces into OpenAI's shapes."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from overstory.orchestrator import openai_errors, openai_responses
from overstory.orchestrator.admin_routes import add_admin_routes
from overstory.orchestrator.answer_parsers import AnswerParser, Parts
from overstory.orchestrator.api_keys import KeyRing
from overstory.orchestrator.http_access import KeyGuard, allow_origins
from overstory.orchestrator.http_layers import BodyGuard, RequestIds
from overstory.orchestrator.meters import TEXT_TYPE, Meters
from overstory.orchestrator.metric_table import GATEWAY
from overstory.orchestrator.openai_documents import (
    ChatAnswer,
    CompletionAnswer,
    ModelAnswer,
    ModelsAnswer,
    StateAnswer,
    documented,
    name_the_model,
)
from overstory.orchestrator.openai_errors import ApiError
from overstory.orchestrator.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from overstory.orchestrator.openai_responses import (
    AnswerReason,
    ChatShape,
    Choice,
    CompletionShape,
    Usage,
)
from overstory.orchestrator.openai_tokens import add_token_routes
from overstory.orchestrator.request_metrics import (
    AnswerCount,
    RequestWatch,
    WatchedRequest,
    set_gauges,
)
from overstory.orchestrator.service import EndpointService, Job, Piece
from overstory.workers.log_context import name_request, named_request

Shape = CompletionShape | ChatShape


class Json(JSONResponse):
    """JSON as `json_bytes` writes it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return openai_responses.json_bytes(content)


class EventStream(StreamingResponse):
    """Server-sent events; `close` is awaited however the stream ends, a vanished client
    included."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. Starlette's own would watch for a client that leaves in a task group of
        its own; `BodyGuard` does."""
        try:
            await self.stream_response(send)
        finally:
            await self._close()


def build_http_app(
    service: EndpointService,
    max_body_bytes: int,
    keys: KeyRing | None = None,
    cors_origins: Sequence[str] = (),
    meters: Meters | None = None,
    proxied: bool = False,
) -> FastAPI:
    """The endpoint as an ASGI application.

    Args: keys: who may ask; None for everybody. cors_origins: whose web pages may ask. meters:
        of `metric_table.GATEWAY`; unset: of this application alone. proxied: behind Serve's proxy.
    """
    meters = meters or Meters(GATEWAY, service.served_name, through_ray=False)
    app = FastAPI(
        title="Overstory", description="OpenAI-compatible endpoint", default_response_class=Json
    )
    _add_error_handlers(app)
    _add_state_routes(app, service)
    _add_generation_routes(app, service, meters)
    _add_metrics_route(app, service, meters)
    add_token_routes(app, service, Json)
    add_admin_routes(app, service, keys, Json)
    _describe(app, service.served_name)
    app.add_middleware(
        BodyGuard, max_bytes=max_body_bytes, timeout_s=service.limits.request_timeout_s
    )
    app.add_middleware(KeyGuard, ring=keys)
    if cors_origins:
        app.add_middleware(allow_origins, origins=cors_origins)
    app.add_middleware(AnswerCount, meters=meters)
    app.add_middleware(RequestIds, proxied=proxied)
    return app


def _describe(app: FastAPI, model: str) -> None:
    """Has `/openapi.json` say which model can be asked for."""
    made = app.openapi

    def described() -> dict[str, Any]:
        return name_the_model(made(), model)

    app.openapi = described  # type: ignore[method-assign]


def _add_error_handlers(app: FastAPI) -> None:
    async def api_error(_: Request, error: Any) -> Response:
        return _error(error)

    async def invalid(_: Request, error: Any) -> Response:
        return _error(openai_errors.from_validation(error.errors()))

    async def http_error(request: Request, error: Any) -> Response:
        if error.status_code == 400 and error.__cause__ is not None:  # FastAPI read the body.
            return _error(openai_errors.invalid_json(str(error.__cause__)))
        detail = f"{request.method} {request.url.path}: {error.detail}"
        return _error(ApiError(error.status_code, detail, headers=error.headers))

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)


def _add_state_routes(app: FastAPI, service: EndpointService) -> None:
    created = int(time.time())

    @app.get("/health", **documented(StateAnswer))
    async def health() -> Response:
        """The endpoint is alive; that says nothing of the replicas."""
        return Json({"status": "alive"})

    @app.get("/ready", **documented(StateAnswer))
    async def ready() -> Response:
        """A generation through the whole path has succeeded and nothing has cast doubt on it
        since."""
        if not service.readiness.ready:
            raise openai_errors.unavailable(f"Not ready: {service.readiness.reason}", "not_ready")
        return Json({"status": "ready"})

    @app.get("/v1/models", **documented(ModelsAnswer))
    async def list_models() -> Response:
        """The one model that is served."""
        context = service.limits.context_tokens
        return Json(openai_responses.models(service.served_name, created, context))

    @app.get("/v1/models/{name:path}", **documented(ModelAnswer))
    async def get_model(name: str) -> Response:
        """That model by name."""
        if name != service.served_name:
            raise openai_errors.model_not_found(name, service.served_name)
        return Json(openai_responses.model(name, created, service.limits.context_tokens))


def _add_metrics_route(app: FastAPI, service: EndpointService, meters: Meters) -> None:
    @app.get("/metrics", **documented(None, text="Prometheus text"))
    async def metrics() -> Response:
        """This gateway's metrics, as Prometheus reads them."""
        set_gauges(meters, service)
        return Response(meters.text(), media_type=TEXT_TYPE)


def _add_generation_routes(app: FastAPI, service: EndpointService, meters: Meters) -> None:
    @app.post("/v1/completions", **documented(CompletionAnswer, streamed=True))
    async def completions(body: CompletionRequest) -> Response:
        """Complete prompts."""
        watch = RequestWatch(meters, "completions", time.monotonic, body.stream)
        with watch.until_admitted():
            job = await service.plan_completion(body)
        return await _answer(service, job, body, CompletionShape, watch)

    @app.post("/v1/chat/completions", **documented(ChatAnswer, streamed=True))
    async def chat_completions(body: ChatCompletionRequest) -> Response:
        """Answer a conversation."""
        watch = RequestWatch(meters, "chat", time.monotonic, body.stream)
        with watch.until_admitted():
            job = await service.plan_chat(body)
        return await _answer(service, job, body, ChatShape, watch)


async def _answer(
    service: EndpointService,
    job: Job,
    body: GenerationRequest,
    shape_of: Callable[[str, str, int], Shape],
    watch: RequestWatch,
) -> Response:
    request_id = uuid.uuid4().hex
    name_request(f"{named_request()} {request_id}".lstrip())
    shape = shape_of(request_id, service.served_name, int(time.time()))
    asked_s = time.monotonic()
    with watch.until_admitted():
        running = WatchedRequest(await service.open(job, request_id, body.stream), watch)
    watch.admitted(time.monotonic() - asked_s)
    if body.stream:
        return await _stream(running, job, body, shape)
    try:
        return Json(await _whole(running, job, shape))
    finally:
        await running.aclose()


async def _whole(running: WatchedRequest, job: Job, shape: Shape) -> dict[str, Any]:
    texts = [[prefix] for prefix in job.prefixes] or [[] for _ in job.plans]
    tokens: dict[int, list[openai_responses.LoggedToken]] = {}
    reasons: dict[int, openai_responses.FinishReason] = {}
    async for piece in running.pieces():
        texts[piece.index].append(piece.text)
        if piece.tokens is not None:
            tokens.setdefault(piece.index, []).extend(piece.tokens)
        if piece.finish_reason is not None:
            reasons[piece.index] = piece.finish_reason
    choices = [
        _choice(job, "".join(text), reasons[index], tokens.get(index))
        for index, text in enumerate(texts)
    ]
    return shape.whole(choices, running.usage)


def _choice(
    job: Job, text: str, reason: openai_responses.FinishReason, tokens: openai_responses.Logged
) -> Choice:
    if job.parser is None:
        return Choice(text, reason, tokens)
    parser = job.parser()
    parts = parser.whole(text)
    ended: AnswerReason = "tool_calls" if parser.called and reason == "stop" else reason
    return Choice(parts.content, ended, tokens, parts.reasoning, parts.calls)


async def _stream(
    running: WatchedRequest, job: Job, body: GenerationRequest, shape: Shape
) -> EventStream:
    """A stream whose first piece is there already: until then an error still has a status of its
    own."""
    pieces = running.pieces()
    try:
        first = await anext(pieces)
    except BaseException:
        await running.aclose()
        raise
    events = _events(first, pieces, running, job, body, shape)
    return EventStream(events, running.aclose)


async def _events(
    first: Piece,
    rest: AsyncIterator[Piece],
    running: WatchedRequest,
    job: Job,
    body: GenerationRequest,
    shape: Shape,
) -> AsyncIterator[bytes]:
    include_usage = body.include_usage
    opened: set[int] = set()
    parsers: dict[int, AnswerParser] = {}
    try:
        async for piece in _chain(first, rest):
            text, usage = piece.text, None
            if body.continuous_usage:
                usage = Usage(len(job.plans[piece.index].prompt_ids), piece.committed)
            if piece.index not in opened:
                opened.add(piece.index)
                if job.parser is not None:
                    parsers[piece.index] = job.parser()
                text = (job.prefixes[piece.index] if job.prefixes else "") + text
                opening = shape.first(piece.index)
                if opening is not None:
                    yield openai_responses.stream_json(opening, usage, include_usage)
            parts, reason = _parts(parsers.get(piece.index), text, piece.finish_reason)
            if parts == Parts() and reason is None and not piece.tokens:
                continue
            chunk = shape.delta(piece.index, parts, reason, piece.tokens)
            yield openai_responses.stream_json(chunk, usage, include_usage)
    except ApiError as error:
        yield openai_responses.error_event(error)
        return
    if include_usage:
        yield openai_responses.sse(shape.usage(running.usage))
    yield openai_responses.DONE


def _parts(
    parser: AnswerParser | None, text: str, reason: openai_responses.FinishReason | None
) -> tuple[Parts, AnswerReason | None]:
    """What a piece of text holds, and the finish reason that this makes of the engine's."""
    if parser is None:
        return Parts(text), reason
    parts = parser.feed(text, last=reason is not None)
    return parts, "tool_calls" if parser.called and reason == "stop" else reason


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


def _error(error: ApiError) -> Response:
    return Json(error.body(), status_code=error.status, headers=error.headers)
