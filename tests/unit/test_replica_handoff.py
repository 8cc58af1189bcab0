"""A replica's part in the hand-off: nothing that happens to it harms a request, and a replica that
goes stays as long as somebody fetches from it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from overstory.orchestrator import departures, replica, replica_handoff
from overstory.orchestrator.handoff import NotMoved, Text
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.replica_handoff import ReplicaHandOff
from overstory.orchestrator.replica_setup import policy_environment
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.spec import parse_spec
from overstory.workers.handoff.rank_side import HAND_OFF_VARIABLE

PAIR = {"model": "overstory-tiny", "drafter": "overstory-tiny-drafter"}
SAMPLING = Sampling(seed=0, max_new_tokens=5)


class Controller:
    """Answers a hand-off as it is told; notes what was asked."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.asked = answer, []
        self.hand_off = SimpleNamespace(remote=self._hand_off)

    async def _hand_off(self, *words: Any) -> int:
        self.asked.append(words)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer


def call_of(length: int, kv_at: tuple[str, str] | None) -> GenerateCall:
    return GenerateCall("r.1", tuple(range(length)), SAMPLING, kv_at=kv_at)


def bring(
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    length: int = 50,
    kv_at: tuple[str, str] | None = ("old", "r"),
    on: bool = True,
) -> list[Any]:
    """What the controller was asked; raises what the request would see."""
    controller = Controller(answer)
    found = None if answer == "nobody" else controller
    monkeypatch.setattr(replica_handoff, "find_controller", lambda _: found)
    if answer is None:
        monkeypatch.setattr(replica_handoff, "BRING_S", 0.05)
    asyncio.run(ReplicaHandOff("d", "new", on, 40, None).bring(call_of(length, kv_at)))
    return controller.asked


def test_a_sequence_that_moves_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bring(monkeypatch, 49) == [("old", "new", Text("r", tuple(range(50))))]


@pytest.mark.parametrize(
    "answer",
    [NotMoved("no room"), RayActorError(), RuntimeError(), None, "nobody"],
    ids=["refused", "controller lost", "error", "no answer", "no controller"],
)
def test_nothing_that_fails_harms_the_request(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    bring(monkeypatch, answer)


def test_only_long_ones_that_come_from_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bring(monkeypatch, 1, length=39) == []
    assert bring(monkeypatch, 1, kv_at=None) == []
    assert bring(monkeypatch, 1, on=False) == []


def test_a_client_that_has_gone_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(None)
    monkeypatch.setattr(replica_handoff, "find_controller", lambda _: controller)

    async def gone() -> None:
        part = ReplicaHandOff("d", "new", True, 40, None)
        task = asyncio.ensure_future(part.bring(call_of(50, ("old", "r"))))
        while not controller.asked:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(gone())


def going(
    monkeypatch: pytest.MonkeyPatch, answers: Iterable[Any], left: Iterable[tuple[str, int]] = ()
) -> int:
    """How often rank 0 was asked by a replica that goes, from which requests `left`.

    Args:
        answers: of rank 0: how many hand-offs it holds for and who was fetched, or an error.
    """
    said, looks = iter(answers), 0

    def get(_: Any, timeout: float) -> dict[str, Any]:
        nonlocal looks
        looks += 1
        answer = next(said)
        if isinstance(answer, Exception):
            raise answer
        holding, fetched = answer
        return {"holding": holding, "fetched": fetched}

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(replica_handoff, "find_controller", lambda _: None)
    monkeypatch.setattr(replica_handoff, "call", lambda *_: None)
    monkeypatch.setattr(replica_handoff, "_LOOK_S", 0.0)
    part = ReplicaHandOff("d", "old", True, 40, None)
    for rid, tokens in left:
        part.left(rid, tokens)
    part.stay()
    return looks


LATE = GetTimeoutError("late")


@pytest.mark.parametrize(
    ("answers", "looks"),
    [
        ([(2, []), (1, []), (0, [])], 3),
        ([LATE, (1, []), LATE, (0, [])], 4),
        ([(1, []), RayActorError()], 2),
        ([(0, [])], 1),
    ],
    ids=["until all is let go", "a late answer is none", "a rank that is gone", "nothing held"],
)
def test_it_stays_while_somebody_fetches(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], looks: int
) -> None:
    assert going(monkeypatch, answers) == looks


