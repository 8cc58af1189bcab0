"""The gateway's way to a replica: tokens come on a line, the call's end and its errors by Serve.
However the two part, a sequence that is carried on neither loses nor repeats a token."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from overstory.orchestrator import gateway as gateway_module
from overstory.orchestrator.backend import ReplicaLeaving, ReplicaLost, TokenChunk
from overstory.orchestrator.engine_errors import EngineDead, RankDeath
from overstory.orchestrator.gateway import ReplicaBackend
from overstory.orchestrator.journal import GenerateCall, JournalEntry
from overstory.orchestrator.replica_board import ReplicaBoard
from overstory.orchestrator.resume import Carrier, ResumeLimits
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.token_line import LineLost
from overstory.orchestrator.token_sink import TokenSink
from overstory.orchestrator.token_wire import Frame

PROMPT, TEXT = (1, 2), tuple(range(100, 112))
DEAD = EngineDead(RankDeath(rank=0, cause="killed", phase="serving"))


class Handle:
    """A deployment handle. `script(number, call, frames)` plays the replica's part in its
    `number`th call: sends some of its frames, then ends or raises."""

    def __init__(self, sink: TokenSink, board: ReplicaBoard, script: Callable[..., Any]) -> None:
        self._sink, self._board, self._script = sink, board, script
        self.calls: list[GenerateCall] = []
        self.cancelled: list[str] = []
        self.generate = SimpleNamespace(remote=self._call)

    def options(self, **_: Any) -> "Handle":
        return self

    def _call(self, call: GenerateCall) -> Any:
        number = len(self.calls)
        self.calls.append(call)
        left = TEXT[call.sampling.earlier_output :]
        chunks = [left[at : at + 2] for at in range(0, len(left), 2)]
        frames = [
            Frame(call.rid, at, list(ids), {"type": "length"} if at == len(chunks) - 1 else None)
            for at, ids in enumerate(chunks)
        ]

        async def answer() -> AsyncGenerator[TokenChunk, None]:
            self._board.routed(call.rid, f"replica-{number}")
            async for chunk in self._script(number, self._sink._came, frames):
                yield chunk

        return Response(answer(), lambda: self.cancelled.append(call.rid))


class Response:
    """What Serve gives for a streaming call."""

    def __init__(self, items: AsyncGenerator[TokenChunk, None], cancel: Callable[[], None]) -> None:
        self._items, self.cancel = items, cancel

    def __aiter__(self) -> AsyncGenerator[TokenChunk, None]:
        return self._items


def carried(script: Callable[..., Any], **how: Any) -> tuple[list[int], list[str], Handle]:
    """Ids that a client gets, why the sequence moved, and the handle."""
    moves: list[str] = []

    async def story() -> tuple[list[int], list[str], Handle]:
        board, sink = ReplicaBoard(), TokenSink()
        board.update([f"replica-{number}" for number in range(5)])
        handle = Handle(sink, board, script)
        how.get("then", lambda _: None)(board)
        backend = ReplicaBackend(handle, board, sink)  # type: ignore[arg-type]
        entry = JournalEntry("r", PROMPT, Sampling(seed=1, max_new_tokens=len(TEXT)), 0.0)
        carrier = Carrier(
            backend, entry, 0.0, None, ResumeLimits(3, 5.0), lambda _: None, moves.append
        )
        async with asyncio.timeout(20):
            async for chunk in carrier.chunks():
                entry.commit(chunk.ids)
        return entry.committed, moves, handle

    return asyncio.run(story())


async def whole(came: Any, frames: list[Frame]) -> None:
    for frame in frames:
        came(frame)
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def short_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "FLUSH_S", 0.02)


@pytest.mark.parametrize("sent", range(6))
@pytest.mark.parametrize("fate", ["lost frames", "a gap", "dead", "leaves"])
def test_a_call_that_breaks_anywhere_goes_on_elsewhere(sent: int, fate: str) -> None:
    """Frames that were sent and did not come, the last one among them: the call ended well for the
    replica and for Serve. What comes of a call after its end is no part of the next one."""
    boards: list[ReplicaBoard] = []
    late: list[Callable[[], None]] = []

    async def script(number: int, came: Any, frames: list[Frame]) -> AsyncGenerator[Any, None]:
        if number:
            for arrive in late:
                arrive()
            await whole(came, frames)
            return
        await whole(came, frames[:sent])
        late.extend((lambda f=frame: came(f)) for frame in frames[sent:])
        if fate == "a gap" and sent + 1 < len(frames):
            came(frames[sent + 1])
        elif fate == "dead":
            raise DEAD
        elif fate == "leaves":
            boards[0].update(["replica-1"])
            await asyncio.Event().wait()
        return
        yield

    ids, moves, handle = carried(script, then=boards.append)
    assert ids == list(TEXT)
    assert moves == ["leaving" if fate == "leaves" else "lost"]
    assert [call.rid for call in handle.calls] == ["r", "r.1"]
    assert handle.cancelled == ["r"], "the first call is given up, the second one has ended"


def test_chunks_that_serve_carries_are_as_good(short_flush: None) -> None:
    async def script(number: int, came: Any, frames: list[Frame]) -> AsyncGenerator[Any, None]:
        for frame in frames:
            yield frame.chunk()

    ids, moves, _ = carried(script)
    assert (ids, moves) == (list(TEXT), [])


@pytest.mark.parametrize(
    ("error", "usable"),
    [(LineLost("the line broke"), True), (RayServeException("odd"), False), (DEAD, False)],
)
def test_a_replica_is_shunned_for_what_ails_it_alone(error: Exception, usable: bool) -> None:
    boards: list[ReplicaBoard] = []
    seen: list[bool] = []

    async def script(number: int, came: Any, frames: list[Frame]) -> AsyncGenerator[Any, None]:
        if not number:
            raise error
        seen.append(boards[0].usable("replica-0"))
        await whole(came, frames)
        return
        yield

    ids, moves, _ = carried(script, then=boards.append)
    assert (ids, moves, seen) == (list(TEXT), ["lost"], [usable])


def test_errors_are_told_apart_and_a_dead_replica_is_shunned() -> None:
    async def story() -> None:
        board, sink = ReplicaBoard(), TokenSink()
        board.update(["replica-0", "replica-1"])

        async def script(number: int, *_: Any) -> AsyncGenerator[Any, None]:
            if number == 0:
                raise DEAD
            board.update(["replica-0"])
            await asyncio.Event().wait()
            yield

        handle = Handle(sink, board, script)
        backend = ReplicaBackend(handle, board, sink, True)  # type: ignore[arg-type]
        call = GenerateCall("a", PROMPT, Sampling(seed=1, max_new_tokens=4))
        with pytest.raises(ReplicaLost, match="killed"):
            async for _ in backend.generate(call):
                pass
        assert [board.usable(f"replica-{n}") for n in (0, 1)] == [False, True]
        board.update([])
        board.update(["replica-1"])
        with pytest.raises(ReplicaLeaving) as leaving:
            async for _ in backend.generate(call):
                pass
        assert leaving.value.replica == "replica-1"

    asyncio.run(asyncio.wait_for(story(), 20))
