"""Before calls leave a replica its ranks meet others; whatever happens to that, the calls leave."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.orchestrator import gateway_handoff
from overstory.orchestrator.gateway_handoff import MeetingsAhead
from overstory.orchestrator.replica_board import ReplicaBoard


def leaves(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    """A call leaves `a` for `b`. What the controller was asked by then."""
    asked: list[Any] = []

    async def meet_ahead(*who: Any) -> None:
        asked.append(who)
        if isinstance(answer, BaseException):
            raise answer
        await asyncio.sleep(answer)

    controller = SimpleNamespace(meet_ahead=SimpleNamespace(remote=meet_ahead))
    found = None if answer == "nobody" else controller
    monkeypatch.setattr(gateway_handoff, "find_controller", lambda _: found)
    monkeypatch.setattr(gateway_handoff, "PREPARE_S", 0.2)

    async def story() -> None:
        board, told = ReplicaBoard(drain_s=60), asyncio.Event()
        MeetingsAhead("d", board).begin()
        board.update(["a", "b"])
        with board.following("x") as call:
            call.on_leave = told.set
            board.routed("x", "a")
            threading.Thread(target=board.update, args=(["b"],)).start()  # Serve's router loop
            async with asyncio.timeout(20):
                await told.wait()

    asyncio.run(story())
    return asked


def test_they_meet_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaves(monkeypatch, 0.0) == [("a", ["b"])]


@pytest.mark.parametrize(
    ("answer", "why"), [(RuntimeError("no"), "no"), (60.0, "TimeoutError")], ids=["error", "late"]
)
def test_whatever_happens_calls_leave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any, why: str
) -> None:
    assert leaves(monkeypatch, answer) == [("a", ["b"])]
    (said,) = caplog.messages
    assert said.endswith(f"ranks of replica a do not meet ahead: {why}")


def test_without_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaves(monkeypatch, "nobody") == []
