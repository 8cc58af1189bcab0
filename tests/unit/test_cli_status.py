"""The status as a person reads it."""

from typing import Any

from overstory.orchestrator.status_text import acceptance, render

STEPS = {
    "verify": {
        "tree-31": {"requests": 10, "accepted_by_depth": [8, 5, 0]},
        "plain": {"requests": 4, "accepted_by_depth": []},
    }
}
RANK: dict[str, Any] = {
    "rank": 0,
    "pid": 7,
    "health": "working",
    "health_reason": "",
    "forwards": 12,
    "policy": "tree-31",
    "steps": STEPS,
    "steps_per_s": 9.5,
    "tokens_per_s": 40.0,
}
SLOT: dict[str, Any] = {
    "ready": False,
    "generating": False,
    "reason": "",
    "probe_failures": 0,
    "request_failures": 0,
    "failed_lives": 0,
    "restarts": 3,
}
PICTURE: dict[str, Any] = {
    "name": "tiny",
    "endpoint": "http://h:1",
    "model": "m",
    "ready": True,
    "reason": "",
    "serve": {
        "status": "RUNNING",
        "message": "",
        "replicas": {"Replica": {"RUNNING": 1, "STARTING": 1}, "Gateway": {"RUNNING": 1}},
    },
    "controller": {
        "policy": "tree-31",
        "lease_steps": 64,
        "uptime_s": 3.0,
        "health": [
            {**SLOT, "name": "r1", "state": "HEALTHY", "ready": True, "generating": True},
            {**SLOT, "name": "r0", "state": "RETIRED", "failed_lives": 3, "reason": "given up\nx"},
            {**SLOT, "name": "r2", "state": "SUSPECT", "ready": True, "probe_failures": 3},
        ],
        "replicas": [
            {
                "name": "r1",
                "phase": "leased",
                "reason": "",
                "digests_equal_up_to": 12,
                "ranks": [RANK],
            },
            {
                "name": "r0",
                "phase": "lost",
                "reason": "rank 0 is gone",
                "digests_equal_up_to": 3,
                "ranks": [],
            },
        ],
    },
}


def test_acceptance_is_in_percent_of_drafts() -> None:
    assert acceptance(STEPS, "tree-31") == "80 50 0"
    assert acceptance(STEPS, "plain") == ""
    assert acceptance(STEPS, "chain") == ""
    assert acceptance(None, "plain") == ""


def test_everything_is_said() -> None:
    text = render(PICTURE)
    for part in (
        "tiny  m at http://h:1  ready",
        "Replica: 1 RUNNING, 1 STARTING",
        "policy tree-31, leases of 64 steps",
        "  r1: HEALTHY (generating)\n",
        "  r0: RETIRED (not ready), 3 of 3 lives failed: given up\n",
        "  r2: SUSPECT (ready), 3 failed probes\n",
        "replica r1: leased, digests equal up to forward 12",
        "9.5 steps/s  40.0 tokens/s",
        "accepted by depth, %: 80 50 0",
        "replica r0: lost: rank 0 is gone",
    ):
        assert part in text


def test_a_replica_that_left_as_told_is_not_shown() -> None:
    controller = PICTURE["controller"]
    slot = {**controller["health"][1], "as_told": True}
    left = {**controller, "health": [controller["health"][0], slot]}
    assert "r0" not in render({**PICTURE, "controller": left})
    going = {**left, "health": [slot | {"state": "DRAINING"}]}
    assert "r0: DRAINING (not ready)" in render({**PICTURE, "controller": going})
    assert "replica r0: lost: rank 0 is gone" in render(PICTURE)


def test_what_is_missing_is_said_too() -> None:
    text = render(
        {**PICTURE, "ready": False, "reason": "loading", "serve": None, "controller": None}
    )
    assert "not ready: loading" in text
    assert "Serve does not know this deployment" in text
    assert "controller: none answers" in text
