"""Faults of a deployment under streams: noticed in time, told with their cause, mended, and no text
lost or changed.

Two replicas of one rank each and a controller; each test breaks one thing and waits until all is
whole again.
"""

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from fault_kit import Deployment, dead_fronts, pids_titled, starve
from fixtures_endpoint import REAL_START_S, _serve, pair_paths, ready
from leftovers import actors_of, placement_groups, wait_until

from overstory.orchestrator.app import build_app
from overstory.orchestrator.controller_actor import (
    _ControllerActor,
    controller_name,
    ensure_controller,
    find_controller,
)
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.rank_group import NAMESPACE
from overstory.orchestrator.serving import remove_app, replica_states, set_replicas
from overstory.orchestrator.spec import DeploymentSpec
from overstory.workers.tiny.paths import resolve_model

REPLICAS = 2
PROMPT = "def add(a, b):\n    "
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
SEEDED: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 7}
NOTICE_S = 10.0
"""A death is known within two seconds (`test_ranks_faults`); the rest is for a busy machine."""
UNRESPONSIVE_S = 15.0


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of these tests' own, to damage."""
    folder = tmp_path_factory.mktemp("pair") / "drafter"
    shutil.copytree(resolve_model(pair_paths()[1]), folder)
    return folder


@pytest.fixture(scope="module")
def broken(serve_here: int, drafter: Path) -> Iterator[Deployment]:
    """The deployment under test; nothing of it is left at the end."""
    spec = DeploymentSpec(
        name="faults",
        model=pair_paths()[0],
        drafter=str(drafter),
        served_model_name="tiny",
        replicas=REPLICAS,
        tree={"budget": 15},
        engine={"tp_size": 1, "context_length": 1024},
        resources={"cpus_per_rank": 0.5},
        gateway={"port": free_port(), "max_concurrent_requests": 8, "request_timeout_s": 300},
        control={"unresponsive_s": UNRESPONSIVE_S, "proven_s": 0},
    )
    ensure_controller(spec.name, spec.control)
    deployment = Deployment(_serve(build_app(spec), spec, REAL_START_S))
    deployment.await_whole(REPLICAS)
    yield deployment
    deployment.client.close()
    remove_app(spec.name)
    wait_until(lambda: not actors_of(spec.name), 60, "actors to go")
    wait_until(lambda: not deployment.rank_processes(), 30, "rank processes to end")
    wait_until(lambda: not deployment.replica_pids(), 30, "replica processes to end")
    wait_until(lambda: not placement_groups(), 30, "placement groups to go")
    assert not dead_fronts()


@pytest.fixture(scope="module")
def texts(broken: Deployment) -> dict[str, str]:
    """What undisturbed runs say."""
    streams = {key: broken.client.stream(PROMPT, **how) for key, how in HOW.items()}
    return {key: stream.result() for key, stream in streams.items()}


HOW = {"greedy": LONG, "seeded": SEEDED}


@pytest.fixture
def streams(broken: Deployment, texts: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Streams under way when the test begins. They end well and with the text of an undisturbed
    run, and everything is whole again."""
    broken.await_whole(REPLICAS)
    under_way = {key: broken.client.stream(PROMPT, **how) for key, how in HOW.items()}
    for stream in under_way.values():
        stream.wait_for(20)
    yield under_way
    assert {key: stream.result() for key, stream in under_way.items()} == texts
    broken.await_whole(REPLICAS)
    assert len(broken.rank_processes()) == REPLICAS, "a rank of a dead replica is left"
    wait_until(lambda: len(placement_groups()) == REPLICAS, 30, "a dead replica's group to go")
    assert not dead_fronts()


def await_told(broken: Deployment, words: str, timeout_s: float = NOTICE_S) -> float:
    """Seconds until the status gives a cause with these words."""
    return wait_until(
        lambda: any(words in row["reason"] for row in broken.health()), timeout_s, words
    )


def await_logged(folder: Path, pattern: str) -> None:
    """Until a process of Ray's workers has a line like this in its log."""
    wait_until(
        lambda: any(
            re.search(pattern, log.read_text(errors="replace")) for log in folder.glob("worker-*")
        ),
        NOTICE_S,
        f"a line with {pattern}",
    )


def test_a_killed_rank(broken: Deployment, streams: dict[str, Any]) -> None:
    """And what the logs say of it: who, and about which request."""
    pid = broken.busy_rank()["pid"]
    logs = Path(f"/proc/{pid}/fd/2").resolve().parent
    os.kill(pid, signal.SIGKILL)
    await_told(broken, "SIGKILL")
    await_logged(logs, r"(?m)^.*\[replica \w+ rank 0\] \S")
    await_logged(logs, r"(?m)^.*\[replica \w+ front\] engine lost: rank 0 ")
    await_logged(logs, r"(?m)^.*\[gateway of faults request \w+ \w+\] replica lost: ")


@pytest.mark.full
def test_a_stopped_rank(broken: Deployment, streams: dict[str, Any]) -> None:
    pid = broken.busy_rank()["pid"]
    os.kill(pid, signal.SIGSTOP)
    await_told(broken, "stopped by a signal", UNRESPONSIVE_S + 3 * NOTICE_S)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), NOTICE_S, "the stopped process to end")


