"""Restarts, crashes and other numbers of replicas under load: no request fails, none is altered.

The commands run as a user runs them, before the real engine on a CPU.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from leftovers import wait_until
from load_clients import Seen, ask, load, questions
from test_deploy import DOWN_S, LOCAL, UP_S, Shell

from overstory.orchestrator.local_ray import free_port, stop_local_ray
from overstory.orchestrator.state import read_state
from overstory.workers.tiny.paths import resolve_model

pytestmark = pytest.mark.timeout(1200)  # minutes where two cores are all there is

MODEL = "overstory-tiny"
LOOK_S = 2.0
"""Between two commands that look: each one takes a core for a second, which the start that is
waited for would have."""
SMALL = ("engine.tp_size=1", "tree.budget=15", "engine.context_length=1024")


class Deployed:
    """A deployment by the command line, and its endpoint."""

    def __init__(self, folder: Path) -> None:
        self.shell = Shell(folder)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.file = folder / "deployment.yaml"
        shutil.copy(LOCAL, self.file)
        self.settings: list[str] = []

    def up(self, *settings: str) -> None:
        self.settings = [f"gateway.port={self.port}", *SMALL, *settings]
        done = self.shell.deploy(*self.settings)
        assert done.returncode == 0, done.stderr

    def down(self) -> None:
        """Nothing of it stays."""
        self.shell("down", timeout_s=DOWN_S)
        left = read_state(self.shell.state).local_ray
        if left is not None:
            stop_local_ray(left)

    def replicas(self) -> dict[str, int]:
        """Names of the replicas under lease, with the pid of rank 0."""
        picture = json.loads(self.shell("status", "--json", timeout_s=UP_S).stdout)
        return {
            row["name"]: row["ranks"][0]["pid"]
            for row in picture["controller"]["replicas"]
            if row["phase"] == "leased"
        }

    def changed(self, *settings: str) -> list[str]:
        """Arguments of a restart with the file and these settings over it."""
        sets = [part for one in (*self.settings, *settings) for part in ("--set", one)]
        return ["restart", str(self.file), *sets]


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    deployed = Deployed(tmp_path)
    yield deployed
    deployed.down()


def run(deployed: Deployed, *arguments: str) -> subprocess.CompletedProcess[str]:
    return deployed.shell(*arguments, timeout_s=UP_S)


def moves(url: str) -> dict[str, int]:
    """Sequences that went on on another replica, by why."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.findall(r'overstory_sequences_moved_total\{.*why="(\w+)"\} ([0-9.]+)', text)
    return {why: int(float(count)) for why, count in found}


def assert_unharmed(seen: Seen) -> None:
    assert seen.failed == []
    assert seen.changed == []
    assert seen.answers > 0


def test_restart_crash_and_scale_under_load(deployed: Deployed) -> None:
    """Two replicas, and room for one more beside them."""
    deployed.up("replicas=2", "resources.cpus_per_rank=0.6")
    first = deployed.replicas()
    assert len(first) == 2
    with load(deployed.url, questions(MODEL, 8, 48), clients=3) as seen:
        _restart_refused_and_done(deployed)
        second = deployed.replicas()
        assert not set(first) & set(second)
        _crash_one(deployed, second)
        fewer = run(deployed, "scale", "1")
        assert fewer.returncode == 0, fewer.stderr
        moved = moves(deployed.url)
    assert_unharmed(seen)
    assert moved.get("leaving", 0) >= 1, moved  # else nothing was under way when it mattered
    assert moved.get("lost", 0) >= 1, moved


