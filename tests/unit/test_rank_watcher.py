"""The watcher of a replica's ranks: when watching itself fails, and whom it takes for hung; no Ray
runs."""

import pytest
import ray
from fake_clock import Clock

from overstory.orchestrator import rank_group
from overstory.orchestrator.rank_group import RankGroup, RankPlan


@pytest.mark.parametrize("error", [KeyError("odd"), SystemExit(1)])
@pytest.mark.parametrize("kill_fails", [False, True])
def test_a_watcher_that_fails_says_so(monkeypatch, error, kill_fails):
    def fail(*_, **__):
        raise error

    def kill():
        killed.append(True)
        if kill_fails:
            raise OSError("no such process table")

    heard, killed = [], []
    group = RankGroup(RankPlan("demo", "r1", 1), [])
    monkeypatch.setattr(ray, "wait", fail)
    monkeypatch.setattr(group, "_kill_all", kill)
    group._watch(heard.append)
    (death,) = heard
    assert death.rank is None
    assert f"watching the ranks failed: {type(error).__name__}" in death.cause
    assert "the replica's watcher died" in str(death)
    assert killed


def test_a_watcher_that_fails_while_the_replica_ends_is_silent(monkeypatch):
    def fail(*_, **__):
        group._ending.set()
        raise KeyError("odd")

    heard = []
    group = RankGroup(RankPlan("demo", "r1", 1), [])
    monkeypatch.setattr(ray, "wait", fail)
    group._watch(heard.append)
    assert heard == []


def test_ranks_that_find_no_time_to_answer_are_left_alone_while_tokens_come(monkeypatch):
    clock = Clock(100.0)
    monkeypatch.setattr(rank_group.time, "monotonic", clock)
    group = RankGroup(RankPlan("demo", "r1", 2, unresponsive_s=10), [])
    blamed = []
    monkeypatch.setattr(group, "_examine", lambda *why: blamed.append(why) or why)
    last_answer = [100.0, 100.0]
    for _ in range(60):
        clock.now += 1
        group.moved()
        last_answer[0] = clock.now
        assert group._unresponsive(last_answer) is None
    clock.now += 9
    last_answer[0] = clock.now
    assert group._unresponsive(last_answer) is None
    clock.now += 2
    last_answer[0] = clock.now
    assert group._unresponsive(last_answer) is not None
    assert blamed == [(1, None, "no sign of life for 11 s")], "nothing came, and it says nothing"


def test_an_answer_that_is_an_error_is_no_sign_of_life(monkeypatch):
    """A rank without memory fails every call, and its loop may hang all the same."""
    clock = Clock(100.0)
    monkeypatch.setattr(rank_group.time, "monotonic", clock)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(rank_group, "call", lambda actor, *_: (actor,))
    group = RankGroup(RankPlan("demo", "r1", 2), [])
    group.actors = ["rank 0", "rank 1"]

    def get(ref):
        if ref == ("rank 1",):
            raise ray.exceptions.RayTaskError("health", "MemoryError", MemoryError())
        return {"forwards": 3}

    monkeypatch.setattr(ray, "get", get)
    last_answer = [50.0, 50.0]
    asked = {}
    for _ in range(2):
        group._probe(asked, last_answer)
    assert last_answer == [100.0, 50.0]
    assert group._last_seen == {0: {"forwards": 3}}
