"""A real Prometheus, with the configuration that docs/monitoring.md gives, over two hosts.

Needs the Debian package prometheus, which `make test-full` installs as it does those of the hosts;
skipped without it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml
from fixtures_hosts import ray_here, start_cluster  # noqa: F401
from hosts_lab import Host, Lab
from leftovers import wait_until

from overstory.orchestrator.dashboards import DASHBOARDS

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "clusters" / "monitoring"
DEPLOYMENT = ROOT / "clusters" / "local" / "deployment.yaml"
UP_S, DOWN_S = 500.0, 120.0
DATA_S = 240.0
PORT = 9090

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs the Debian package prometheus",
    ),
]


def test_promtool_takes_the_alert_rules() -> None:
    done = subprocess.run(
        ["promtool", "check", "rules", str(MONITORING / "alerts.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(rules())} rules found" in done.stdout


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())[
        "groups"
    ][0]["rules"]
    return found


def configuration() -> str:
    """Of docs/monitoring.md, with a shorter interval: a test has minutes."""
    page = (ROOT / "docs" / "monitoring.md").read_text()
    block = re.search(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    assert block
    text = block[1].replace("[.../clusters", f"[{ROOT}/clusters")
    return "global: {scrape_interval: 2s, evaluation_interval: 5s}\n" + text


@contextmanager
def prometheus(host: Host) -> Iterator[None]:
    """Runs on a host."""
    host.write("/root/prometheus.yml", configuration())
    host.check("promtool", "check", "config", "/root/prometheus.yml")
    process = host.popen(
        "prometheus",
        "--config.file=/root/prometheus.yml",
        "--storage.tsdb.path=/root/prometheus",
        f"--web.listen-address=127.0.0.1:{PORT}",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def asked(host: Host, path: str) -> Any:
    """An answer of Prometheus' API; None while there is none."""
    done = host.run("curl", "-sg", f"http://127.0.0.1:{PORT}/api/v1/{path}")
    if done.returncode:
        return None
    said = json.loads(done.stdout)
    assert said["status"] == "success", said
    return said["data"]


def panel_queries() -> dict[str, str]:
    """`dashboard / panel / line` -> query, with all of Grafana's variables at "All"."""
    found = {}
    for name in DASHBOARDS:
        board = json.loads((MONITORING / f"{name}.json").read_text())
        for panel in board["panels"]:
            for target in panel["targets"]:
                text = re.sub(r"\$(Deployment|Replica|Rank|Cluster)", ".*", target["expr"])
                text = text.replace("$interval", "1m")
                assert "$" not in text, text
                found[f"{name} / {panel['title']} / {target['refId']}"] = text
    return found


def without_data(host: Host) -> list[str]:
    """Panels' queries that return nothing now."""
    empty = []
    for name, query in panel_queries().items():
        data = asked(host, f"query?query={quote(query)}")
        if data is None or not data["result"]:
            empty.append(name)
    return empty


class Asking:
    """Clients that ask one after another, until they are told to stop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]
        self.answered = 0

    def __enter__(self) -> "Asking":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _ask(self, number: int) -> None:
        body = {"model": "overstory-tiny", "prompt": "def f(x):\n", "max_tokens": 200}
        body |= {"ignore_eos": True, "seed": number, "stream": number % 2 == 0}
        command = ("-d", json.dumps(body), "-H", "content-type: application/json")
        while not self._stop.is_set():
            url = "http://127.0.0.1:8000/v1/completions"
            done = self._host.run("curl", "-s", "-f", *command, url, timeout_s=300)
            self.answered += done.returncode == 0


def test_every_panel_has_data_and_every_node_is_scraped(lab: Lab) -> None:
    head, other = lab.hosts["h1"], lab.hosts["h2"]
    start_cluster(lab, {"h1": 1, "h2": 1}, dashboard=True)
    sets = ("engine.tp_size=1", "resources.cpus_per_rank=0.9", "replicas=2")
    sets += (
        "engine.enable_metrics=true",
        "control.kv_hand_off=on",
        "control.kv_hand_off_tokens=16",
        "tree.policy=auto",
        "tree.measure_s=5",
    )
    flags = [part for change in sets for part in ("--set", change)]
    up = head.run("overstory", "deploy", str(DEPLOYMENT), *flags, timeout_s=UP_S)
    assert up.returncode == 0, up.stderr
    assert "3 Grafana dashboards in /tmp/ray/session" in up.stderr
    folder = "/tmp/ray/session_latest/metrics/grafana/dashboards"
    assert {f"{name}.json" for name in DASHBOARDS} <= set(head.check("ls", folder).split())
    with prometheus(head), Asking(head) as asking:
        wait_until(lambda: asking.answered >= 8, 120, "answers")
        wait_until(lambda: other.processes("ray::RankHost"), 300, "the replica of the other host")
        wait_until(lambda: _serving(head) == 2, 300, "both replicas to serve")
        wait_until(lambda: _scraped(head) >= {head.address, other.address}, 60, "every node")
        # Faults, moves, hand-overs and fragmentation have panels too: something has to happen.
        os.kill(other.processes("ray::RankHost")[0], signal.SIGKILL)
        wait_until(lambda: _serving(head) == 1, 60, "the loss to be noticed")
        wait_until(lambda: _serving(head) == 2, 300, "a new replica in its place")
        head.check("overstory", "defrag", "--dry-run", timeout_s=DOWN_S)
        head.check("overstory", "scale", "1", timeout_s=UP_S)
        deadline = time.monotonic() + DATA_S
        while (empty := without_data(head)) and time.monotonic() < deadline:
            time.sleep(2)
        assert not empty, empty
        groups = asked(head, "rules")["groups"]
        loaded = [rule for group in groups for rule in group["rules"]]
        assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules()]
        wait_until(lambda: _healthy(head), 60, "every rule to be evaluated")
        _assert_sglang_is_passed_on(head)
    head.check("overstory", "down", timeout_s=DOWN_S)


def _serving(head: Host) -> int:
    """Replicas with a rank that Prometheus has seen steps of."""
    done = head.run("overstory", "status", "--json")
    if done.returncode:
        return 0
    replicas = json.loads(done.stdout)["controller"]["replicas"]
    return sum(replica["phase"] == "leased" for replica in replicas)


def _scraped(head: Host) -> set[str]:
    """Addresses of nodes whose agents Prometheus reads."""
    targets = (asked(head, "targets") or {"activeTargets": []})["activeTargets"]
    return {t["labels"]["instance"].rpartition(":")[0] for t in targets if t["health"] == "up"}


def _healthy(head: Host) -> bool:
    groups = asked(head, "rules")["groups"]
    return all(rule["health"] == "ok" for group in groups for rule in group["rules"])


def _assert_sglang_is_passed_on(head: Host) -> None:
    names = set(asked(head, "label/__name__/values"))
    assert {"ray_sglang_num_running_reqs", "ray_sglang_prompt_tokens_total"} <= names, sorted(
        name for name in names if "sglang" in name
    )
    rows = asked(head, "query?query=ray_sglang_prompt_tokens_total")["result"]
    assert {row["metric"]["process"] for row in rows} >= {"front"}
    assert max(float(row["value"][1]) for row in rows) > 0
