"""The endpoint's own HTTP server: its port, its end, clients that leave, and those that hold on."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from overstory.orchestrator import http_layers, http_server, listening
from overstory.orchestrator.http_layers import BodyGuard, RequestIds
from overstory.orchestrator.http_protocol import ConnectionLimits, GuardedProtocol
from overstory.orchestrator.http_server import HttpServer
from overstory.orchestrator.listening import CannotListen
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.spec import GatewaySpec


class Routes:
    """Answers a POST: `quick` at once, `slow` once told to, `endless` never, `huge` with more than
    buffers hold, `broken` by an error; GETs at once."""

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
            if what == b"huge":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                for _ in range(400):
                    part = {"type": "http.response.body", "body": b"x" * 50_000, "more_body": True}
                    await send(part)
            if what == b"broken":
                raise ZeroDivisionError("oh")
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


def play(story: Callable[[Routes, HttpServer, int], Awaitable[None]], **limits: float) -> None:
    async def bounded() -> None:
        port, routes = free_port(), Routes()
        server = HttpServer(GatewaySpec(port=port), ConnectionLimits(**limits))  # type: ignore[arg-type]
        server.start(RequestIds(BodyGuard(routes, max_bytes=2000)))
        try:
            async with asyncio.timeout(20):
                await story(routes, server, port)
        finally:
            await end(server)

    asyncio.run(bounded())


async def end(server: HttpServer) -> None:
    """At once: a graceful end takes 0.2 s of uvicorn's polling."""
    assert server._server is not None
    assert server._serving is not None
    for connection in tuple(server._server.server_state.connections):
        connection.transport.abort()
    server._serving.cancel()
    await asyncio.wait((server._serving,))
    server._socket.close()


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
    monkeypatch.setattr(listening, "_TAKEN_S", 0.0)

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


# ---------------------------------------------------------------- clients that hold on


async def said(port: int, *pieces: bytes) -> bytes:
    """What the server says to these bytes, sent one after another, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    try:
        return await reader.read()
    finally:
        writer.close()


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of an error that has a request id and says that the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    names = {line.split(": ")[0] for line in lines[1:]}
    assert {"x-request-id", "content-type", "date"} <= names
    assert "connection: close" in lines
    return int(lines[0].split()[1]), json.loads(body)["error"]["code"]


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
FINE = HEAD + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"X-A: " + b"a" * 3000 + b"\r\n\r\n"],
        [HEAD, *[b"X-%d: aaaaaaaaaa\r\n" % n for n in range(300)]],
        [HEAD + b"X-A: ", *[b"a" * 100] * 30],
        [b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"],
        [HEAD + b"\r\n" + HEAD, b"X-A: ", *[b"a" * 100] * 30],
    ],
)
def test_a_head_without_an_end_is_refused(pieces: list[bytes]) -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        answer = await said(port, *pieces)
        assert refusal(b"HTTP/1.1 " + answer.split(b"HTTP/1.1 ")[-1]) == (431, "head_too_large")

    play(story, head_bytes=2000)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_as_other_errors_are(data: bytes) -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        assert refusal(await said(port, data)) == (400, "invalid_http")
        assert not routes.began.is_set()

    play(story)


def test_bytes_after_a_request_do_not_get_into_its_answer() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, writer = await post(port, "endless")
        assert await reader.readuntil(b"x\r\n")
        writer.write(b"\x16\x03\x01\x02\x00\x01\r\n")
        assert await reader.read() == b""
        await until(lambda: routes.cancelled == 1)

    play(story)


def test_a_head_that_does_not_come_is_given_up() -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        for begun in (b"G", HEAD):
            assert refusal(await said(port, begun)) == (408, "request_too_slow")

    play(story, head_s=0.05, idle_s=60)


def test_a_head_that_comes_early_has_time_until_the_answer_before_it_has_ended() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, writer = await post(port, "slow")
        writer.write(b"GET / HT")
        await routes.began.wait()
        await asyncio.sleep(0.1)  # longer than a head may take
        routes.go.set()
        assert (await reply(reader))[1] == "done"
        writer.write(b"TP/1.1\r\nHost: x\r\n\r\n")
        assert (await reply(reader))[1] == "done"

    play(story, head_s=0.05)


def test_a_connection_that_asks_nothing_is_closed() -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        assert await said(port) == b""

    play(story, head_s=60, idle_s=0.05)


def test_empty_lines_between_requests_keep_no_connection() -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"\r\n")
        assert (await reply(reader))[1] == "done"
        writer.write(b"\r\n")
        assert await reader.read() == b""

    play(story, head_s=0.05)


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_layers, "BODY_PAUSE_S", 0.05)

    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 408 ")
        assert "x-should-retry: false" in head
        assert not routes.began.is_set()

    play(story)


def test_a_body_in_crumbs_is_given_up_as_well() -> None:
    async def story() -> None:
        crumbs = 0
        said: list[Any] = []

        async def receive() -> Any:
            nonlocal crumbs
            crumbs += 1
            await asyncio.sleep(0.001)
            return {"type": "http.request", "body": b"a", "more_body": True}

        async def send(message: Any) -> None:
            said.append(message)

        guard = BodyGuard(Routes(), max_bytes=2000, timeout_s=0.05)
        await guard({"type": "http", "method": "POST", "headers": []}, receive, send)
        assert said[0]["status"] == 408
        assert crumbs > 2

    asyncio.run(asyncio.wait_for(story(), 20))


def test_a_body_that_is_announced_too_large_is_not_waited_for() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2001\r\n"
        writer.write(head + b"Expect: 100-continue\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        assert not routes.began.is_set()
        writer.close()

    play(story)


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_declined_and_the_request_served(offer: str) -> None:
    """As Java's client sends it, with a body; two of them, in any pieces."""
    one = (
        "POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 5\r\nHost: x\r\n"
        f"HTTP2-Settings: AAEAAEAA\r\nUpgrade: {offer}\r\n\r\nquick"
    )
    data = (one + one.replace("Upgrade, ", "close, Upgrade, ")).encode()

    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        for size in (len(data), 7):
            answer = await said(port, *(data[at : at + size] for at in range(0, len(data), size)))
            assert answer.count(b"200 OK") == answer.count(b"done") == 2
        await until(lambda: routes.ended == 4)

    play(story)