def test_it_goes_when_all_that_left_have_been_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "COMING_S", 60.0)
    left = [("a", 40), ("b", 90), ("short", 39)]
    answers = [(0, []), (1, ["a"]), (0, ["a"]), (1, ["a", "b"]), (0, ["a", "b"])]
    assert going(monkeypatch, answers, left) == len(answers)


def test_it_goes_when_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "COMING_S", 0.05)
    begun = time.monotonic()
    assert going(monkeypatch, itertools.repeat((0, [])), [("a", 40)]) > 1
    assert 0.05 <= time.monotonic() - begun < replica_handoff.STAY_S


def test_it_does_not_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_handoff, "STAY_S", 0.2)
    assert going(monkeypatch, itertools.repeat((1, []))) > 1


def test_its_ranks_part_from_others_before_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before all that left it have been fetched; where they do not, it goes all the same."""
    said: list[Any] = []

    def get(answer: Any, timeout: float) -> Any:
        said.append(answer)
        if answer == ("parted", "old"):
            raise GetTimeoutError("late")
        return {"holding": 2 - len(said), "fetched": []}

    controller = SimpleNamespace(part=SimpleNamespace(remote=lambda who: ("parted", who)))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(replica_handoff, "find_controller", lambda _: controller)
    monkeypatch.setattr(replica_handoff, "call", lambda *_: "outgoing")
    monkeypatch.setattr(replica_handoff, "_LOOK_S", 0.0)
    ReplicaHandOff("d", "old", True, 40, None).stay()
    assert said == ["outgoing", "outgoing", ("parted", "old")]


def test_without_hand_off_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(replica_handoff, "call", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(replica_handoff, "find_controller", lambda *_: pytest.fail("asked"))
    part = ReplicaHandOff("d", "old", False, 40, None)
    part.left("a", 90)
    part.stay()


@pytest.mark.parametrize(
    ("finish", "left"), [(None, [("r.1", 50 + 3)]), ({"type": "length"}, [])], ids=["cut", "whole"]
)
def test_who_left_is_told_with_what_it_generated(
    monkeypatch: pytest.MonkeyPatch, finish: dict[str, str] | None, left: list[tuple[str, int]]
) -> None:
    """The engine gives two tokens and one; a sequence that is not finished may be asked for."""
    told: list[tuple[str, int]] = []

    async def bring(_: GenerateCall) -> None: ...

    async def engine(*_: Any, **__: Any) -> Any:
        for number, end in ((2, None), (1, finish)):
            yield number, end

    async def at_once(chunks: Any, _: float) -> Any:
        async for chunk in chunks:
            yield chunk

    chunk = lambda step: SimpleNamespace(ids=[7] * step[0], finish=step[1])  # noqa: E731
    monkeypatch.setattr(replica, "_chunk", chunk)
    monkeypatch.setattr(replica, "paced", at_once)
    monkeypatch.setattr(replica, "refuse_beyond", lambda *_: None)
    one: Any = object.__new__(replica.Replica)
    one._limits, one._health = {}, SimpleNamespace(generated=lambda: None)
    one._engine = SimpleNamespace(generate_ids=engine, death="made up")
    one._herald = SimpleNamespace(ended=lambda: None)
    one._engine.shutdown = lambda: None
    one._handoff = SimpleNamespace(bring=bring, left=lambda *who: told.append(who))

    async def consume() -> None:
        async for _ in one._generated(call_of(50, None)):
            pass

    asyncio.run(consume())
    assert told == left


@pytest.mark.parametrize(
    ("control", "told"),
    [
        ({}, False),
        ({"kv_hand_off": "on"}, True),
        ({"weights_from_peer": "on"}, True),
        ({"kv_hand_off": "auto", "weights_from_peer": "auto"}, False),  # on a CPU
    ],
)
def test_ranks_are_told_to_be_ready_for_hand_offs(control: dict[str, str], told: bool) -> None:
    spec = parse_spec(PAIR | {"control": control})
    assert (HAND_OFF_VARIABLE in policy_environment(spec)) == told
