"""What a restart may change, and how its progress is judged."""

from typing import Any

import pytest

from overstory.orchestrator.restart_rules import (
    RestartError,
    RestartProgress,
    change_under_way,
    changed_settings,
    refuse_changes,
)
from overstory.orchestrator.spec import DeploymentSpec, parse_spec


def spec(**changes: Any) -> DeploymentSpec:
    base: dict[str, Any] = {"name": "a", "model": "m", "drafter": "d", "replicas": 2}
    return parse_spec(base | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tree": {"budget": 7}},
        {"drafter": "other"},
        {"environment": {"SGLANG_LOG_MS": "1"}},
        {"drafter": None, "tree": {"budget": 0}},
        {"engine": {"mem_fraction_static": 0.5, "tp_size": 2}},
        {"engine": {"context_length": 8192}},
        {"resources": {"cpus_per_rank": 0.5}},
    ],
)
def test_what_replicas_alone_depend_on_may_change(changes: dict[str, Any]) -> None:
    refuse_changes(spec(engine={"context_length": 4096}), spec(**changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "b"}, "name: 'a' -> 'b'"),
        ({"model": "n", "served_model_name": "m"}, "model: 'm' -> 'n'"),
        ({"served_model_name": "n"}, "served_model_name: 'm' -> 'n'"),
        ({"gateway": {"port": 9}}, "gateway.port: 8000 -> 9"),
        ({"control": {"lease_steps": 9}}, "control.lease_steps: 64 -> 9"),
        ({"replicas": 3}, "overstory scale 3"),
        ({"engine": {"context_length": 2048}}, "engine.context_length: 4096 -> 2048 cannot shrink"),
        ({"engine": {"max_total_tokens": 99}}, "engine.max_total_tokens: unset -> 99"),
    ],
)
def test_what_others_hold_on_to_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    old = spec(engine={"context_length": 4096})
    with pytest.raises(RestartError) as refused:
        refuse_changes(old, spec(**changes))
    *faults, way_out = str(refused.value).splitlines()
    assert said in faults[0]
    assert len(faults) == 1
    assert "overstory deploy" in way_out


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(RestartError) as refused:
        refuse_changes(spec(), spec(replicas=1, gateway={"port": 9}, control={"lease_steps": 9}))
    assert len(str(refused.value).splitlines()) == 4


def test_changes_are_told() -> None:
    changed = changed_settings(spec(), spec(tree={"budget": 7}, engine={"tp_size": 2}))
    assert changed == ["tree.budget: 31 -> 7", "engine.tp_size: None -> 2"]
    assert changed_settings(spec(), spec()) == []


def test_progress_beside_the_old() -> None:
    seen = RestartProgress(frozenset("ab"), replicas=2, now_s=0.0)
    story = [
        ({"a": "RUNNING", "b": "RUNNING"}, 1, False),
        ({"a": "RUNNING", "b": "RUNNING", "c": "STARTING"}, 2, False),
        ({"a": "STOPPING", "b": "RUNNING", "c": "RUNNING"}, 30, False),
        ({"b": "RUNNING", "c": "RUNNING", "d": "STARTING"}, 32, False),
        ({"b": "STOPPING", "c": "RUNNING", "d": "RUNNING"}, 50, False),
        ({"c": "RUNNING", "d": "RUNNING"}, 51, True),
    ]
    for states, now_s, done in story:
        seen.look(states, now_s)
        assert seen.done is done
    assert [(one.name, one.seconds) for one in seen.replaced] == [("c", 30), ("d", 20)]
    assert seen.describe() == "2 of 2 replicas are new"


def test_progress_in_place_and_standing_still() -> None:
    seen = RestartProgress(frozenset("a"), replicas=1, now_s=0.0)
    seen.look({"a": "RUNNING"}, 5.0)
    assert seen.still_s(5.0) == 5.0
    seen.look({"b": "STARTING"}, 6.0)
    assert seen.still_s(9.0) == 3.0
    assert not seen.done
    assert seen.describe() == "0 of 1 replicas are new"
    seen.look({"b": "RUNNING"}, 20.0)
    assert seen.done


def test_a_successor_that_dies_meanwhile_does_not_count_as_done() -> None:
    seen = RestartProgress(frozenset("a"), replicas=2, now_s=0.0)
    seen.look({"b": "RUNNING", "c": "STOPPING", "d": "STARTING"}, 1.0)
    assert not seen.done
    seen.look({"b": "RUNNING", "c": "STOPPING", "d": "RUNNING"}, 1.5)
    assert not seen.done, "what it leaves behind is still there"
    seen.look({"b": "RUNNING", "d": "RUNNING"}, 2.0)
    assert seen.done


@pytest.mark.parametrize(
    ("app", "replicas", "states", "said"),
    [
        ("RUNNING", "HEALTHY", {"RUNNING": 2}, ""),
        ("RUNNING", "HEALTHY", {"RUNNING": 2, "STOPPING": 0}, ""),
        ("DEPLOYING", "HEALTHY", {"RUNNING": 2}, "a restart"),  # told, its loop has not begun
        ("DEPLOYING", "DEPLOY_FAILED", {"RUNNING": 2}, "a restart"),  # gone on with: the same
        ("DEPLOYING", "", {}, "a restart or its deploy"),
        ("DEPLOYING", "UPDATING", {"RUNNING": 2}, "a restart"),
        ("UNHEALTHY", "UPDATING", {"RUNNING": 2, "STARTING": 1}, "a restart"),  # the gateway is
        ("DEPLOY_FAILED", "UPDATING", {"RUNNING": 2, "STARTING": 1}, "a restart"),
        ("RUNNING", "HEALTHY", {"RUNNING": 2, "STARTING": 1}, "another number"),
        ("RUNNING", "HEALTHY", {"RUNNING": 1, "STOPPING": 1}, "another number"),
        ("UNHEALTHY", "HEALTHY", {"RUNNING": 2, "STARTING": 1}, "another number"),
        ("UNHEALTHY", "UNHEALTHY", {"RUNNING": 1, "STARTING": 1}, ""),  # in vain, perhaps
        ("DEPLOY_FAILED", "DEPLOY_FAILED", {"RUNNING": 1, "STOPPING": 1}, ""),
        ("UNHEALTHY", "HEALTHY", {"RUNNING": 2}, ""),
    ],
)
def test_what_is_under_way_is_read_off_the_replicas(
    app: str, replicas: str, states: dict[str, int], said: str
) -> None:
    told = change_under_way(app, replicas, states)
    assert bool(told) == bool(said)
    assert said in told