def test_a_client_that_takes_nothing_of_its_answer_is_gone() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nhuge")
            await until(lambda: routes.cancelled == 1)

    play(story, stalled_s=0.1)


def test_a_client_that_reads_slowly_gets_its_answer() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        reader, writer = await post(port, "huge", "Connection: close\r\n")
        size = 0
        while data := await reader.read(200_000):
            size += len(data)
            await asyncio.sleep(0.001)  # of a pause this long the limit is many times
        assert size > 400 * 50_000
        assert routes.cancelled == 0
        writer.close()

    play(story, stalled_s=0.25)


def test_a_client_that_takes_a_little_at_each_look_is_not_gone() -> None:
    sizes, looks, aborted = [90, 50, 50], list[Any](), list[int]()
    connection = GuardedProtocol.__new__(GuardedProtocol)
    connection._limits = ConnectionLimits()
    connection._stall_timer = None
    connection.transport = SimpleNamespace(  # type: ignore[assignment]
        get_write_buffer_size=lambda: sizes.pop(0), abort=lambda: aborted.append(len(looks))
    )
    connection.loop = SimpleNamespace(  # type: ignore[assignment]
        call_later=lambda delay_s, look: looks.append((delay_s, look))
    )
    connection._look_for_progress(100)
    for number in range(3):
        assert looks[number][0] == 60
        looks[number][1]()
    assert (aborted, len(looks)) == ([3], 3), "only where nothing was taken between two looks"


def test_a_flood_of_connections_that_are_gone_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(_: Routes, server: HttpServer, port: int) -> None:
        for _ in range(40):
            flooding = socket.create_connection(("127.0.0.1", port))
            flooding.close()  # Before the server has seen it: what it says is answered by a reset.
        await until(lambda: not server._server.server_state.connections)  # type: ignore[union-attr]
        while b"200 OK" not in await said(port, FINE):
            await asyncio.sleep(0.002)

    play(story, connections=1)
    assert not [record for record in caplog.records if record.name == "asyncio"]


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [(1024, 4096, 2048), (1024, 1 << 20, 10_000), (256, 256, 128), (64, -1, 10_000)],
)
def test_half_of_the_files_that_may_be_open_are_for_clients(
    soft: int, hard: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(http_server.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(http_server.resource, "setrlimit", lambda _, both: taken.append(both))
    assert http_server._most_connections() == most
    assert taken == ([] if soft == hard else [(hard, hard)])


def test_connections_above_the_limit_are_told_to_come_back() -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        answer = await said(port)
        assert refusal(answer) == (503, "too_many_connections")
        assert b"retry-after: " in answer
        held[0][1].close()
        await held[0][1].wait_closed()
        while b"200 OK" not in await said(port, FINE):
            await asyncio.sleep(0.002)
        held[1][1].close()

    play(story, connections=2)


def test_a_client_that_closes_its_half_has_left() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        _reader, writer = await post(port, "slow")
        await routes.began.wait()
        writer.write_eof()
        await until(lambda: routes.cancelled == 1)

    play(story)


def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    async def story(routes: Routes, _: HttpServer, port: int) -> None:
        for encoding, status in (("gzip", 415), ("identity", 200)):
            reader, writer = await post(port, "quick", f"Content-Encoding: {encoding}\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode()
            writer.close()
        await until(lambda: routes.ended == 1)

    play(story)


def test_an_error_of_ours_is_an_error_in_openai_s_shape() -> None:
    async def story(_: Routes, __: HttpServer, port: int) -> None:
        reader, _writer = await post(port, "broken", "x-request-id: mine\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.startswith("HTTP/1.1 500 ")
        assert "x-request-id: mine" in head
        size = int(next(x.split(": ")[1] for x in head.split("\r\n") if "content-length" in x))
        error = json.loads(await reader.readexactly(size))["error"]
        assert (error["code"], error["message"]) == ("internal_error", "ZeroDivisionError: oh")

    play(story)


def test_who_waits_longer_than_the_server_ends_is_told_to_come_back() -> None:
    async def story(routes: Routes, server: HttpServer, port: int) -> None:
        reader, _writer = await post(port, "slow")
        await routes.began.wait()
        await server.stop(0.1)
        answer = await reader.read()
        assert refusal(answer) == (503, "shutting_down")
        assert b"retry-after: " in answer

    play(story)
