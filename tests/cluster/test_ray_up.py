"""`ray up` and `ray down` with `clusters/local/ray.yaml`, over SSH, by the steps that it gives."""

import json
import re
from pathlib import Path

import pytest
from fixtures_hosts import drive, ray_here  # noqa: F401
from hosts_lab import Host, Lab
from leftovers import wait_until

CLUSTER = Path(__file__).parents[2] / "clusters" / "local"
RECIPE = CLUSTER / "ray.yaml"
UP_S, DOWN_S, DEPLOY_S = 240.0, 120.0, 400.0
OLD_AUTOSCALER = {"RAY_UP_enable_autoscaler_v2": "0"}

pytestmark = pytest.mark.full


def make_token(host: Host) -> None:
    assert "ray get-auth-token --generate" in RECIPE.read_text()
    host.check("bash", "-c", "ray get-auth-token --generate >/dev/null")


def ray_processes(host: Host) -> list[int]:
    names = ("gcs_server", "raylet", "ray::", "log_monitor.py", "dashboard.py", "/monitor.py")
    return [pid for name in names for pid in host.processes(name)]


def assert_no_ray(host: Host) -> None:
    wait_until(lambda: not ray_processes(host), 20, f"Ray on {host.name} to end")


def assert_told_by_name(host: Host) -> None:
    """The dashboard's table of actors says what each is."""
    asked = ("ray", "list", "actors", "--detail", "--format", "json", "--filter", "state=ALIVE")
    listed = json.loads(host.check(*asked, environment={"RAY_AUTH_MODE": "token"}))
    shown = sorted(re.sub(r"replica \w+ ", "replica R ", row["repr_name"]) for row in listed)
    assert shown.count("replica R rank 0") == shown.count("replica R rank 1") == 1, shown
    assert "controller of tiny" in shown
    names = {row["name"] for row in listed}
    assert any("tiny#Gateway#" in name for name in names), names
    assert any("tiny#Replica#" in name for name in names), names


def test_as_it_is_written(lab: Lab) -> None:
    host = lab.hosts["h1"]
    make_token(host)
    host.check("ray", "up", "-y", str(RECIPE), timeout_s=UP_S)
    up = host.run("overstory", "deploy", str(CLUSTER / "deployment.yaml"), timeout_s=DEPLOY_S)
    assert up.returncode == 0, up.stderr
    assert f"using Ray at {host.address}:6379 (running on this machine)" in up.stderr
    text = host.check("overstory", "generate", "def add(a, b):", "--max-tokens", "8")
    assert text.strip()
    assert_told_by_name(host)
    host.check("overstory", "down", timeout_s=DOWN_S)
    assert ray_processes(host), "a Ray that is not ours stays"
    assert drive(host, "left") == {"actors": [], "placement_groups": []}
    host.check("ray", "down", "-y", str(RECIPE), timeout_s=DOWN_S)
    assert_no_ray(host)


def test_with_another_machine(lab: Lab) -> None:
    head, worker = lab.hosts.values()
    text = RECIPE.read_text()
    for written, wanted in (
        ("head_ip: 127.0.0.1", f"head_ip: {head.address}"),
        ("worker_ips: []", f"worker_ips: [{worker.address}]"),
    ):
        assert text.count(written) == 1
        text = text.replace(written, wanted)
    head.write("/root/ray.yaml", text)
    make_token(head)
    head.check("ray", "up", "-y", "ray.yaml", timeout_s=UP_S, environment=OLD_AUTOSCALER)
    assert drive(head, "nodes", "2") == [head.address, worker.address]
    found = drive(head, "seam", worker.address)
    assert found["host"] == "h2"
    assert all(found["seam"].values())
    stranger = "import ray; ray.init('10.77.0.1:6379')"
    refused = worker.run("python", "-c", stranger, environment={"RAY_AUTH_MODE": "disabled"})
    assert refused.returncode == 1
    assert "InvalidAuthToken" in refused.stderr
    head.check("ray", "down", "-y", "ray.yaml", timeout_s=DOWN_S)
    assert_no_ray(head)
    ssh = ("ssh", "-o", "StrictHostKeyChecking=no", worker.address)
    head.check(*ssh, "ray stop --force", timeout_s=DOWN_S)
    assert_no_ray(worker)
