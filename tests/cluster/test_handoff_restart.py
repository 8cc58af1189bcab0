"""Restarts and other numbers of replicas that hand KV and weights over, as a user sees it: under
load, real engine, CPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from load_clients import load, questions, strangers
from test_restart_load import Deployed, assert_unharmed, deployed, moves, run

__all__ = ["deployed"]

pytestmark = pytest.mark.timeout(1500)

ON = (
    "replicas=2",
    "control.kv_hand_off=on",
    "control.kv_hand_off_tokens=16",
    "control.weights_from_peer=on",
)
TP_2 = ("engine.tp_size=2", "resources.cpus_per_rank=0.3", "control.compare_digests=gather")

STATUS_S = 240.0
"""A machine under load takes a minute to import what the command needs and to be answered."""


def status(deployed: Deployed) -> dict[str, Any]:
    return json.loads(deployed.shell("status", "--json", timeout_s=STATUS_S).stdout)["controller"]


def assert_weights_came(replicas: list[dict[str, Any]]) -> None:
    for replica in replicas:
        for rank in replica["ranks"]:
            assert rank["weights"]["peer_bytes"] > 1 << 20, rank
            assert rank["weights"]["disk"] == "", rank


def leased(deployed: Deployed) -> list[dict[str, Any]]:
    return [one for one in status(deployed)["replicas"] if one["phase"] == "leased"]


def test_fewer_and_more_replicas_take_kv_and_weights_along(deployed: Deployed) -> None:
    deployed.up(*ON, "resources.cpus_per_rank=0.6")
    # Long enough to be under way while a replica of a quick machine makes ready to go.
    with strangers(deployed.url, "overstory-tiny", 960, clients=4) as failed:
        fewer = run(deployed, "scale", "1")
        assert fewer.returncode == 0, fewer.stderr
        moved = moves(deployed.url)
        found = status(deployed)
    assert failed == []
    assert moved.get("leaving", 0) >= 1, moved
    assert moved.get("lost", 0) == 0, moved
    figures = found["hand_offs"]
    assert (figures["sequences"] >= 1, figures["bytes"] > 0) == (True, True), (figures, moved)
    (stays,) = leased(deployed)
    (met,) = stays["ranks"][0]["meetings"]
    assert "closed_at" in met, "they parted before the other one's end"
    more = run(deployed, "scale", "2")
    assert more.returncode == 0, more.stderr
    fresh = [one for one in leased(deployed) if one["name"] != stays["name"]]
    assert len(fresh) == 1
    assert_weights_came(fresh)


@pytest.mark.full
def test_a_restart_takes_kv_and_weights_along(deployed: Deployed) -> None:
    deployed.up(*ON, *TP_2)
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
    assert_weights_came(leased(deployed))