@pytest.mark.full
def test_a_rank_without_memory(broken: Deployment, streams: dict[str, Any]) -> None:
    starve(broken.busy_rank()["pid"])
    more = [broken.client.stream("x" * 600 + str(i), max_tokens=4) for i in range(4)]
    await_told(broken, "out of memory", 6 * NOTICE_S)
    for stream in more:
        stream.result()


@pytest.mark.full
def test_a_killed_replica(broken: Deployment, streams: dict[str, Any]) -> None:
    before = broken.replica_pids()
    os.kill(min(before), signal.SIGKILL)
    await_told(broken, "gone without a word")
    wait_until(lambda: len(broken.replica_pids() - before) == 1, 60, "a new replica process")


@pytest.mark.full
def test_serve_s_controller_and_a_replica_killed_together(
    broken: Deployment, streams: dict[str, Any]
) -> None:
    """Nobody is there to see the replica go: neither it nor its placement group is forgotten."""
    before = broken.replica_pids()
    (controller,) = pids_titled("ray::ServeController")
    os.kill(controller, signal.SIGKILL)
    os.kill(min(before), signal.SIGKILL)
    wait_until(lambda: len(broken.replica_pids() - before) == 1, 120, "a new replica process")
    broken.await_whole(REPLICAS)
    assert len(placement_groups()) == REPLICAS


@pytest.mark.full
def test_a_killed_controller(broken: Deployment, streams: dict[str, Any]) -> None:
    controller = find_controller(broken.name)
    assert controller is not None
    pid = ray.get(controller.pid.remote(), timeout=30)
    ranks = broken.rank_processes()
    os.kill(pid, signal.SIGKILL)
    broken.await_whole(REPLICAS)  # It hears of the replicas anew.
    assert broken.rank_processes() == ranks, "no rank was touched"


@pytest.mark.full
def test_a_killed_gateway_ends_its_streams_soon_and_a_retry_gives_the_text(
    broken: Deployment, texts: dict[str, str]
) -> None:
    broken.await_whole(REPLICAS)
    ranks = broken.rank_processes()
    under_way = {key: broken.client.stream(PROMPT, **how) for key, how in HOW.items()}
    for stream in under_way.values():
        stream.wait_for(20)
    os.kill(broken.gateway_pid(), signal.SIGKILL)
    begun = time.monotonic()
    for key, stream in under_way.items():
        stream.done.exception(30)
        assert stream.finish is None, "the client can tell that it did not end"
        assert texts[key].startswith(stream.text)
    assert time.monotonic() - begun < NOTICE_S
    wait_until(lambda: ready(broken.endpoint.url), 60, "a new gateway")
    again = {key: broken.client.stream(PROMPT, **how) for key, how in HOW.items()}
    assert {key: stream.result() for key, stream in again.items()} == texts
    assert broken.rank_processes() == ranks, "no rank was touched"
    wait_until(broken.endpoint.idle, 30, "what the dead gateway had asked for is gone")


