"""Grafana dashboards and Prometheus alert rules, from the metric table. Pure.

`clusters/monitoring/` holds what comes of it, and a test compares.

    python -m overstory.orchestrator.dashboards clusters/monitoring
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from overstory.orchestrator.metric_table import METRICS

_WIDTH, _HEIGHT = 12, 8
_SCOPES = {
    "Deployment": ("ready", "deployment"),
    "Replica": ("engine_running", "replica"),
    "Rank": ("report_age_seconds", "rank"),
}
"""Variable of a dashboard -> metric and label that its values come from."""


@dataclass(frozen=True)
class Panel:
    """A panel: its title, the unit by Grafana's name, and (query, legend) of its lines.

    In a query `NAME{` stands for a metric with the dashboard's filters.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{}}[$interval])))",
            f"p{int(q * 100)}",
        )
        for q in (0.5, 0.9, 0.99)
    )


DEPLOYMENT = (
    Panel("Requests by outcome", "reqps",
          (("sum by (outcome) (rate(requests_total{}[$interval]))", "{{outcome}}"),), True),
    Panel("Tokens", "short", (
        ("sum(rate(generated_tokens_total{}[$interval]))", "generated/s"),
        ("sum(rate(prompt_tokens_total{}[$interval]))", "prompt/s"),
    )),
    Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
    Panel("Between pieces of a stream", "s", _quantiles("inter_chunk_seconds")),
    Panel("Time per output token", "s", _quantiles("time_per_output_token_seconds")),
    Panel("Time of a request", "s", _quantiles("request_seconds")),
    Panel("Wait for a place", "s", _quantiles("queue_seconds")),
    Panel("Running and waiting", "short", (
        ("sum(sequences_running{})", "sequences running"),
        ("sum(sequences_limit{})", "at most"),
        ("sum(requests_queued{})", "requests waiting"),
    )),
    Panel("HTTP answers", "reqps",
          (("sum by (status) (rate(http_answers_total{}[$interval]))", "{{status}}"),), True),
    Panel("Ready", "bool_yes_no", (("max by (deployment) (ready{})", "{{deployment}}"),)),
    Panel("Replicas", "short", (
        ("sum by (phase) (replicas{})", "{{phase}}"),
        ("sum by (state) (replica_health{})", "{{state}}"),
    )),
    Panel("Sequences moved to another replica", "short",
          (("sum by (why) (increase(sequences_moved_total{}[10m]))", "{{why}}"),), True),
    Panel("Faults in 10 minutes", "short",
          (("sum by (kind) (increase(faults_total{}[10m]))", "{{kind}}"),)),
    Panel("KV that came from replicas that go", "short", (
        ("sum(rate(kv_handed_over_bytes_total{}[$interval]))", "bytes/s"),
        ("sum(rate(kv_hand_over_seconds_total{}[$interval]))", "share of time"),
        ("sum(rate(kv_hand_over_wait_seconds_total{}[$interval]))", "sequences that wait"),
        ("sum(rate(kv_hand_over_meet_seconds_total{}[$interval]))", "share of time meeting"),
        ("sum by (outcome) (rate(kv_hand_overs_total{}[$interval]))", "sequences {{outcome}}/s"),
    )),
)  # fmt: skip
"""Panels of the dashboard of a deployment."""

