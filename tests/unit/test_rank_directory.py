"""Which of Ray's errors mean that a rank is gone and which that it may answer later."""

import asyncio

import pytest
import ray

from overstory.orchestrator import rank_directory as module
from overstory.orchestrator.rank_directory import RankDirectory, RankGone


def ask(monkeypatch, answer, timeout_s=5.0):
    async def call(actor, group, method, *arguments):
        return await answer()

    monkeypatch.setattr(module, "call", call)
    directory = RankDirectory("demo")
    directory._actors["r1", 0] = object()
    return asyncio.run(directory.call("r1", 0, "attach", timeout_s=timeout_s))


def failing(error):
    async def answer():
        raise error

    return answer


def test_an_unavailable_actor_is_no_loss(monkeypatch):
    error = ray.exceptions.ActorUnavailableError("connection reset", b"0" * 16)
    with pytest.raises(TimeoutError, match=r"r1/rank-0 cannot be reached .*attach"):
        ask(monkeypatch, failing(error))


@pytest.mark.parametrize(
    "error", [ray.exceptions.ActorDiedError(), ray.exceptions.WorkerCrashedError()]
)
def test_a_dead_actor_is_gone(monkeypatch, error):
    with pytest.raises(RankGone, match="r1/rank-0 is gone"):
        ask(monkeypatch, failing(error))


def test_a_late_answer_is_named(monkeypatch):
    async def never():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="r1/rank-0 did not answer attach"):
        ask(monkeypatch, never, timeout_s=0.01)
