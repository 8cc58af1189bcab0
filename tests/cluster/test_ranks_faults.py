"""Ranks that differ, stop, fail or are killed: who notices, what is said, who survives."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
import zmq
from fault_kit import starve
from leftovers import processes_naming, wait_until
from live_engine import LiveEngine, Stream

from overstory.orchestrator.controller_actor import end_controller, ensure_controller
from overstory.orchestrator.engine_errors import EngineDead
from overstory.orchestrator.lease import Command
from overstory.orchestrator.local_process import LocalProcess
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, RankGroup, RankPlan, call
from overstory.orchestrator.spec import ControlSpec
from overstory.workers.death_note import EXIT_DIVERGED, EXIT_LOOP_FAILED, EXIT_WATCHDOG
from overstory.workers.rank import RankIdentity

LEASE_STEPS = 32
"""Links of digests and reports come twice a lease."""
WATCHDOG_S = 12  # above the lease time-out of `LiveEngine`
NOTICE_S = 60.0
NO_MEMORY_S = 20.0
"""Until a rank that gets no memory is given up; 300 s is its watchdog's time-out."""
TOLD_S = 2.0
"""Longest from the end of a rank's process to the end of its streams."""


@pytest.fixture
def launch() -> Iterator[Callable[..., LiveEngine]]:
    """Launches engines; ends what is left of them and checks that nothing is."""
    engines: list[LiveEngine] = []

    def make(**options: object) -> LiveEngine:
        engines.append(LiveEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        end_controller(engine.deployment)
        engine.close()


@ray.remote(num_cpus=0.1)
class Neighbour:
    """Another actor of the same node, no part of any deployment."""

    def pid(self) -> int:
        return os.getpid()


def failure(stream: Stream) -> EngineDead:
    """What ended the stream."""
    with pytest.raises(EngineDead) as caught:
        stream.result()
    return caught.value


def raylet() -> psutil.Process:
    folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
    (found,) = [p for p in _processes(processes_naming(str(folder))) if "raylet" in p.name()]
    return found


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """Those that still run."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def test_a_rank_that_diverges_is_caught_within_one_lease(launch: Callable[..., LiveEngine]) -> None:
    live = launch()
    controller = ensure_controller(live.deployment, ControlSpec(lease_steps=LEASE_STEPS, lease_s=0))
    ray.get(controller.register.remote("r1", 2))
    stream = live.stream(1500)
    stream.wait_for(20)
    fault = Command("fault.swap_token", {"rank": 1}, drain=True)
    done = ray.get(controller.run_command.remote(fault), timeout=NOTICE_S)
    broken_at = done["r1"][1]

    death = failure(stream).death
    assert death.rank == 1
    assert death.exit_code == EXIT_DIVERGED
    assert f"ranks 0 and 1 differ at forward {broken_at + 1}: " in death.cause
    assert "emitted" in death.cause or "length" in death.cause
    assert death.forwards - broken_at <= LEASE_STEPS
    with pytest.raises(EngineDead):
        live.generate(4)
    status = ray.get(controller.status.remote(), timeout=30)
    assert status["replicas"][0]["phase"] == "lost"
    assert f"forward {broken_at + 1}" in status["replicas"][0]["reason"]


def test_a_stopped_rank_ends_its_replica_and_nothing_else(
    launch: Callable[..., LiveEngine],
) -> None:
    neighbour = Neighbour.remote()
    neighbour_pid, node = ray.get(neighbour.pid.remote()), raylet()
    live = launch(watchdog_timeout=WATCHDOG_S)
    stream = live.stream(1500)
    stream.wait_for(10)
    os.kill(live.process(1).pid, signal.SIGSTOP)

    death = failure(stream).death
    assert (death.rank, death.exit_code) == (0, EXIT_WATCHDOG)
    assert f"watchdog_timeout {WATCHDOG_S} s" in death.cause
    assert "does not answer; its process is stopped by a signal" in death.others[1]
    # Wherever the other one stood when it was stopped.
    collectives = ("broadcast", "all_reduce", "all_gather")
    assert any(name in death.detail for name in collectives), "stacks say where it waited"
    assert live.process(1).wait_gone(30), "a stopped process must be ended too"
    assert node.is_running()
    assert ray.get(neighbour.pid.remote()) == neighbour_pid
    ray.kill(neighbour)


def test_an_error_in_the_loop_ends_the_replica_with_its_traceback(
    launch: Callable[..., LiveEngine],
) -> None:
    live = launch(tp_size=1, policy="chain")
    stream = live.stream(1500)
    stream.wait_for(5)
    live.attach()
    live.grant(1000, "chain", Command("fault.raise", {"rank": 0, "message": "deliberate"}))
    error = failure(stream)
    assert (error.death.rank, error.death.exit_code) == (0, EXIT_LOOP_FAILED)
    assert "RuntimeError: deliberate" in error.death.cause
    assert "rank_faults.py" in error.death.detail
    assert error.death.phase == "serving"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "message", "memory"),
    [
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", False),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB.", True),
    ],
)
def test_an_error_of_cuda_on_one_rank_ends_both_and_is_named(
    launch: Callable[..., LiveEngine], kind: str, message: str, memory: bool
) -> None:
    """Raised where CUDA's would be; the other rank waits for it in a collective."""
    live = launch(policy="chain")
    stream = live.stream(1500)
    stream.wait_for(5)
    live.attach()
    fault = {"rank": 1, "kind": kind, "message": message}
    live.grant(1000, "chain", Command("fault.raise", fault))
    begun = time.monotonic()
    death = failure(stream).death
    assert time.monotonic() - begun < NOTICE_S / 4
    assert (death.rank, death.exit_code, death.out_of_memory) == (1, EXIT_LOOP_FAILED, memory)
    assert message in death.cause
    assert live.process(0).wait_gone(10), "its peer is ended"


@pytest.mark.full
def test_a_rank_that_is_killed_at_its_start_does_not_keep_the_other_waiting(
    launch: Callable[..., LiveEngine],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(launch)
        first, second = (starting_rank(rank) for rank in (0, 1))
        os.kill(second.pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(EngineDead) as caught:
            launching.result(NOTICE_S)
    assert time.monotonic() - begun < NOTICE_S / 2
    assert (caught.value.death.rank, caught.value.death.signal) == (1, "SIGKILL")
    assert LocalProcess(first.host, first.pid, first.started).wait_gone(10)


@pytest.mark.full
def test_a_rank_that_hangs_at_its_start_is_named_at_the_deadline() -> None:
    plan = RankPlan("test-hang", "r1", 2, cpus_per_rank=0.1, start_timeout_s=20)
    group = RankGroup.launch(plan)
    try:
        with ThreadPoolExecutor(1) as pool:
            importing = pool.submit(group.await_imports)
            wait_until(lambda: group.identities, 60, "ranks that import")
            os.kill(group.identities[1].pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError, match=r"not up within 20 s: .*rank 1 starting"):
                importing.result(NOTICE_S)
        for one in group.identities:
            assert LocalProcess(one.host, one.pid, one.started).wait_gone(10)
    finally:
        group.end()


def starting_rank(rank: int) -> RankIdentity:
    """The process of a rank that loads weights."""
    found: list[RankIdentity] = []

    def loads() -> bool:
        names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
        for name in names:
            if name.startswith("overstory/test-") and name.endswith(f"/rank-{rank}"):
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    phase = ray.get(call(actor, CONTROL, "phase"), timeout=30)["phase"]
                    if phase in ("weights", "memory"):
                        found.append(ray.get(call(actor, CONTROL, "identity"), timeout=30))
        return bool(found)

    wait_until(loads, 120, "a rank that loads weights")
    return found[0]


@pytest.mark.full
def test_a_killed_rank_is_noticed_and_named(launch: Callable[..., LiveEngine]) -> None:
    live = launch()
    stream = live.stream(1500)
    stream.wait_for(5)
    os.kill(live.process(1).pid, signal.SIGKILL)
    begun = time.monotonic()
    death = failure(stream).death
    assert time.monotonic() - begun < TOLD_S
    assert death.rank == 1
    assert (death.exit_code, death.signal, death.out_of_memory) == (None, "SIGKILL", False)
    assert "killed from outside" in death.cause
    assert death.log_tail
    assert live.process(0).wait_gone(10), "its peer is ended"


@pytest.mark.full
def test_a_crash_in_native_code_is_told_by_its_signal(launch: Callable[..., LiveEngine]) -> None:
    live = launch(tp_size=1)
    stream = live.stream(1500)
    stream.wait_for(5)
    os.kill(live.process(0).pid, signal.SIGSEGV)
    death = failure(stream).death
    assert death.signal == "SIGSEGV"
    assert "its process crashed" in death.cause


@pytest.mark.full
def test_a_rank_that_gets_no_memory_is_named_with_that_cause(
    launch: Callable[..., LiveEngine],
) -> None:
    live = launch()
    stream = live.stream(1500)
    stream.wait_for(5)
    starve(live.process(1).pid)
    more = [live.stream(8, list(range(40, 1500 + n))) for n in range(4)]
    death = failure(stream).death
    assert death.rank == 1
    assert death.out_of_memory, death
    assert death.exit_code == EXIT_LOOP_FAILED
    for one in more:
        failure(one)


@pytest.mark.full
@pytest.mark.parametrize("then", ["raise", "go on", "hang"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_gets_not_even_a_little_memory_is_gone_in_seconds(
    launch: Callable[..., LiveEngine], then: str, ranks: int
) -> None:
    """Whether or not it finds memory to raise with: its watchdog would take minutes."""
    live = launch(tp_size=ranks)
    stream = live.stream(1500)
    stream.wait_for(5)
    live.attach()
    begun = time.monotonic()
    live.grant(1000, "tree-7", Command("fault.exhaust", {"rank": ranks - 1, "then": then}))
    death = failure(stream).death
    assert time.monotonic() - begun < NO_MEMORY_S
    assert (death.rank, death.exit_code) == (ranks - 1, EXIT_LOOP_FAILED), death
    assert death.out_of_memory, death


@pytest.mark.full
def test_a_front_half_that_fails_ends_its_replica(launch: Callable[..., LiveEngine]) -> None:
    """The part of SGLang's tokenizer and detokenizer processes that a replica has: the loop that
    takes the engine's output."""
    live = launch(tp_size=1)
    stream = live.stream(1500)
    stream.wait_for(5)
    context = zmq.Context()
    try:
        with context.socket(zmq.PUSH) as socket:
            socket.connect(live.engine.port_args.tokenizer_ipc_name)
            socket.send(b"no message of SGLang's")
            death = failure(stream).death
    finally:
        context.destroy(linger=0)
    assert "the front half failed" in death.cause
    assert live.process(0).wait_gone(20)


@pytest.mark.full
def test_a_rank_that_does_not_answer_is_ended_even_when_idle(
    launch: Callable[..., LiveEngine],
) -> None:
    live = launch(unresponsive_s=8.0)
    assert len(live.generate(4)) == 4
    os.kill(live.process(1).pid, signal.SIGSTOP)
    wait_until(lambda: live.engine.death is not None, NOTICE_S, "the stopped rank to be noticed")
    death = live.engine.death
    assert death is not None
    assert death.rank == 1
    assert "no sign of life" in death.cause
    assert "stopped by a signal" in death.cause
