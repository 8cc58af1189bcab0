"""Each alert comes up for what it is about, and for nothing else: played to Prometheus' own rules.

Needs `promtool` (Debian package prometheus); skipped without it.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[2] / "clusters" / "monitoring" / "alerts.yaml"
ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
MINUTES = 120
"""Played in each world."""

REQUESTS = 'ray_overstory_requests_total{deployment="d",endpoint="chat",outcome="%s"}'
FIRST = 'ray_overstory_time_to_first_token_seconds_bucket{deployment="d",le="%s"}'
SLOTS = 'ray_overstory_kv_slots{deployment="d",replica="r",rank="0",state="%s"}'
DRAFTS = 'ray_overstory_draft_%s_total{deployment="d",replica="r",policy="auto",depth="1"}'
READY = 'ray_overstory_ready{deployment="d"}'
AGE = 'ray_overstory_report_age_seconds{deployment="d",replica="r",rank="1"}'
FAULTS = 'ray_overstory_faults_total{deployment="d",kind="DEAD"}'

HEALTHY = {
    READY: f"1x{MINUTES}",
    AGE: f"1x{MINUTES}",
    FAULTS: f"3x{MINUTES}",  # Of long ago.
    REQUESTS % "ok": f"0+100x{MINUTES}",
    REQUESTS % "replica_lost": f"0+4x{MINUTES}",  # Fewer than 1 of 20.
    REQUESTS % "context_length_exceeded": f"0+100x{MINUTES}",  # The client's doing.
    REQUESTS % "queue_full": f"7x{MINUTES}",
    FIRST % "5": f"0+96x{MINUTES}",
    FIRST % "10": f"0+98x{MINUTES}",
    FIRST % "30": f"0+100x{MINUTES}",
    FIRST % "+Inf": f"0+100x{MINUTES}",
    SLOTS % "used": f"90x{MINUTES}",
    SLOTS % "cached": f"9x{MINUTES}",
    SLOTS % "free": f"1x{MINUTES}",
    DRAFTS % "offered": f"0+100x{MINUTES}",
    DRAFTS % "accepted": f"0+40x{MINUTES}",
}
CASES: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "OverstoryNotReady": (
        {READY: f"0x{MINUTES}"},
        {"severity": "critical", "deployment": "d"},
        "d cannot generate: GET /ready says why",
    ),
    "OverstoryReplicaFault": (
        {FAULTS: f"3x{MINUTES - 5} 4x5"},
        {"severity": "warning", "deployment": "d", "kind": "DEAD"},
        "d: a replica is DEAD",
    ),
    "OverstoryReportsStopped": (
        {AGE: f"61x{MINUTES}"},
        {"severity": "warning", "deployment": "d", "replica": "r", "rank": "1"},
        "rank 1 of r has not reported for a minute",
    ),
    "OverstoryRequestsFail": (
        {REQUESTS % "replica_lost": f"0+12x{MINUTES}"},
        {"severity": "critical", "deployment": "d"},
        "d: more than 5% of requests fail",
    ),
    "OverstoryTurnsAway": (
        {REQUESTS % "queue_full": f"0+1x{MINUTES}"},
        {"severity": "warning", "deployment": "d"},
        "d turns requests away: add replicas",
    ),
    "OverstorySlowFirstToken": (
        {FIRST % "5": f"0+90x{MINUTES}", FIRST % "10": f"0+93x{MINUTES}"},
        {"severity": "warning", "deployment": "d"},
        "d: 1 of 20 requests waits over 10 s for its first token",
    ),
    "OverstoryKvFull": (
        {SLOTS % "used": f"97x{MINUTES}", SLOTS % "cached": f"2x{MINUTES}"},
        {"severity": "warning", "deployment": "d", "replica": "r"},
        "r: requests fill the KV pool",
    ),
    "OverstoryDraftsRejected": (
        {DRAFTS % "accepted": f"0+29x{MINUTES}"},
        {"severity": "info", "deployment": "d"},
        "d: the drafter no longer fits what is asked",
    ),
}

pytestmark = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs the Debian package prometheus"
)


def _world(name: str, changes: dict[str, str]) -> dict[str, Any]:
    """One world: at its end `name` alone is up."""
    expected = []
    if name in CASES:
        _, labels, summary = CASES[name]
        expected = [{"exp_labels": labels, "exp_annotations": {"summary": summary}}]
    at_end = [
        {
            "eval_time": f"{MINUTES}m",
            "alertname": alert,
            "exp_alerts": expected if alert == name else [],
        }
        for alert in ALERTS
    ]
    series = [{"series": one, "values": of} for one, of in (HEALTHY | changes).items()]
    return {"interval": "1m", "name": name, "input_series": series, "alert_rule_test": at_end}


def test_each_alert_comes_up_for_what_it_is_about_and_for_nothing_else(tmp_path: Path) -> None:
    assert set(CASES) == set(ALERTS)
    worlds = [_world(name, changes) for name, (changes, _, _) in CASES.items()]
    file = tmp_path / "worlds.yaml"
    played = {"rule_files": [str(RULES)], "evaluation_interval": "1m"}
    file.write_text(yaml.safe_dump(played | {"tests": [*worlds, _world("healthy", {})]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or done.stdout


def test_a_first_fault_of_a_series_that_is_new_comes_up(tmp_path: Path) -> None:
    """A counter that is exported first with its first fault has no increase."""
    changes = {FAULTS: f"_x{MINUTES - 5} 1x5"}
    file = tmp_path / "worlds.yaml"
    played = {"rule_files": [str(RULES)], "evaluation_interval": "1m"}
    file.write_text(yaml.safe_dump(played | {"tests": [_world("OverstoryReplicaFault", changes)]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or done.stdout