def _restart_refused_and_done(deployed: Deployed) -> None:
    fixed = run(deployed, *deployed.changed("gateway.max_queued_requests=7", "replicas=3"))
    assert fixed.returncode == 1
    assert "gateway.max_queued_requests: 64 -> 7 cannot change in a restart" in fixed.stderr
    assert "overstory scale 3" in fixed.stderr
    with _one_of_two_at_once(deployed, "tree.budget=7", "environment.SGLANG_LOG_MS=1") as told:
        assert "starts beside its predecessor" in told
        assert "tree.budget: 15 -> 7" in told
        # Its command is gone, the restart is Serve's.
        for change in (("restart",), ("scale", "1"), deployed.changed("tree.budget=3")):
            refused = run(deployed, *change)
            assert refused.returncode == 1, refused.stderr
            assert "is being changed already (replicas: " in refused.stderr
            assert "): a restart" in refused.stderr
    followed = run(deployed, "restart", "--follow")
    assert followed.returncode == 0, followed.stderr
    seen = re.findall(r"replica (\w+) took over after", followed.stderr)
    for kept in re.findall(r"new already, and kept: (.*)", followed.stderr):
        seen += kept.split(", ")
    assert sorted(seen) == sorted(deployed.replicas())
    assert read_state(deployed.shell.state).deployments["tiny"].spec["tree"]["budget"] == 7
    for pid in deployed.replicas().values():
        assert b"SGLANG_LOG_MS=1\0" in Path(f"/proc/{pid}/environ").read_bytes()


@contextmanager
def _one_of_two_at_once(deployed: Deployed, *settings: str) -> Iterator[str]:
    """Two restarts in the same moment: one is refused, and the other one's command is killed once
    it has begun. What that one told. Its first successor stands still until the block ends."""
    files = [deployed.file.with_name(f"restart-{number}") for number in range(2)]
    before = _fronts(deployed)
    both = [
        subprocess.Popen(
            [deployed.shell.script, *deployed.changed(*settings)],
            stderr=file.open("w"),
            env=deployed.shell.environment,
        )
        for file in files
    ]
    with _successor_stands_still(deployed, before):
        wait_until(lambda: any(one.poll() is not None for one in both), UP_S, "one to be refused")
        ends = [one.poll() for one in both]
        texts = [file.read_text() for file in files]
        assert sorted(ends, key=str) == [1, None], texts
        refused, going = ends.index(1), ends.index(None)
        assert "is being changed already by another command" in texts[refused]
        wait_until(lambda: "0 of 2 replicas are new" in files[going].read_text(), UP_S, "its look")
        both[going].kill()
        both[going].wait(60)
        yield files[going].read_text()


