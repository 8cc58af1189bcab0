"""A replica on other hosts than the command line: real Ray over a lab's hosts.

`h1` holds Ray's head, the gateway and the user's commands; `h2` has more CPUs, so that what needs
them must go there.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_hosts import drive, ray_here, start_cluster  # noqa: F401
from hosts_lab import Host, Lab
from leftovers import wait_until

from overstory.orchestrator.tokenizer import load_tokenizer
from overstory.workers.tiny.oracle import Oracle
from overstory.workers.tiny.paths import resolve_model

DEPLOYMENT = Path(__file__).parents[2] / "clusters" / "local" / "deployment.yaml"
CPUS = {"h1": 2, "h2": 3}
BOTH_ON_H2 = "resources.cpus_per_rank=1.5"
ONE_ON_EACH = "resources.cpus_per_rank=1.9"
UP_S, DOWN_S = 400.0, 120.0
PROMPTS = ("def add(a, b):", "import os\n\n\ndef main(path):\n", "class Queue:\n    def")
NEW = 24


@pytest.fixture(scope="module")
def cluster(lab: Lab) -> Lab:
    """Ray over `h1` and `h2`."""
    start_cluster(lab, CPUS)
    return lab


@pytest.fixture
def hosts(cluster: Lab) -> Iterator[tuple[Host, Host]]:
    """Both; whatever was deployed from one of them is taken down."""
    yield cluster.hosts["h1"], cluster.hosts["h2"]
    for host in cluster.hosts.values():
        if host.run("overstory", "status", "--json").returncode == 0:
            host.run("overstory", "down", timeout_s=DOWN_S)


def deploy(head: Host, *changes: str) -> subprocess.CompletedProcess[str]:
    sets = [part for change in changes for part in ("--set", change)]
    wait = ("--timeout", str(UP_S - 60))
    return head.run("overstory", "deploy", str(DEPLOYMENT), *sets, *wait, timeout_s=UP_S)


def ranks_by_host(cluster: Lab) -> dict[str, int]:
    return {name: len(host.processes("ray::RankHost")) for name, host in cluster.hosts.items()}


def assert_generates_what_the_oracle_does(head: Host) -> None:
    tokenizer = load_tokenizer(resolve_model("overstory-tiny"))
    oracle = Oracle.load()
    for prompt in PROMPTS:
        expected = oracle.greedy(tokenizer.encode(prompt), NEW)
        assert len(expected) == NEW, "a prompt that ends early proves less"
        said = head.check("overstory", "generate", prompt, "--max-tokens", str(NEW))
        assert said == tokenizer.decode(expected) + "\n"


def assert_nothing_left(cluster: Lab) -> None:
    assert drive(cluster.hosts["h1"], "left") == {"actors": [], "placement_groups": []}
    for name, host in cluster.hosts.items():
        for what in ("ray::RankHost", "ray::ServeReplica", "ray::ProxyActor"):
            wait_until(lambda h=host, w=what: not h.processes(w), 10, f"{what} on {name} to end")
        assert host.check("ls", "/dev/shm").split() == []
        assert "overstory" not in host.check("ls", "/tmp")
    reached = cluster.hosts["h1"].run("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000")
    assert reached.returncode == 1, "the endpoint's port is still open"


def test_a_worker_on_another_node_has_the_seam(cluster: Lab) -> None:
    second = cluster.hosts["h2"]
    found = drive(cluster.hosts["h1"], "seam", second.address)
    assert (found["host"], found["address"]) == ("h2", second.address)
    assert len(found["seam"]) > 10
    assert all(found["seam"].values()), found["seam"]


def test_a_replica_on_another_host_is_used_from_the_head(
    cluster: Lab, hosts: tuple[Host, Host]
) -> None:
    head, _ = hosts
    up = deploy(head, BOTH_ON_H2)
    assert up.returncode == 0, up.stderr
    assert "2 nodes with 5 CPUs" in up.stderr
    assert "1 x 2 ranks on h2" in up.stderr
    assert ranks_by_host(cluster) == {"h1": 0, "h2": 2}
    assert_generates_what_the_oracle_does(head)
    down = head.run("overstory", "down", timeout_s=DOWN_S)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(cluster)


def test_doctor_looks_at_every_host_and_the_ways_between(cluster: Lab) -> None:
    head, other = cluster.hosts["h1"], cluster.hosts["h2"]
    nodes = ("--nodes", "2", "--json")
    looked = head.run("overstory", "doctor", str(DEPLOYMENT), *nodes, timeout_s=UP_S)
    said = json.loads(looked.stdout)
    assert looked.returncode == 0, said["findings"]
    assert {n["name"]: n["address"] for n in said["nodes"]} == {
        "h1": head.address,
        "h2": other.address,
    }
    assert [n["head"] for n in said["nodes"]] == [True, False]
    assert len({model["digest"] for n in said["nodes"] for model in n["models"]}) == 2
    for link in said["links"]:
        assert link["seconds"] < 0.1
        assert link["seen_as"] == cluster.hosts[link["source"]].address
    assert len(said["links"]) == 2
    assert drive(head, "left") == {"actors": [], "placement_groups": []}


def test_doctor_finds_a_model_that_one_host_lacks(cluster: Lab) -> None:
    head = cluster.hosts["h1"]
    head.check("cp", "-r", resolve_model("overstory-tiny"), "/root/only-here")
    here = ("--set", "model=/root/only-here")
    looked = head.run("overstory", "doctor", str(DEPLOYMENT), *here, timeout_s=UP_S)
    assert looked.returncode == 1
    assert "error: models h2: model: no /root/only-here/config.json" in looked.stdout
    assert "  fix: copy the model there" in looked.stdout


def test_an_endpoint_out_of_the_user_s_reach_is_refused(hosts: tuple[Host, Host]) -> None:
    head, other = hosts
    up = deploy(other)
    assert up.returncode == 1
    assert f"gateway.host: the endpoint listens on the head node {head.address}" in up.stderr
    assert "] placement" not in up.stderr


@pytest.mark.full
def test_ranks_of_one_replica_on_two_hosts_used_from_the_worker(
    cluster: Lab, hosts: tuple[Host, Host]
) -> None:
    head, other = hosts
    up = deploy(other, ONE_ON_EACH, "gateway.host=0.0.0.0")
    assert up.returncode == 0, up.stderr
    assert "1 x 2 ranks on h1, h2" in up.stderr
    assert f"tiny is ready at http://{head.address}:8000" in up.stdout
    assert ranks_by_host(cluster) == {"h1": 1, "h2": 1}
    assert_generates_what_the_oracle_does(other)
    (replica,) = json.loads(other.check("overstory", "status", "--json"))["controller"]["replicas"]
    assert replica["phase"] == "leased"
    assert replica["digests_equal_up_to"] > 0
    # Only the other host's Ray can end this one, and it cannot take Ray's message.
    (away,) = other.processes("ray::RankHost")
    os.kill(away, signal.SIGSTOP)
    down = other.run("overstory", "down", timeout_s=DOWN_S)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(cluster)


@pytest.mark.full
def test_why_a_rank_on_another_host_failed_is_told_on_the_head(
    cluster: Lab, hosts: tuple[Host, Host]
) -> None:
    head, other = hosts
    # Whole on one host and broken on the other: only the rank there fails.
    for host in hosts:
        host.check("cp", "-r", resolve_model("overstory-tiny"), "/root/model")
    other.check("sh", "-c", "truncate --size=1000 /root/model/*.safetensors")
    model = ("model=/root/model", "served_model_name=overstory-tiny")
    up = deploy(head, ONE_ON_EACH, *model)
    assert up.returncode == 1
    failed = re.search(r"rank (\d) died \(exit code", up.stderr)
    assert failed, up.stderr
    assert "SafetensorError" in up.stderr
    assert "last log lines" in up.stderr
    assert_nothing_left(cluster)