REPLICA = (
    Panel("Steps", "short",
          (("sum by (replica) (steps_per_second{rank=\"0\",})", "{{replica}} steps/s"),)),
    Panel("Tokens", "short",
          (("sum by (replica) (tokens_per_second{rank=\"0\",})", "{{replica}} tokens/s"),)),
    Panel("Tokens that a step commits of a request", "short",
          (("avg by (replica) (tokens_per_step{})", "{{replica}}"),)),
    Panel("Acceptance by depth", "percentunit", ((
        "sum by (depth) (rate(draft_accepted_total{}[$interval]))"
        " / sum by (depth) (rate(draft_offered_total{}[$interval]))",
        "depth {{depth}}",
    ),)),
    Panel("Acceptance by the drafter's rank of a candidate", "percentunit", ((
        "avg by (kind, parent, candidate) (draft_candidate_share{depth=\"1\",})",
        "{{kind}} depth 1 candidate {{candidate}}",
    ), (
        "avg by (kind, parent, candidate) (draft_candidate_share{depth=\"2\",})",
        "{{kind}} depth 2 {{parent}} candidate {{candidate}}",
    ))),
    Panel("Drafter in use, switched off in an hour", "short", (
        ("sum by (replica) (drafter_in_use{})", "{{replica}} in use"),
        ("sum by (replica) (increase(drafter_switched_off_total{}[1h]))",
         "{{replica}} switched off"),
    )),
    Panel("Policy in force", "short", (("max by (replica, policy) (tree_policy{})",
                                        "{{replica}} {{policy}}"),)),
    Panel("Draft nodes that a step verifies of a request", "short", ((
        "sum by (replica) (rate(verify_rows_total{rank=\"0\",}[$interval]))"
        " / sum by (replica) (rate(verify_requests_total{rank=\"0\",}[$interval])) - 1",
        "{{replica}}",
    ),)),
    Panel("Requests in the engine", "short", (
        ("sum by (replica) (engine_running{})", "{{replica}} running"),
        ("sum by (replica) (engine_waiting{})", "{{replica}} waiting"),
    )),
    Panel("Share of time in iterations above 0.25 s", "percentunit",
          (("sum by (replica) (rate(stood_seconds_total{}[$interval]))", "{{replica}}"),)),
    Panel("KV pool", "short",
          (("sum by (state) (kv_slots{rank=\"0\",})", "{{state}}"),), True),
    Panel("Rows of requests that lie side by side", "percentunit",
          (("avg by (replica) (kv_neighbours{})", "{{replica}}"),)),
    Panel("Prompt tokens computed", "short",
          (("sum by (replica) (rate(prefill_tokens_total{rank=\"0\",}[$interval]))",
            "{{replica}} tokens/s"),)),
)  # fmt: skip
"""Panels of the dashboard of a replica."""

RANK = (
    Panel("Time of a step by stage", "s", ((
        "sum by (rank, stage) (rate(stage_seconds_total{}[$interval]))"
        " / on (rank) group_left () sum by (rank) (rate(verify_steps_total{}[$interval]))",
        "rank {{rank}} {{stage}}",
    ),), True),
    Panel("Steps", "short", (
        ("sum by (replica, rank) (steps_per_second{})", "{{replica}} rank {{rank}}"),
    )),
    Panel("Verify steps by policy", "short", ((
        "sum by (rank, policy) (rate(verify_steps_total{}[$interval]))", "{{rank}} {{policy}}"),)),
    Panel("Tokens committed", "short", ((
        "sum by (rank) (rate(verify_tokens_total{}[$interval]))", "rank {{rank}} tokens/s"),)),
    Panel("Prefill steps", "short", ((
        "sum by (rank) (rate(prefill_steps_total{}[$interval]))", "rank {{rank}} steps/s"),)),
    Panel("KV slots that are used", "short",
          (("sum by (replica, rank) (kv_slots{state=\"used\",})", "{{replica}} rank {{rank}}"),)),
    Panel("Age of the last report", "s",
          (("max by (replica, rank) (report_age_seconds{})", "{{replica}} rank {{rank}}"),)),
)  # fmt: skip
"""Panels of the dashboard of ranks."""

DASHBOARDS: dict[str, tuple[str, Sequence[Panel], tuple[str, ...]]] = {
    "overstory_deployment": ("Overstory deployment", DEPLOYMENT, ("Deployment",)),
    "overstory_replica": ("Overstory replica", REPLICA, ("Deployment", "Replica")),
    "overstory_rank": ("Overstory rank", RANK, ("Deployment", "Replica", "Rank")),
}
"""File name -> title, panels, variables."""


@dataclass(frozen=True)
class Alert:
    """A rule: what holds for how long, how bad it is, and what to look at."""

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str