@pytest.mark.full
def test_a_gateway_that_is_killed_during_a_hand_off(
    broken: Deployment, texts: dict[str, str]
) -> None:
    """One of two replicas is to go, its streams are on their way to the other: their gateway dies.
    As without a hand-off they end soon, and a retry gives the text; the change goes on."""
    broken.await_whole(REPLICAS)
    under_way = [broken.client.stream(PROMPT, **how) for how in HOW.values() for _ in range(2)]
    for stream in under_way:
        stream.wait_for(20)
    set_replicas(broken.name, 1)
    wait_until(
        lambda: set(replica_states(broken.name).values()) != {"RUNNING"}, 60, "a replica to go"
    )
    os.kill(broken.gateway_pid(), signal.SIGKILL)
    begun = time.monotonic()
    assert len(replica_states(broken.name)) == REPLICAS, "the hand-off was over before"
    for stream in under_way:
        stream.done.exception(30)
        assert stream.finish is None
        assert any(text.startswith(stream.text) for text in texts.values())
    assert time.monotonic() - begun < NOTICE_S
    broken.await_whole(1)
    again = {key: broken.client.stream(PROMPT, **how) for key, how in HOW.items()}
    assert {key: stream.result() for key, stream in again.items()} == texts
    wait_until(broken.endpoint.idle, 30, "what the dead gateway had asked for is gone")
    wait_until(lambda: len(broken.rank_processes()) == 1, 30, "the ranks of the other to end")
    assert len(placement_groups()) == 1
    assert not dead_fronts()
    set_replicas(broken.name, REPLICAS)
    broken.await_whole(REPLICAS)


@pytest.mark.full
def test_two_controllers_at_once(broken: Deployment, streams: dict[str, Any]) -> None:
    """Which of them has a replica shows when one grants, so there is work all the time."""
    first = find_controller(broken.name)
    assert first is not None
    second = ray.remote(_ControllerActor).options(num_cpus=0).remote(broken.name, 16, 0.0, 0.9)

    def phases(controller: Any) -> list[str]:
        status = ray.get(controller.status.remote(), timeout=30)
        return sorted({row["phase"] for row in status["replicas"]} - {"lost"})

    def settled() -> bool:
        for stream in [broken.client.stream(PROMPT, **LONG) for _ in range(2)]:
            stream.result()
        return phases(first) == ["leased"] and phases(second) == ["replaced"]

    wait_until(settled, 120, "the one with the name to have both, the other none")
    ray.kill(second, no_restart=True)
    assert ray.get_actor(controller_name(broken.name), namespace=NAMESPACE) is not None


@pytest.mark.full
def test_a_drafter_that_went_bad_is_found_at_the_next_start_and_given_up(
    broken: Deployment, drafter: Path, texts: dict[str, str]
) -> None:
    """Unreadable: the replacement cannot start. After three tries the replica is given up; the
    other one goes on, and a user who has mended it asks for two again."""
    broken.await_whole(REPLICAS)
    weights = next(drafter.glob("*.safetensors"))
    whole = weights.read_bytes()
    stream = broken.client.stream(PROMPT, **LONG)
    stream.wait_for(20)
    weights.write_bytes(whole[:1000])
    try:
        os.kill(broken.busy_rank()["pid"], signal.SIGKILL)
        await_told(broken, "given up: 3 lives in a row failed", 180)
        reason = next(
            row["reason"]
            for row in broken.health()
            if row["state"] == "RETIRED" and "given up" in row["reason"]
        )
        assert "SafetensorError" in reason
        assert stream.result() == texts["greedy"]
        wait_until(
            lambda: broken.states() == ["HEALTHY"] and len(broken.replica_pids()) == 1,
            60,
            "Serve to stop trying",
        )
        assert ready(broken.endpoint.url)

        # The last one too: then nothing can come back by itself, and the endpoint says why.
        os.kill(broken.any_rank()["pid"], signal.SIGKILL)

        def told() -> bool:
            answer = httpx.get(broken.endpoint.url + "/ready", timeout=10)
            return answer.status_code == 503 and "given up: 3 lives in a row" in answer.text

        wait_until(told, 240, "the endpoint to say that nothing is left")
        assert "given up" in broken.endpoint.post(prompt="x", max_tokens=1).text
    finally:
        weights.write_bytes(whole)
    controller = find_controller(broken.name)
    ray.get(controller.asked_for.remote(REPLICAS), timeout=30)
    set_replicas(broken.name, REPLICAS)
    broken.await_whole(REPLICAS)
