"""Twenty lives of a replica: memory and everything else is where it was after the first."""

from collections.abc import Iterator

import psutil
import pytest
from fault_kit import Deployment, dead_fronts, memory_of, workers
from fixtures_endpoint import REAL_START_S, _serve, pair_paths
from leftovers import placement_groups, wait_until

from overstory.orchestrator.app import build_app
from overstory.orchestrator.controller_actor import ensure_controller
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.serving import remove_app
from overstory.orchestrator.spec import DeploymentSpec

LIVES = 20
SLACK_BYTES = 150 * 2**20
"""A rank's heap differs by tens of MiB from life to life; what 20 lives leak would be more."""
PROMPT = "def add(a, b):\n    "

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]


@pytest.fixture
def lives(serve_here: int) -> Iterator[Deployment]:
    """One replica of one rank."""
    target, drafter = pair_paths()
    spec = DeploymentSpec(
        name="lives",
        model=target,
        drafter=drafter,
        served_model_name="tiny",
        tree={"budget": 15},
        engine={"tp_size": 1, "context_length": 1024},
        resources={"cpus_per_rank": 0.5},
        gateway={"port": free_port(), "request_timeout_s": 300},
        control={"proven_s": 0},
    )
    ensure_controller(spec.name, spec.control)
    deployment = Deployment(_serve(build_app(spec), spec, REAL_START_S))
    yield deployment
    deployment.client.close()
    remove_app(spec.name)


def end_process(pid: int) -> None:
    """Kills a process and waits until it is gone."""
    process = psutil.Process(pid)
    process.kill()
    wait_until(lambda: not process.is_running(), 60, "the process to end")


def settled(deployment: Deployment) -> int:
    """Memory of all processes once the replica has worked a little and nothing runs."""
    deployment.await_whole(1)
    streams = [deployment.client.stream(PROMPT, max_tokens=100, temperature=0) for _ in range(3)]
    assert len({stream.result() for stream in streams}) == 1
    wait_until(deployment.endpoint.idle, 30, "idle")
    return memory_of(process.pid for process in workers())


def test_twenty_lives(lives: Deployment) -> None:
    before, processes = settled(lives), len(workers())
    memory = []
    for life in range(LIVES):
        pid = min(lives.rank_processes() if life % 2 else lives.replica_pids())
        end_process(pid)
        memory.append(settled(lives))
        print(f"life {life}: {memory[-1] / 2**20:.0f} MiB, before {before / 2**20:.0f}", flush=True)
    assert memory[-1] < before + SLACK_BYTES
    assert len(workers()) <= processes + 2, "Ray keeps a spare worker or two"
    assert (len(lives.rank_processes()), len(lives.replica_pids())) == (1, 1)
    assert len(placement_groups()) == 1
    assert not dead_fronts()
