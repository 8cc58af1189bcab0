"""Metrics: what requests and reports become, and that code, page, dashboards and alerts agree."""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_openai_endpoint import MAX_BODY, ScriptedBackend, World

from overstory.orchestrator.backend import ReplicaLost
from overstory.orchestrator.controller_metrics import ControllerMetrics
from overstory.orchestrator.dashboards import DASHBOARDS, alert_rules, dashboard, files
from overstory.orchestrator.endpoint import build_http_app
from overstory.orchestrator.fleet import Fleet, GivenUp
from overstory.orchestrator.generation import Piece
from overstory.orchestrator.meters import Meters
from overstory.orchestrator.metric_table import CONTROLLER, GATEWAY, METRICS, as_markdown
from overstory.orchestrator.openai_responses import Usage
from overstory.orchestrator.replica_health import HealthLimits
from overstory.orchestrator.request_metrics import RequestWatch

ROOT = Path(__file__).parents[2]


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Values by name and labels, `deployment` left out."""
    return {
        (sample.name, frozenset(item for item in sample.labels.items() if item[0] != "deployment")):
            sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }  # fmt: skip


def value(found: Any, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


def test_requests_are_counted_and_timed() -> None:
    backend = ScriptedBackend()
    world = World(backend)
    app = build_http_app(world.service, MAX_BODY)

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 13}
            assert (await client.post("/v1/completions", json=body)).is_success
            assert (await client.post("/v1/completions", json={**body, "stream": True})).is_success
            refused = {**body, "max_tokens": 1000}
            assert (await client.post("/v1/completions", json=refused)).status_code == 400
            backend.fail = ReplicaLost("gone")
            world.service._resume = type(world.service._resume)(0, 0.0)
            lost = await client.post("/v1/completions", json=body)
            assert lost.status_code == 503
            found = samples((await client.get("/metrics")).text)
        where = {"endpoint": "completions"}
        assert value(found, "overstory_requests_total", outcome="ok", **where) == 2
        long = "context_length_exceeded"
        assert value(found, "overstory_requests_total", outcome=long, **where) == 1
        assert value(found, "overstory_requests_total", outcome="replica_lost", **where) == 1
        assert value(found, "overstory_prompt_tokens_total", **where) == 9
        assert value(found, "overstory_generated_tokens_total", **where) == 2 * 13 + 3
        assert value(found, "overstory_time_to_first_token_seconds_count", **where) == 3
        assert value(found, "overstory_inter_chunk_seconds_count", **where) == 4
        assert value(found, "overstory_request_seconds_count", **where) == 4
        assert value(found, "overstory_queue_seconds_count") == 3
        assert value(found, "overstory_http_answers_total", status="200") == 2
        assert value(found, "overstory_http_answers_total", status="400") == 1
        assert value(found, "overstory_ready") == 1
        assert value(found, "overstory_sequences_limit") == 8

    asyncio.run(go())


def test_a_client_that_leaves_is_counted_as_such() -> None:
    backend = ScriptedBackend()
    world = World(backend)
    backend.gate = asyncio.Event()
    app = build_http_app(world.service, MAX_BODY)

    async def go() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 13}
            asking = asyncio.ensure_future(client.post("/v1/completions", json=body))
            async with asyncio.timeout(10):
                while not backend.calls:
                    await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            found = samples((await client.get("/metrics")).text)
        left = value(found, "overstory_requests_total", outcome="aborted", endpoint="completions")
        assert left == 1

    asyncio.run(go())


def test_times_of_a_stream() -> None:
    now = [0.0]
    meters = Meters(GATEWAY, "d", through_ray=False)
    watch = RequestWatch(meters, "chat", lambda: now[0], streamed=True)
    for at, index, tokens in ((1.0, 0, 3), (1.5, 0, 5), (1.5, 1, 9), (2.0, 1, 13)):
        now[0] = at
        watch.piece(Piece(index, "x"), Usage(7, tokens))
    now[0] = 3.0
    watch.ended("ok", Usage(7, 13))
    watch.ended("aborted", Usage(7, 13))
    found = samples(meters.text().decode())
    where = {"endpoint": "chat"}
    assert value(found, "overstory_time_to_first_token_seconds_sum", **where) == 1.0
    assert value(found, "overstory_inter_chunk_seconds_sum", **where) == 1.0
    assert value(found, "overstory_inter_chunk_seconds_count", **where) == 2
    assert value(found, "overstory_time_per_output_token_seconds_sum", **where) == 0.2
    assert value(found, "overstory_request_seconds_sum", **where) == 3.0
    assert value(found, "overstory_requests_total", outcome="ok", **where) == 1
    assert value(found, "overstory_requests_total", outcome="aborted", **where) is None


KINDS = ("SUSPECT", "DEAD", "given_up", "condemned")


def _status(forwards: int, phase: str = "leased", health: str = "HEALTHY") -> dict[str, Any]:
    counts = {
        "forwards": forwards, "requests": 2 * forwards, "rows": 32 * forwards,
        "tokens": 5 * forwards, "offered_by_depth": [2 * forwards, forwards],
        "accepted_by_depth": [forwards, 1], "stage_ns": {"verify": forwards * 10**6},
        "device_ns": forwards * 2 * 10**6, "idle_ns": forwards * 5 * 10**5, "idle_gaps": forwards,
    }  # fmt: skip
    rank = {
        "rank": 0, "age_s": 0.5, "policy": "tree-15", "steps_per_s": 10.0, "tokens_per_s": 50.0,
        "tokens_per_forward": 2.5,
        "load": {"running": 2, "waiting": 1, "free_slots": 70, "cached_slots": 10,
                 "max_slots": 100},
        "steps": {"verify": {"tree-15": counts}, "prefill": {"forwards": 3, "tokens": 90}},
    }  # fmt: skip
    replica = {
        "name": "r1", "phase": phase, "ranks": [rank], "fragmentation": {"contiguous_share": 0.75},
    }  # fmt: skip
    return {"replicas": [replica], "health": [{"name": "r1", "state": health}]}


def test_reports_become_metrics() -> None:
    meters = Meters(CONTROLLER, "d", through_ray=False)
    exported = ControllerMetrics(meters)
    exported.export(_status(4))
    exported.export(_status(6))
    found = samples(meters.text().decode())
    of = {"replica": "r1", "rank": "0", "policy": "tree-15"}
    assert value(found, "overstory_verify_steps_total", **of) == 6
    assert value(found, "overstory_verify_rows_total", **of) == 192
    deep = {"replica": "r1", "policy": "tree-15", "depth": "2"}
    assert value(found, "overstory_draft_offered_total", **deep) == 6
    assert value(found, "overstory_draft_accepted_total", **deep) == 1
    for name, seconds in (("verify", 0.006), ("device", 0.012), ("idle", 0.003)):
        stage = {"replica": "r1", "rank": "0", "stage": name}
        assert value(found, "overstory_stage_seconds_total", **stage) == pytest.approx(seconds)
    slots = {
        state: value(found, "overstory_kv_slots", replica="r1", rank="0", state=state)
        for state in ("free", "cached", "used")
    }
    assert slots == {"free": 70, "cached": 10, "used": 20}
    assert value(found, "overstory_kv_neighbours", replica="r1") == 0.75
    assert value(found, "overstory_tree_policy", replica="r1", policy="tree-15") == 1
    assert value(found, "overstory_replicas", phase="leased") == 1

    exported.export(_status(2))  # its ranks started anew: their counters begin at 0
    found = samples(meters.text().decode())
    assert value(found, "overstory_verify_steps_total", **of) == 8


def test_faults_are_counted_once_and_gauges_of_the_gone_are_zero() -> None:
    """Between two pictures a replica may die, be decided upon and begin anew."""
    meters = Meters(CONTROLLER, "d", through_ray=False)
    exported = ControllerMetrics(meters)
    fleet = Fleet(lambda: 0.0)

    def export(phase: str = "leased", condemned: int = 0) -> Any:
        faults = {"faults": fleet.faults(), "condemned": condemned}
        exported.export(_status(4, phase) | {"health": fleet.status()} | faults)
        return samples(meters.text().decode())

    def counted(found: Any) -> dict[str, float | None]:
        return {kind: value(found, "overstory_faults_total", kind=kind) for kind in KINDS}

    limits = HealthLimits(restarts=2, proven_s=0)
    fleet.begun("a", "", limits)
    fleet.begun("b", "", limits)
    fleet.ended("b")  # As it was told, in a restart say.
    found = export()
    assert counted(found) == dict.fromkeys(KINDS, 0)
    for name in ("a", "a1"):
        fleet.died(name, "killed")
        with contextlib.suppress(GivenUp):
            fleet.begun("a1", "", limits)
    for _ in range(3):
        found = export("lost", condemned=1)
    assert counted(found) == {
        "SUSPECT": 0, "DEAD": 2, "given_up": 1, "condemned": 1,
    }  # fmt: skip
    assert value(found, "overstory_replicas", phase="leased") == 0
    assert value(found, "overstory_replicas", phase="lost") == 1
    assert value(found, "overstory_engine_running", replica="r1") == 0


def test_what_the_automatic_policy_knows_of_its_drafter() -> None:
    meters = Meters(CONTROLLER, "d", through_ray=False)
    exported = ControllerMetrics(meters)
    status = _status(4)
    auto = {"drafter": "on", "switched_off": 1}
    status["replicas"][0]["ranks"][0]["auto"] = auto
    exported.export(status)
    found = samples(meters.text().decode())
    assert value(found, "overstory_drafter_in_use", replica="r1") == 1
    auto |= {"drafter": "off", "switched_off": 3}
    exported.export(status)
    found = samples(meters.text().decode())
    assert value(found, "overstory_drafter_in_use", replica="r1") == 0
    assert value(found, "overstory_drafter_switched_off_total", replica="r1") == 3
    status["replicas"][0]["ranks"][0]["auto"] = {"choice": None, "why": None}  # another rank's
    exported.export(status)


def test_how_often_candidates_are_right_under_any_policy() -> None:
    meters = Meters(CONTROLLER, "d", through_ray=False)
    exported = ControllerMetrics(meters)
    status = _status(4)
    nothing = {"spine": {}, "off_spine": {}}
    seen = {"spine": {1: {0: 0.75, 1: 0.125, 7: 0.5}}, "off_spine": {2: {0: 0.25}}}
    rank = status["replicas"][0]["ranks"][0]
    rank |= {"auto": None, "candidates": {"greedy": seen, "sampled": nothing}}
    exported.export(status)
    found = samples(meters.text().decode())
    share, of = "overstory_draft_candidate_share", {"replica": "r1", "kind": "greedy"}
    assert value(found, share, parent="spine", depth="1", candidate="0", **of) == 0.75
    assert value(found, share, parent="spine", depth="1", candidate="1", **of) == 0.125
    assert value(found, share, parent="off_spine", depth="2", candidate="0", **of) == 0.25
    assert value(found, share, parent="spine", depth="1", candidate="7", **of) is None


def test_names_follow_prometheus() -> None:
    assert len(METRICS) == len(GATEWAY) + len(CONTROLLER)
    for metric in METRICS.values():
        assert re.fullmatch("[a-z][a-z_]*", metric.name)
        assert not metric.name.endswith("_total")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(metric.buckets)
        if metric.kind == "histogram":
            assert metric.name.endswith(f"_{metric.unit}")


def test_the_page_is_generated() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == as_markdown()


# ---------------------------------------------------------------- dashboards and alerts


def _names(query: str) -> set[str]:
    return set(re.findall(r"ray_[a-z_]+", re.sub(r"ray_io_cluster", "", query)))


def _known() -> set[str]:
    names = {metric.ray_name for metric in METRICS.values()}
    histograms = [metric for metric in METRICS.values() if metric.kind == "histogram"]
    return names | {
        f"{m.ray_name}_{part}" for m in histograms for part in ("bucket", "sum", "count")
    }


def _queries() -> list[str]:
    panels = [
        target["expr"]
        for name in DASHBOARDS
        for panel in dashboard(name)["panels"]
        for target in panel["targets"]
    ]
    return panels + [rule["expr"] for rule in alert_rules()["groups"][0]["rules"]]


def test_the_files_are_generated() -> None:
    folder = ROOT / "clusters" / "monitoring"
    assert {file.name: file.read_text() for file in folder.iterdir()} == files()


@pytest.mark.parametrize("query", _queries())
def test_every_query_is_of_metrics_that_there_are(query: str) -> None:
    names = _names(query)
    assert names
    assert names <= _known()
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")
    for name, labels in re.findall(r"(ray_overstory_[a-z_]+)\{([^}]*)\}", query):
        bare = re.sub("_(bucket|sum|count)$", "", name)
        metric = next(m for m in METRICS.values() if m.ray_name in (name, bare))
        used = set(re.findall(r"([a-z_]+)(?:=|!)", labels))
        assert used <= {*metric.labels, "deployment", "ray_io_cluster"}, name


def test_every_outcome_in_a_query_is_one_that_requests_end_with() -> None:
    asked = {
        outcome
        for query in _queries()
        for group in re.findall(r'outcome!?=~?"([^"]*)"', query)
        for outcome in group.split("|")
    }
    assert len(asked) >= 6
    sources = [
        path.read_text()
        for path in (ROOT / "orchestrator").glob("*.py")
        if path.stem not in ("dashboards", "metric_table")
    ]
    assert [one for one in asked if not any(f'"{one}"' in text for text in sources)] == []


def test_every_metric_has_a_panel_and_every_panel_a_place() -> None:
    shown = set().union(*map(_names, _queries()))
    for metric in METRICS.values():
        assert any(name.startswith(metric.ray_name) for name in shown), metric.name
    uids = set()
    for name in DASHBOARDS:
        board = dashboard(name)
        uids.add(board["uid"])
        panels = board["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
        assert len(places) == len(panels)
        variables = {variable["name"] for variable in board["templating"]["list"]}
        assert {"datasource", "Cluster", "interval"} <= variables
        for panel in panels:
            assert panel["datasource"]["uid"] == "${datasource}"
            for target in panel["targets"]:
                assert set(re.findall(r"\$([A-Za-z]+)", target["expr"])) <= variables
    assert len(uids) == len(DASHBOARDS)


def test_a_counter_begins_with_nothing_counted() -> None:
    class Counted:
        def __init__(self) -> None:
            self.said: list[tuple[float, dict[str, str]]] = []

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses it"
            self.said.append((value, tags))

        def _record(self, value: float, tags: dict[str, str]) -> None:
            self.said.append((value, tags))

    meters, counted = Meters(CONTROLLER, "d", through_ray=False), Counted()
    meters._ray = {"faults": counted}
    for value_counted in (0, 0, 2, 0):
        meters.add("faults", value_counted, kind="DEAD")
    tags = {"deployment": "d", "kind": "DEAD"}
    assert counted.said == [(0, tags), (2, tags)]
    found = samples(meters.text().decode())
    assert value(found, "overstory_faults_total", kind="DEAD") == 2
    ControllerMetrics(meters)
    found = samples(meters.text().decode())
    assert value(found, "overstory_faults_total", kind="condemned") == 0
