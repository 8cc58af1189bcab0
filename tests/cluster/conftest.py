"""One small Ray for all cluster tests, started here and proved gone at the end."""

from collections.abc import Iterator

import pytest
import ray
from fixtures_endpoint import hasty, proxied, real, scripted, serve_here  # noqa: F401
from fixtures_hosts import lab  # noqa: F401
from leftovers import processes_naming, wait_until

from overstory.orchestrator.cluster import connect
from overstory.orchestrator.local_ray import start_local_ray, stop_local_ray

RAY_CPUS = 8
"""Logical: tests reserve small shares, so that they fit on any machine."""


@pytest.fixture(scope="session", autouse=True)
def ray_here() -> Iterator[str]:
    """A local Ray of these tests alone: own ports, own temp folder, no dashboard. Its address.

    Not `ray.init`: it cannot fix the ports of the raylet's agents, and a raylet that has to wait
    for agents to draw theirs gives up after 15 s, which a loaded machine exceeds.
    """
    record = start_local_ray(cpus=RAY_CPUS, gpus=0)
    try:
        connect(record.address, record)
        yield record.address
        ray.shutdown()
    finally:
        stop_local_ray(record)
    wait_until(
        lambda: not processes_naming(record.folder), 30, f"processes of {record.folder} to end"
    )
