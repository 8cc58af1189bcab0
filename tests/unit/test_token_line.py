"""Token lines: what a replica sends is what the gateway's inbox gives, or the call ends."""

import asyncio
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from overstory.orchestrator import listening, token_line, token_sink
from overstory.orchestrator.backend import ReplicaLost, TokenChunk, TokenLogprobs
from overstory.orchestrator.journal import GenerateCall, SinkAddress
from overstory.orchestrator.listening import CannotListen
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.token_line import LineLost, TokenLines
from overstory.orchestrator.token_sink import Inbox, TokenSink
from overstory.orchestrator.token_wire import BadLine, Frame, LineReader, encoded

LOGPROBS = [TokenLogprobs(-0.25, ((7, -0.25), (9, -math.inf))), TokenLogprobs(-1.5)]
LAST = TokenChunk([3], {"type": "stop", "matched": 3})
CHUNKS = [TokenChunk([1], None, LOGPROBS[1:]), TokenChunk([7, 8], None, LOGPROBS), LAST]


def play(story: Callable[[TokenSink], Awaitable[None]]) -> None:
    async def bounded() -> None:
        sink = TokenSink()
        await sink.open("127.0.0.1")
        try:
            async with asyncio.timeout(20):
                await story(sink)
        finally:
            sink.close()

    asyncio.run(bounded())


def call(rid: str, sink: SinkAddress | None) -> GenerateCall:
    return GenerateCall(rid, (1, 2), Sampling(seed=0, max_new_tokens=9), sink=sink)


