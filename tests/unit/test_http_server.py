"""The endpoint's own HTTP server: its port, its end, and clients that leave."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send

from overstory.orchestrator import http_server
from overstory.orchestrator.http_layers import BodyGuard, RequestIds
from overstory.orchestrator.http_server import CannotListen, HttpServer
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.spec import GatewaySpec


class Routes:
    """Answers a POST: `quick` at once, `slow` once told to, `endless` never; GETs at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = asyncio.Event()
        self.cancelled = 0
        self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        what = (await receive())["body"] if scope["method"] == "POST" else b"quick"
        self.began.set()
        try:
            if what == b"endless":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.Event().wait()
            if what == b"slow":
                await self.go.wait()
            headers = [(b"content-length", b"4")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"done"})
            await asyncio.sleep(0.01)  # what follows an answer is not cut short
            self.ended += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def play(story: Callable[[Routes, HttpServer, int], Awaitable[None]]) -> None:
    async def bounded() -> None:
        port, routes = free_port(), Routes()
        server = HttpServer(GatewaySpec(port=port))
        server.start(RequestIds(BodyGuard(routes, max_bytes=2000)))
        try:
            async with asyncio.timeout(20):
                await story(routes, server, port)
        finally:
            await server.stop(1)

    asyncio.run(bounded())


async def post(
    port: int, body: str, headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    return reader, writer


async def reply(reader: asyncio.StreamReader) -> tuple[str, str]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    return head, (await reader.readexactly(4)).decode()


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("what", ["slow", "endless"])
def test_a_client_that_leaves_cancels_its_request(what: str) -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        _reader, writer = await post(port, what)
        await routes.began.wait()
        assert routes.cancelled == 0
        writer.close()
        await until(lambda: routes.cancelled == 1)

    play(story)


def test_an_answer_that_is_whole_cancels_nothing() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        for number in range(1, 4):
            reader, writer = await post(port, "quick")
            assert (await reply(reader))[1] == "done"
            writer.close()
            await until(lambda n=number: routes.ended == n)
        assert routes.cancelled == 0

    play(story)


def test_requests_end_before_the_server_does() -> None:
    async def story(routes: Routes, server: HttpServer, port: int) -> None:
        reader, _writer = await post(port, "slow")
        await routes.began.wait()
        stopping = asyncio.create_task(server.stop(5))
        await until(lambda: server._server is not None and not server._server.servers[0].sockets)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", port)
        routes.go.set()
        assert (await reply(reader))[1] == "done"
        await stopping

    play(story)


def test_a_server_that_has_ended_is_told() -> None:
    async def story(_: Routes, server: HttpServer, __: int) -> None:
        server.check()
        assert server._serving is not None
        server._serving.cancel()
        await asyncio.wait((server._serving,))
        with pytest.raises(RuntimeError, match="HTTP server has ended"):
            server.check()

    play(story)


@pytest.mark.parametrize(("own", "kept"), [("mine-1", True), ("two words", False), ("", False)])
def test_answers_carry_a_request_id(own: str, kept: bool) -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        reader, _writer = await post(port, "quick", f"x-request-id: {own}\r\n")
        head, _body = await reply(reader)
        (given,) = [
            line.split(": ")[1] for line in head.split("\r\n") if line.startswith("x-request-id")
        ]
        assert (given == own) == kept
        assert given

    play(story)


def test_a_port_that_is_taken_is_told_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_TAKEN_S", 0.0)

    async def story(_: Routes, __: HttpServer, port: int) -> None:
        with pytest.raises(CannotListen, match=rf"gateway\.port: 127\.0\.0\.1:{port}"):
            HttpServer(GatewaySpec(port=port))

    play(story)
    with pytest.raises(CannotListen, match=r"gateway\.port: 192\.0\.2\.1:80"):
        HttpServer(GatewaySpec(host="192.0.2.1", port=80))


def test_a_body_with_half_a_pair_is_refused_before_the_route() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, _writer = await post(port, json.dumps({"prompt": "\ud800"}))
        head, _body = await reply(reader)
        assert " 400 " in head
        assert not routes.began.is_set()

    play(story)
