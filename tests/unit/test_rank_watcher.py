"""The watcher of a replica's ranks when watching itself fails; no Ray runs."""

import pytest
import ray

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