async def given(chunks: list[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    for chunk in chunks:
        yield chunk


async def all_of(chunks: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in chunks]


def test_chunks_arrive_as_they_were_sent_for_many_calls_at_once() -> None:
    async def story(sink: TokenSink) -> None:
        lines = TokenLines()

        async def one(rid: str) -> list[TokenChunk]:
            with sink.expecting(rid) as inbox:
                rest = await all_of(lines.deliver(given(CHUNKS), call(rid, sink.address)))
                assert rest == [], "what went along the line is not answered as well"
                return await all_of(inbox.chunks())

        assert await asyncio.gather(*(one(f"r{n}") for n in range(20))) == [CHUNKS] * 20

    play(story)


def test_without_a_line_the_chunks_are_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(sink: TokenSink) -> None:
        address = sink.address
        assert address is not None
        sink.close()
        tried = []
        connected = token_line._connected
        monkeypatch.setattr(
            token_line, "_connected", lambda to: (tried.append(to), connected(to))[1]
        )
        lines = TokenLines()
        for rid, to in (("a", address), ("b", address), ("c", None)):
            assert await all_of(lines.deliver(given(CHUNKS), call(rid, to))) == CHUNKS
        assert tried == [address], "a port that is closed is not tried by each call"

    play(story)


def test_a_call_ends_where_its_line_breaks() -> None:
    """Also if another line could be had at once: tokens on the way may be lost."""

    async def story(sink: TokenSink) -> None:
        lines, turn = TokenLines(), asyncio.Event()

        async def slow() -> AsyncGenerator[TokenChunk, None]:
            yield CHUNKS[0]
            await turn.wait()
            yield CHUNKS[1]

        with sink.expecting("r") as inbox:
            sent = asyncio.create_task(all_of(lines.deliver(slow(), call("r", sink.address))))
            async with aclosing(inbox.chunks()) as came:
                assert await anext(came) == CHUNKS[0]
            for line in tuple(sink._lines):
                line.abort()
            task = lines._lines[sink.address]  # type: ignore[index]
            while task.result().open:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
            turn.set()
            with pytest.raises(LineLost):
                await sent
        with sink.expecting("s") as inbox:
            assert await all_of(lines.deliver(given(CHUNKS), call("s", sink.address))) == []
            assert await all_of(inbox.chunks()) == CHUNKS

    play(story)


@pytest.mark.parametrize("how", ["cut", "corrupted"])
def test_a_broken_line_ends_its_calls_at_once_and_no_others(how: str) -> None:
    async def story(sink: TokenSink) -> None:
        assert sink.address is not None
        lines = [
            await asyncio.open_connection(sink.address.host, sink.address.port) for _ in range(2)
        ]
        with sink.expecting("a") as one, sink.expecting("b") as other, sink.expecting("c") as none:
            for (_, writer), rid in zip(lines, "ab", strict=True):
                writer.write(sink.address.secret + encoded(rid, 0, CHUNKS[0]))
            came = one.chunks()
            assert await anext(came) == CHUNKS[0]
            if how == "cut":
                lines[0][1].transport.abort()
            else:
                lines[0][1].write(b"\x00\x00\x00\x02\x91\x01")
            with pytest.raises(ReplicaLost, match="line on which its tokens came has broken"):
                await anext(came)
            lines[1][1].write(encoded("b", 1, LAST))
            assert await all_of(other.chunks()) == [CHUNKS[0], LAST]
            assert not none.finished.is_set()
        for _, writer in lines:
            writer.close()

    play(story)


def test_both_ends_notice_that_the_other_is_silent() -> None:
    async def story(sink: TokenSink) -> None:
        lines = TokenLines()
        with sink.expecting("r"):
            await all_of(lines.deliver(given(CHUNKS), call("r", sink.address)))
        theirs = lines._lines[sink.address].result()  # type: ignore[index]
        (ours,) = sink._lines
        for end in (theirs._transport, ours):  # type: ignore[union-attr]
            connection = end.get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            silence = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert 0 < silence < 1000 * token_sink.FLUSH_S, "the next call gets another line"

    play(story)


def test_a_token_port_that_is_taken_is_told_with_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_TAKEN_S", 0.0)

    async def story(sink: TokenSink) -> None:
        assert sink.address is not None
        with pytest.raises(CannotListen, match=rf"gateway\.token_port: .*:{sink.address.port}"):
            await TokenSink().open(sink.address.host, sink.address.port)

    play(story)


def test_a_stranger_is_not_heard() -> None:
    async def story(sink: TokenSink) -> None:
        assert sink.address is not None
        reader, writer = await asyncio.open_connection(sink.address.host, sink.address.port)
        with sink.expecting("r") as inbox:
            writer.write(b"x" * len(sink.address.secret) + encoded("r", 0, LAST))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            assert not inbox.finished.is_set()
        writer.close()

    play(story)


@pytest.mark.parametrize("step", [1, 5, 29, 1000])
def test_frames_are_found_however_the_bytes_are_cut(step: int) -> None:
    sent = b"secret" + b"".join(encoded("r", n, chunk) for n, chunk in enumerate(CHUNKS))
    reader, found = LineReader(b"secret"), []
    for at in range(0, len(sent), step):
        found += reader.feed(sent[at : at + step])
    assert [frame.chunk() for frame in found] == CHUNKS
    assert [frame.number for frame in found] == [0, 1, 2]


@pytest.mark.parametrize(
    "data", [b"secres", b"xecret", b"secret\xff\xff\xff\xff", b"secret\x00\x00\x00\x02\x91\x01"]
)
def test_bytes_that_are_no_line_are_refused(data: bytes) -> None:
    with pytest.raises(BadLine):
        LineReader(b"secret").feed(data)


def test_a_secret_is_judged_as_a_whole() -> None:
    """A part of it tells nothing, right or wrong; and waits for the rest only so long."""
    for part in (b"secre", b"xxxxx", b""):
        reader = LineReader(b"secret")
        assert reader.feed(part) == []
        assert not reader.greeted


def test_who_does_not_greet_is_gone_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_sink, "GREETING_S", 0.01)

    async def story(sink: TokenSink) -> None:
        assert sink.address is not None
        reader, writer = await asyncio.open_connection(sink.address.host, sink.address.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()

    play(story)


def test_strangers_take_no_more_connections_than_are_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_sink, "MOST_LINES", 2)

    async def story(sink: TokenSink) -> None:
        assert sink.address is not None
        held = [
            await asyncio.open_connection(sink.address.host, sink.address.port) for _ in range(2)
        ]
        reader, writer = await asyncio.open_connection(sink.address.host, sink.address.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        assert len(sink._lines) == 2
        for _, one in (*held, (reader, writer)):
            one.close()
        while sink._lines:
            await asyncio.sleep(0.001)
        with sink.expecting("r") as inbox:
            await all_of(TokenLines().deliver(given(CHUNKS), call("r", sink.address)))
            assert await all_of(inbox.chunks()) == CHUNKS

    play(story)


def test_an_inbox_ends_once() -> None:
    async def story(_: TokenSink) -> None:
        ended, gap, whole = Inbox(), Inbox(), Inbox()
        ended.put(CHUNKS[0])
        ended.end(ValueError("first"))
        ended.end(ValueError("second"))
        ended.put(LAST)
        came = ended.chunks()
        assert await anext(came) == CHUNKS[0]
        with pytest.raises(ValueError, match="first"):
            await anext(came)
        gap.take(Frame("r", 0, [1]))
        gap.take(Frame("r", 2, [2]))
        gap.take(Frame("r", 1, [3], {"type": "length"}))
        with pytest.raises(ReplicaLost, match="frame 2 of its tokens came for 1"):
            await all_of(gap.chunks())
        whole.put(LAST)
        whole.end(ValueError("too late"))
        assert await all_of(whole.chunks()) == [LAST]

    play(story)


def test_the_secret_is_not_in_what_is_logged() -> None:
    assert "secret" not in repr(call("r", SinkAddress("h", 1, b"hush")))
    assert "hush" not in repr(call("r", SinkAddress("h", 1, b"hush")))