ALERTS = (
    Alert("OverstoryNotReady", "max by (deployment) (ready{}) == 0", 2, "critical",
          "{{ $labels.deployment }} cannot generate: GET /ready says why"),
    # A counter's first value is no increase to Prometheus.
    Alert("OverstoryReplicaFault",
          "sum by (deployment, kind) (increase(faults_total{}[10m])) > 0"
          " or sum by (deployment, kind) (faults_total{} unless faults_total{} offset 10m) > 0",
          0, "warning", "{{ $labels.deployment }}: a replica is {{ $labels.kind }}"),
    Alert("OverstoryReportsStopped",
          "max by (deployment, replica, rank) (report_age_seconds{}) > 60", 1, "warning",
          "rank {{ $labels.rank }} of {{ $labels.replica }} has not reported for a minute"),
    Alert("OverstoryRequestsFail",
          'sum by (deployment) (rate(requests_total{outcome=~"replica_lost|internal_error|'
          'request_timeout|not_ready|engine_busy",}[5m]))'
          " / sum by (deployment) (rate(requests_total{}[5m])) > 0.05", 5, "critical",
          "{{ $labels.deployment }}: more than 5% of requests fail"),
    Alert("OverstoryTurnsAway",
          'sum by (deployment) (rate(requests_total{outcome="queue_full",}[5m])) > 0', 10,
          "warning", "{{ $labels.deployment }} turns requests away: add replicas"),
    Alert("OverstorySlowFirstToken",
          "histogram_quantile(0.95, sum by (deployment, le) "
          "(rate(time_to_first_token_seconds_bucket{}[5m]))) > 10", 10, "warning",
          "{{ $labels.deployment }}: 1 of 20 requests waits over 10 s for its first token"),
    Alert("OverstoryKvFull",
          'sum by (deployment, replica) (kv_slots{state="used",rank="0",})'
          ' / sum by (deployment, replica) (kv_slots{rank="0",}) > 0.95', 10, "warning",
          "{{ $labels.replica }}: requests fill the KV pool"),
    Alert("OverstoryDraftsRejected",
          'sum by (deployment) (rate(draft_accepted_total{depth="1",}[30m]))'
          ' / sum by (deployment) (rate(draft_offered_total{depth="1",}[30m])) < 0.3', 30,
          "info", "{{ $labels.deployment }}: the drafter no longer fits what is asked"),
)  # fmt: skip
"""Rules that make sense for any deployment; thresholds are to be tuned."""


def expand(query: str, filters: str) -> str:
    """A query with metrics by their names in Ray's export and `filters` in their braces."""
    for metric in sorted(METRICS.values(), key=lambda one: -len(one.name)):
        bare = metric.full_name.removeprefix("overstory_")
        for suffix in ("_bucket", "") if metric.kind == "histogram" else ("",):
            query = _renamed(query, f"{bare}{suffix}{{", f"{metric.ray_name}{suffix}{{")
    query = query.replace(",}", f",{filters}}}" if filters else "}")
    return query.replace("{}", "{" + filters + "}")


def _renamed(query: str, old: str, new: str) -> str:
    """`old` as a whole name; not as the end of a longer one."""
    parts = query.split(old)
    out = parts[0]
    for part in parts[1:]:
        whole = not out or not (out[-1].isalnum() or out[-1] == "_")
        out += (new if whole else old) + part
    return out


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana imports it, with Ray's variables `datasource` and `Cluster`."""
    title, panels, scopes = DASHBOARDS[name]
    filters = ",".join(
        [f'{_SCOPES[scope][1]}=~"${scope}"' for scope in scopes] + ['ray_io_cluster=~"$Cluster"']
    )
    return {
        "title": title,
        "uid": name.replace("_", "-"),
        "tags": ["overstory"],
        "editable": True,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables(scopes)},
        "panels": [_panel(number, panel, filters) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel, filters: str) -> dict[str, Any]:
    custom = {"fillOpacity": 20 if panel.stacked else 5}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal"}}  # type: ignore[dict-item]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {
            "x": number % 2 * _WIDTH, "y": number // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expand(query, filters), "legendFormat": legend}
            for at, (query, legend) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _variables(scopes: Sequence[str]) -> list[dict[str, Any]]:
    interval: dict[str, Any] = {
        "name": "interval", "type": "interval", "query": "30s,1m,5m,15m,1h",
        "current": {"text": "1m", "value": "1m"},
    }  # fmt: skip
    source: dict[str, Any] = {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "hide": 2,
    }
    found = [source, interval, _values("Cluster", METRICS["ready"].ray_name, "ray_io_cluster", "")]
    narrower = ""
    for scope in scopes:
        metric, label = _SCOPES[scope]
        found.append(_values(scope, METRICS[metric].ray_name, label, narrower))
        narrower += ("," if narrower else "") + f'{label}=~"${scope}"'
    return found


def _values(name: str, metric: str, label: str, narrower: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values({metric}{{{narrower}}}, {label})",
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def alert_rules() -> dict[str, Any]:
    """A rule file of Prometheus."""
    rules = [
        {
            "alert": alert.name,
            "expr": expand(alert.expr, ""),
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "overstory", "rules": rules}]}


def files() -> dict[str, str]:
    """Name -> text of everything in `clusters/monitoring/` that is generated."""
    made = {f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS}
    made["alerts.yaml"] = yaml.safe_dump(alert_rules(), sort_keys=False, width=100)
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files().items():
        (folder / file).write_text(text)
