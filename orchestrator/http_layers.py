"""ASGI layers around the routes. Plain ASGI: a client's disconnect must reach the route as a
cancellation."""

import asyncio
import json
import logging
import math
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overstory.orchestrator import openai_errors, openai_responses
from overstory.orchestrator.openai_errors import ApiError
from overstory.workers.log_context import name_request

logger = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
BODY_PAUSE_S = 30.0
"""Longest that a client may send nothing of a body that it has announced."""

_ENDS = "The endpoint is shutting down"
_LOGGED_CHARS = 64  # of a client's own id
_FIT_FOR_A_HEADER = re.compile(r"[\x21-\x7e]{1,256}")


class RequestIds:
    """Gives each answer an `x-request-id`: the client's own, or a new one where the client has none
    that fits into a header. Being the outermost of our layers, it also answers where they failed
    (500), or were cancelled because the server ends (503).

    `proxied`: behind Serve's proxy, which gives each request one and puts it on the answer itself.
    """

    def __init__(self, app: ASGIApp, proxied: bool = False) -> None:
        self._app = app
        self._proxied = proxied

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = Headers(scope=scope).get(REQUEST_ID, "")
        used = own if _FIT_FOR_A_HEADER.fullmatch(own) else uuid.uuid4().hex
        name_request(f"request {used[:_LOGGED_CHARS]}")
        tags = not (self._proxied and own)
        started = False

        async def tagged(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if tags:
                    MutableHeaders(scope=message)[REQUEST_ID] = used
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except asyncio.CancelledError:
            if not started:
                await send_error(tagged, openai_errors.unavailable(_ENDS, "shutting_down"))
            raise
        except Exception as error:
            if started:  # The server ends the answer short of its end, which tells the client.
                raise
            logger.exception("a request failed")
            await send_error(tagged, openai_errors.internal(f"{type(error).__name__}: {error}"))


class BodyGuard:
    """Reads bodies whole before the routes see them, and cancels a route whose client leaves.

    Answers 413 to one of more than `max_bytes`, by its declared length or while it comes in, 408 to
    one that does not come (in `timeout_s`, or with a pause of `BODY_PAUSE_S`), 415 to a compressed
    one, and 400 to JSON with half a surrogate pair in it: Python reads it, but no UTF-8 can carry
    it, and pydantic raises on it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float = math.inf) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            await send_error(send, error)
            return
        if body is not None:
            await _while_connected(self._app, scope, body, receive, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The whole body; None when the client has left. Raises `ApiError`."""
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise openai_errors.encoded_body(encoding[:64])
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise openai_errors.body_too_large(self._max_bytes)
        parts: list[bytes] = []
        size = 0
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        more = True
        while more:
            try:
                async with asyncio.timeout_at(min(deadline_s, loop.time() + BODY_PAUSE_S)):
                    message = await receive()
            except TimeoutError as error:
                detail = f"its body did not come, {size} bytes of it are here"
                raise openai_errors.too_slow(detail) from error
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise openai_errors.body_too_large(self._max_bytes)
            more = message.get("more_body", False)
        body = b"".join(parts)
        if _has_half_a_pair(body):
            raise openai_errors.invalid("The body holds half a surrogate pair")
        return body


def _has_half_a_pair(body: bytes) -> bool:
    if b"\\ud" not in body and b"\\uD" not in body:
        return False
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False  # not JSON: the routes say so
    return False


async def _while_connected(
    app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """Runs `app` with a body that has been read; cancels it when the client leaves before it has
    the whole answer. Returns then, since there is nobody left to tell."""
    task = asyncio.current_task()
    assert task is not None, "ASGI applications run in tasks"
    answered = gone = False
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def watch() -> Message:
        nonlocal gone
        message = await receive()  # the body is through: only a disconnect can come
        if not answered:
            gone = True
            task.cancel()
        return message

    async def replayed() -> Message:
        return pending.pop() if pending else await asyncio.shield(watching)

    async def answering(message: Message) -> None:
        nonlocal answered
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            answered = True  # Before it is sent: servers then report a disconnect.
        await send(message)

    watching = asyncio.create_task(watch())
    try:
        await app(scope, replayed, answering)
    except asyncio.CancelledError:
        if not gone or task.uncancel():  # Somebody else's cancellation, or theirs as well.
            raise
    finally:
        watching.cancel()


async def send_error(send: Send, error: ApiError) -> None:
    """An answer that is an error, from a layer."""
    body = openai_responses.json_bytes(error.body())
    # No "connection: close": the server would close on a client that is still sending, which then
    # never reads the answer.
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
