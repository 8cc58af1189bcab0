"""A rolling restart that hands KV and weights over, as a user sees it: two replicas of two ranks
under load, real engine, CPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from load_clients import load, questions, strangers
from test_restart_load import Deployed, assert_unharmed, deployed, moves, run

__all__ = ["deployed"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

SETTINGS = (
    "replicas=2",
    "engine.tp_size=2",
    "resources.cpus_per_rank=0.3",
    "control.kv_hand_off=on",
    "control.kv_hand_off_tokens=16",
    "control.weights_from_peer=on",
    "control.compare_digests=gather",
)

STATUS_S = 240.0
"""A machine under load takes a minute to import what the command needs and to be answered."""


def status(deployed: Deployed) -> dict[str, Any]:
    return json.loads(deployed.shell("status", "--json", timeout_s=STATUS_S).stdout)["controller"]


def test_a_restart_takes_kv_and_weights_along(deployed: Deployed) -> None:
    deployed.up(*SETTINGS)
    with (
        load(deployed.url, questions("overstory-tiny", 8, 160), clients=3) as seen,
        # KV of a text that the successor knows already does not travel.
        strangers(deployed.url, "overstory-tiny", 160, clients=3) as failed,
    ):
        done = run(deployed, "restart")
        assert done.returncode == 0, done.stderr
        moved = moves(deployed.url)
        figures = status(deployed)["hand_offs"]
    assert_unharmed(seen)
    assert failed == []
    assert moved.get("leaving", 0) >= 1, moved
    assert moved.get("lost", 0) == 0, moved
    assert figures["sequences"] >= 1, (figures, moved)
    assert figures["bytes"] > 0, (figures, moved)
    for replica in status(deployed)["replicas"]:
        if replica["phase"] == "leased":
            for rank in replica["ranks"]:
                assert rank["weights"]["peer_bytes"] > 1 << 20, rank
                assert rank["weights"]["disk"] == "", rank
