"""Ray over the hosts of a lab, started as on real ones: `ray start` on each, one token for all."""

import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts_lab import Host, Lab, hosts_lab, why_no_lab

from overstory.orchestrator.local_ray import OBJECT_STORE_BYTES

DRIVER = Path(__file__).with_name("other_node.py")
RAY_PORT = 6379
RAY_START_S = 180.0

_FIXED_PORTS = {  # Drawn ones would have the raylet wait for its agents, see `ray_head`.
    "dashboard-agent-listen-port": 52365,
    "dashboard-agent-grpc-port": 52366,
    "runtime-env-agent-port": 52367,
    "metrics-export-port": 52368,
}


def start_ray(
    host: Host, cpus: int, *role: str, environment: Mapping[str, str] | None = None
) -> None:
    """`ray start` on a host; `environment` has more settings of Ray."""
    host.check(
        *("python", "-m", "overstory.orchestrator.ray_head", "start", *role),
        *(f"--{name}={port}" for name, port in _FIXED_PORTS.items()),
        *(f"--num-cpus={cpus}", f"--object-store-memory={OBJECT_STORE_BYTES}"),
        timeout_s=RAY_START_S,
        # The mode is said, for by itself a node that is given an address uses no token.
        environment={
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_AUTH_MODE": "token",
            **(environment or {}),
        },
    )


def start_cluster(
    lab: Lab,
    cpus: dict[str, int],
    environment: Mapping[str, str] | None = None,
    dashboard: bool = False,
) -> None:
    """Ray with its head on the first host of `cpus`, which says how many each one offers."""
    token = secrets.token_hex(32)
    head, *workers = (lab.hosts[name] for name in cpus)
    for host in (head, *workers):
        host.write("/root/.ray/auth_token", token)
    shown = f"--include-dashboard={str(dashboard).lower()}"
    head_role = ("--head", f"--port={RAY_PORT}", shown, "--no-monitor")
    start_ray(head, cpus[head.name], *head_role, environment=environment)
    for host in workers:
        start_worker(head, host, cpus[host.name], environment)


def start_worker(
    head: Host, host: Host, cpus: int, environment: Mapping[str, str] | None = None
) -> None:
    """Joins a host to the Ray of `head`."""
    address = f"--address={head.address}:{RAY_PORT}"
    start_ray(host, cpus, address, environment=environment)


def drive(head: Host, *arguments: str) -> Any:
    """What `other_node.py` finds on the Ray of a host."""
    said = head.check("python", str(DRIVER), *arguments, timeout_s=RAY_START_S)
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="session", autouse=True)
def ray_here() -> None:
    """In place of the other cluster tests' Ray on this machine: these have theirs in the lab."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Hosts `h1` and `h2`, without Ray."""
    if reason := why_no_lab():
        pytest.skip(reason)
    with hosts_lab("h1", "h2") as lab:
        yield lab
