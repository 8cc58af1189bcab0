"""A picture of a deployment as `overstory status` gathers it, for the tests of who shows it."""

from typing import Any

STEPS: dict[str, Any] = {
    "verify": {
        "tree-15": {
            "forwards": 100,
            "requests": 200,
            "rows": 3200,
            "tokens": 700,
            "offered_by_depth": [200, 180, 100],
            "accepted_by_depth": [160, 90, 8],
            "stage_ns": {"verify": 8_000_000_000, "draft": 1_000_000_000, "accept": 1_000_000_000},
        },
        "plain": {
            "forwards": 3,
            "requests": 3,
            "rows": 3,
            "tokens": 3,
            "offered_by_depth": [],
            "accepted_by_depth": [],
            "stage_ns": {},
        },
    },
    "prefill": {"forwards": 2, "requests": 2, "tokens": 4000, "ns": 2_000_000_000},
}
LOAD = {"running": 2, "waiting": 1, "free_slots": 250, "cached_slots": 250, "max_slots": 1000}
SEEN = {
    "requests": 2,
    "rows": 500,
    "runs": 20,
    "worst_runs": 12,
    "contiguous_share": 0.96,
    "cached_breaks": 1,
    "free": 250,
    "free_runs": 9,
    "largest_free_run": 120,
    "age_s": 4.0,
}


def rank(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "pid": 100 + number,
        "health": "working",
        "health_reason": "",
        "forwards": 103,
        "policy": "tree-15",
        "load": LOAD,
        "steps": STEPS,
        "steps_per_s": 9.5,
        "tokens_per_s": 61.5,
        "tokens_per_forward": 3.5,
        **changes,
    }


def picture(**changes: Any) -> dict[str, Any]:
    counts = {"failed_lives": 0, "probe_failures": 0, "request_failures": 0, "restarts": 3}
    health = {"state": "HEALTHY", "reason": "", "ready": True, "generating": True}
    slot = {"name": "r1", **health, **counts}
    replica = {"name": "r1", "phase": "leased", "reason": "", "digests_equal_up_to": 101}
    return {
        "name": "kimi",
        "endpoint": "http://h:8000",
        "model": "kimi-k2.6",
        "ready": True,
        "reason": "",
        "serve": {"status": "RUNNING", "message": "", "replicas": {"Replica": {"RUNNING": 1}}},
        "gateway": {"running": 2, "queued": 3, "max_concurrent": 32},
        "controller": {
            "policy": "tree-15",
            "lease_steps": 64,
            "uptime_s": 90.0,
            "health": [slot],
            "replicas": [{**replica, "fragmentation": SEEN, "ranks": [rank(0), rank(1)]}],
        },
        **changes,
    }