@contextmanager
def _successor_stands_still(deployed: Deployed, before: set[int]) -> Iterator[None]:
    """A restart stays under way, however long commands take on a busy machine: the next replica's
    process that is not among `before` is stopped while it starts, until the block ends."""
    wait_until(lambda: _fronts(deployed) - before, UP_S, "a successor", 0.1)
    (successor,) = _fronts(deployed) - before
    os.kill(successor, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # Serve ends it where all has stopped.
            os.kill(successor, signal.SIGCONT)


def _fronts(deployed: Deployed) -> set[int]:
    """Pids of the replicas' own processes, of those that start too."""
    own = read_state(deployed.shell.state).local_ray
    assert own is not None
    found = set()
    for one in psutil.Process(own.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::ServeReplica:tiny:Replica" in " ".join(one.cmdline()):
                found.add(one.pid)
    return found


def _crash_one(deployed: Deployed, before: dict[str, int]) -> None:
    """Kill one rank and wait for its replica's successor."""
    os.kill(next(iter(before.values())), signal.SIGKILL)

    def replaced() -> bool:
        now = deployed.replicas()
        return len(now) == len(before) and now != before

    wait_until(replaced, UP_S, "the replica is replaced", LOOK_S)


@pytest.mark.full
def test_a_restart_stops_at_a_replica_that_fails(deployed: Deployed) -> None:
    deployed.up("replicas=1", "resources.cpus_per_rank=0.6", "tree.budget=7")
    before = deployed.replicas()
    broken = deployed.file.parent / "broken"
    shutil.copytree(resolve_model("overstory-tiny-drafter"), broken)
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    bad = run(deployed, *deployed.changed("replicas=1", "tree.budget=7", f"drafter={broken}"))
    assert bad.returncode == 1
    assert "stopped at a replica that failed (0 of 1 replicas are new" in bad.stderr, bad.stderr
    assert "rank 0 died" in bad.stderr
    assert "SafetensorError" in bad.stderr
    assert deployed.replicas() == before
    assert deployed.shell("generate", "x =", "--max-tokens", "4").returncode == 0
    more = run(deployed, "scale", "2")
    assert more.returncode == 1
    assert "has stopped at a replica that failed" in more.stderr, "Serve would start none, ever"
    back = run(deployed, "restart")
    assert back.returncode == 0, back.stderr
    assert not set(before) & set(deployed.replicas())


@pytest.mark.full
def test_a_stopped_restart_goes_on_where_it_stopped(deployed: Deployed) -> None:
    """The drafter's file breaks once the first of two is new, and is mended: the first stays."""
    deployed.up("replicas=2", "resources.cpus_per_rank=0.6", "tree.budget=7")
    before = deployed.replicas()
    drafter = deployed.file.parent / "drafter"
    shutil.copytree(resolve_model("overstory-tiny-drafter"), drafter)
    whole = {file: file.read_bytes() for file in drafter.glob("*.safetensors")}
    asked = deployed.changed("replicas=2", "tree.budget=7", f"drafter={drafter}")
    said = deployed.file.with_name("restart")
    command = subprocess.Popen(
        [deployed.shell.script, *asked], stderr=said.open("w"), env=deployed.shell.environment
    )
    wait_until(lambda: "1 of 2 replicas are new" in said.read_text(), UP_S, "the first one")
    for file, content in whole.items():
        file.write_bytes(content[:1000])
    assert command.wait(UP_S) == 1, said.read_text()
    assert "stopped at a replica that failed (1 of 2 replicas are new" in said.read_text()
    half_way = deployed.replicas()
    fresh = half_way.keys() - before.keys()
    assert len(fresh) == 1
    for file, content in whole.items():
        file.write_bytes(content)
    again = run(deployed, *asked)
    assert again.returncode == 0, again.stderr
    assert f"new already, and kept: {fresh.pop()}" in again.stderr
    after = deployed.replicas()
    assert half_way.items() & after.items() == half_way.items() - before.items()
    assert not after.keys() & before.keys()
    assert len(after) == 2


@pytest.mark.full
def test_a_loss_during_a_restart_stops_it_and_the_next_one_goes_on(deployed: Deployed) -> None:
    """The first of two successors dies while the second one starts."""
    deployed.up("replicas=2", "resources.cpus_per_rank=0.6")
    before, old = deployed.replicas(), _fronts(deployed)
    said = deployed.file.with_name("restart")
    with load(deployed.url, questions(MODEL, 8, 48), clients=3) as seen:
        command = subprocess.Popen(
            [deployed.shell.script, *deployed.changed("replicas=2", "tree.budget=7")],
            stderr=said.open("w"),
            env=deployed.shell.environment,
        )
        wait_until(lambda: len(_fronts(deployed) - old) == 1, UP_S, "the first successor", 0.1)
        with _successor_stands_still(deployed, _fronts(deployed)):
            fresh: list[int] = []

            def leased() -> bool:
                now = deployed.replicas().items()
                fresh[:] = [pid for name, pid in now if name not in before]
                return bool(fresh)

            wait_until(leased, UP_S, "its lease", LOOK_S)
            os.kill(fresh[0], signal.SIGKILL)
            assert command.wait(UP_S) == 1, said.read_text()
        assert "stopped at a replica that failed (" in said.read_text()
        assert deployed.replicas(), "the rest serves on"
        again = run(deployed, *deployed.changed("replicas=2", "tree.budget=7"))
        assert again.returncode == 0, again.stderr
        assert len(deployed.replicas()) == 2
    assert_unharmed(seen)


def measure(deployed: Deployed, replicas: int, clients: int) -> dict[str, Any]:
    """Every change under load, with room for one replica more; figures of each."""
    deployed.up(f"replicas={replicas}", "resources.cpus_per_rank=0.45")
    result: dict[str, Any] = {"replicas": replicas, "clients": clients}
    with load(deployed.url, questions(MODEL, 16, 48), clients) as seen:
        for name, act in (
            ("undisturbed", lambda: _wait_s(20.0)),
            ("restart", lambda: _restart(deployed, replicas)),
            ("scale to 1", lambda: _told(deployed, "scale", "1")),
            (f"scale to {replicas}", lambda: _told(deployed, "scale", str(replicas))),
            ("crash", lambda: _crash_one(deployed, deployed.replicas())),
        ):
            begun_s, answers = time.monotonic(), seen.answers
            more = act() or {}
            ended_s = time.monotonic()
            result[name] = {
                "seconds": round(ended_s - begun_s, 1),
                "answers": seen.answers - answers,
                "worst_gap_s": round(seen.worst_gap_s(begun_s, ended_s), 2),
                **more,
            }
        result["moved"] = moves(deployed.url)
    result |= {
        "answers": seen.answers,
        "tokens": seen.tokens,
        "failed": len(seen.failed),
        "changed": len(seen.changed),
        "examples": [*seen.failed[:3], *seen.changed[:3]],
    }
    return result


def _wait_s(seconds: float) -> None:
    threading.Event().wait(seconds)


def _told(deployed: Deployed, *words: str) -> None:
    done = run(deployed, *words)
    assert done.returncode == 0, done.stderr


def _restart(deployed: Deployed, replicas: int) -> dict[str, Any]:
    done = run(deployed, "restart")
    assert done.returncode == 0, done.stderr
    seconds = [float(s) for s in re.findall(r"took over after ([0-9.]+) s", done.stderr)]
    assert len(seconds) == replicas
    return {"seconds_by_replica": seconds}


@pytest.mark.full
def test_every_change_under_continuous_load(deployed: Deployed) -> None:
    """Three replicas restarted one after another, scaled 3 -> 1 -> 3, and one killed."""
    measured = measure(deployed, replicas := 3, clients=16)
    assert measured["failed"] == 0, measured
    assert measured["changed"] == 0, measured
    assert measured["moved"]["leaving"] > 0
    assert len(measured["restart"]["seconds_by_replica"]) == replicas


@pytest.mark.full
def test_the_only_replica_is_restarted_in_place(deployed: Deployed) -> None:
    """No room beside it: what runs waits for its successor, what has not begun is told to."""
    deployed.up("replicas=1", "resources.cpus_per_rank=1.5")
    (question,) = questions(MODEL, 1, 900)
    question.body["ignore_eos"] = True
    wanted = ask(deployed.url, question)[0]
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(ask, deployed.url, question)
        wait_until(lambda: _running(deployed.url) > 0)
        done = run(deployed, "restart")
        assert done.returncode == 0, done.stderr
        assert "each is drained first" in done.stderr
        assert going.result(timeout=UP_S)[0] == wanted

        # Room that was there when the restart looked, and is taken when the successor wants it.
        going = pool.submit(ask, deployed.url, question)
        wait_until(lambda: _running(deployed.url) > 0)
        before = deployed.replicas()
        done = subprocess.run(
            [sys.executable, "-c", SURE_OF_ROOM],
            capture_output=True,
            text=True,
            env=deployed.shell.environment,
            timeout=UP_S,
        )
        assert done.returncode == 0, done.stderr
        assert "starts beside its predecessor" in done.stderr
        assert "the room is gone; no room for one more replica" in done.stderr
        assert going.result(timeout=UP_S)[0] == wanted
        assert not set(before) & set(deployed.replicas())


SURE_OF_ROOM = """
import dataclasses, sys
from overstory.orchestrator import restart
from overstory.orchestrator.progress import Progress

plan = restart._plan
restart._plan = lambda *given: dataclasses.replace(plan(*given), surge=True)
restart._ROOM_S = 3.0
restart.restart(None, None, Progress(sys.stderr), 300.0)
"""


def _running(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.search(r"overstory_sequences_running\{.*\} ([0-9.]+)", text)
    return float(found[1]) if found else 0.0
