"""A deployment to break: real replicas before a real gateway, and what a test needs to break it."""

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from fixtures_endpoint import Endpoint, ready
from leftovers import processes_naming, wait_until

from overstory.orchestrator.controller_actor import find_controller
from overstory.orchestrator.front_files import is_dead
from overstory.orchestrator.rank_group import CONTROL, NAMESPACE, call
from overstory.orchestrator.serving import actor_names

CALL_S = 30.0
STREAM_S = 300.0
REPAIR_S = 300.0
LOOK_S = 0.2
"""Between two looks at all of a deployment, which cost what is starting there some of its cores."""


@dataclass
class TextStream:
    """A streamed completion: what came so far, when, and how it ended."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    finish: str | None = None
    error: dict[str, Any] | None = None
    done: Future[None] = field(default_factory=Future)

    def wait_for(self, characters: int) -> None:
        """Until so much text came; fails if it ends before."""
        wait_until(
            lambda: len(self.text) >= characters or self.done.done(), STREAM_S, "text of a stream"
        )
        assert len(self.text) >= characters, (self.text, self.error, self.done)

    def result(self, timeout_s: float = STREAM_S) -> str:
        """The whole text; fails if it did not end well."""
        self.done.result(timeout_s)
        assert self.error is None, self.error
        assert self.finish is not None, "the stream broke off"
        return self.text

    def worst_gap_s(self) -> float:
        """Longest time between two pieces of text."""
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


class Client:
    """Streams completions in threads of its own."""

    def __init__(self, url: str, model: str, threads: int = 16) -> None:
        self._url = url
        self._model = model
        self._pool = ThreadPoolExecutor(threads)

    def stream(self, prompt: str, **sampling: Any) -> TextStream:
        """Starts one."""
        stream = TextStream()
        body = {"model": self._model, "prompt": prompt, "stream": True, **sampling}
        future = self._pool.submit(self._follow, stream, body)
        future.add_done_callback(
            lambda done: (
                stream.done.set_exception(done.exception())
                if done.exception()
                else stream.done.set_result(None)
            )
        )
        return stream

    def _follow(self, stream: TextStream, body: dict[str, Any]) -> None:
        url = self._url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=STREAM_S) as answer:
            if answer.status_code != 200:
                stream.error = json.loads(answer.read())["error"]
                return
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    stream.error = event["error"]
                    return
                for choice in event["choices"]:
                    stream.text += choice["text"]
                    stream.times.append(time.monotonic())
                    stream.finish = choice["finish_reason"] or stream.finish

    def close(self) -> None:
        """Waits for the threads."""
        self._pool.shutdown()


class Deployment:
    """What runs behind an endpoint, by name and pid."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.name = endpoint.spec.name
        self.client = Client(endpoint.url, endpoint.spec.served_model_name)

    # ---------------------------------------------------------------- who is there

    def ranks(self) -> dict[str, dict[str, Any]]:
        """Report of rank 0 of every replica that answers, by replica."""
        rows = {}
        for name in actor_names(self.name):
            if name.endswith("/rank-0"):
                try:
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    report = ray.get(call(actor, CONTROL, "report", 10**9), timeout=CALL_S)
                except (ValueError, ray.exceptions.RayError):
                    continue
                rows[name.split("/")[2]] = report
        return rows

    def busy_rank(self) -> dict[str, Any]:
        """Report of a rank that has work in hand."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [r for r in self.ranks().values() if r["load"] and r["load"]["running"]]
            return bool(found)

        wait_until(look, 60, "a rank with work")
        return found[0]

    def any_rank(self) -> dict[str, Any]:
        """Report of some rank."""
        return next(iter(self.ranks().values()))

    def replica_pids(self) -> set[int]:
        """Processes of Serve's replicas of this deployment (the engines' front halves)."""
        return pids_titled(f"ServeReplica:{self.name}:Replica")

    def gateway_pid(self) -> int:
        """The gateway's process."""
        (pid,) = pids_titled(f"ServeReplica:{self.name}:Gateway")
        return pid

    def rank_processes(self) -> set[int]:
        """Pids of all rank processes of the Ray that this process is connected to."""
        return pids_titled("ray::RankHost")

    # ---------------------------------------------------------------- how it stands

    def health(self) -> list[dict[str, Any]]:
        """`Fleet.status`, by the controller; empty where none answers."""
        controller = find_controller(self.name)
        if controller is None:
            return []
        try:
            return ray.get(controller.status.remote(), timeout=CALL_S)["health"]
        except ray.exceptions.RayError:
            return []

    def states(self) -> list[str]:
        """States of what is not retired."""
        return sorted(row["state"] for row in self.health() if row["state"] != "RETIRED")

    def whole(self, replicas: int) -> bool:
        """Whether so many replicas are healthy and have their ranks, and the endpoint is ready."""
        return (
            ready(self.endpoint.url)
            and self.states() == ["HEALTHY"] * replicas
            and len(self.ranks()) == replicas
        )

    def await_whole(self, replicas: int) -> float:
        """Seconds until `whole`."""
        try:
            return wait_until(lambda: self.whole(replicas), REPAIR_S, "all to be whole", LOOK_S)
        except AssertionError as late:
            seen = {
                "ready": ready(self.endpoint.url),
                "health": [(row["state"], row["reason"][:300]) for row in self.health()],
                "ranks": list(self.ranks()),
            }
            raise AssertionError(f"not {replicas} healthy replicas: {seen}") from late


def starve(pid: int) -> None:
    """Allows a process no more address space than it has: its next large allocation fails."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def dead_fronts() -> list[str]:
    """Files of front halves whose process is gone."""
    files = [*Path("/tmp").glob("overstory-ipc-*"), *Path("/dev/shm").glob("*overstory-ipc-*")]
    return [path.name for path in files if is_dead(path.name)]


def raylet() -> psutil.Process:
    """The raylet of the Ray that this process is connected to, on this machine."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
    (pid,) = [
        pid for pid in processes_naming(str(folder)) if psutil.Process(pid).name() == "raylet"
    ]
    return psutil.Process(pid)


def workers() -> list[psutil.Process]:
    """All processes under that raylet: every actor and worker."""
    return raylet().children(recursive=True)


def pids_titled(text: str) -> set[int]:
    """Pids of those whose title holds `text`."""
    found = set()
    for process in workers():
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def memory_of(pids: Iterable[int]) -> int:
    """Proportional set size of processes in bytes; those that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(
            int(row.split()[1]) * 1024 for row in text.splitlines() if row.startswith("Pss:")
        )
    return total
