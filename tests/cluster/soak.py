"""Mixed traffic under faults: `make soak`.

A deployment of its own, clients that ask without a pause, and every so often a fault drawn from a
seed. Every answer is compared with what an undisturbed deployment said to the same question before
the first fault. At the end all must be whole, and nothing left over.

A question that is refused because no replica is up is asked again, as long as an answer may take.

One exception: who kills the gateway kills the sockets of its clients. Their streams must end soon,
and the same question asked again must get the same answer.

    .venv/bin/python tests/cluster/soak.py --seconds 600 --every 20 --seed 1 --json out.json
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from fault_kit import Deployment, dead_fronts, memory_of, starve, workers
from fixtures_endpoint import _serve, pair_paths
from leftovers import actors_of, placement_groups, processes_naming, wait_until
from ray import serve

from overstory.orchestrator.app import build_app
from overstory.orchestrator.cluster import connect
from overstory.orchestrator.controller_actor import ensure_controller, find_controller
from overstory.orchestrator.host_facts import host_facts
from overstory.orchestrator.local_ray import free_port, start_local_ray, stop_local_ray
from overstory.orchestrator.serving import remove_app
from overstory.orchestrator.spec import DeploymentSpec

START_S = 600.0
ANSWER_S = 400.0
GATEWAY_GRACE_S = 60.0
"""A client may see the loss of the gateway so long after it was killed, and ask again so long."""
MEMORY_SLACK = 0.15
PROMPTS = (
    "def add(a, b):\n    ",
    "import os\n\n\ndef main(path):\n",
    "class Queue:\n    def",
    "for line in open(name):\n    ",
    "x = [",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """What a client asks: a path, a body, streamed or not."""

    path: str
    body: dict[str, Any]
    stream: bool


@dataclasses.dataclass(frozen=True)
class Answer:
    """What must not change: texts and finish reasons of all choices, and the number of tokens."""

    texts: tuple[str, ...]
    finish: tuple[str | None, ...]
    tokens: int


def questions(model: str) -> list[Question]:
    """All kinds of traffic: greedy and seeded, short and long, one choice and several, streamed and
    whole, chats, stop strings, penalties, grammars.

    Seeds are ones under which no draw comes near a bound of its distribution (`margins`): with seed
    5 one draw of `class Queue` falls 3e-7 from two, closer than float32 rounds alike in batches of
    different widths, and its text was one of three.
    """
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 200, "temperature": 0, "ignore_eos": True},
        {"max_tokens": 120, "temperature": 1.0, "seed": 8, "ignore_eos": True},
        {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 6, "n": 2},
        {"max_tokens": 60, "temperature": 0, "stop": ["\n\n", "return"]},
        {"max_tokens": 60, "temperature": 0, "frequency_penalty": 0.7, "min_tokens": 20},
        {"max_tokens": 30, "temperature": 1.0, "seed": 9, "regex": "(ab|cd)+-[0-9]{4,8}"},
    ]
    asked = []
    for number, prompt in enumerate(PROMPTS):
        for which, kind in enumerate(kinds):
            body = {"model": model, "prompt": prompt, **kind}
            asked.append(Question("/v1/completions", body, (number + which) % 2 == 0))
        chat = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        asked.append(
            Question(
                "/v1/chat/completions",
                {**chat, "max_tokens": 50, "temperature": 0, "ignore_eos": True},
                number % 2 == 0,
            )
        )
    return asked


class Broken(Exception):
    """No whole answer: an error, or a stream that broke off."""


class NotReady(Broken):
    """Refused before it began, since no replica is up: to be asked again a little later."""


class Told(Broken):
    """A living gateway says in a stream that it could not go on."""


def ask(client: httpx.Client, url: str, question: Question) -> Answer:
    """The answer; raises `Broken`."""
    try:
        whole = _streamed if question.stream else _whole
        return whole(client, url + question.path, question.body)
    except httpx.HTTPError as error:
        raise Broken(f"{type(error).__name__}: {error}") from error


def _check(answer: httpx.Response) -> None:
    """Raises what a status says."""
    if answer.status_code == 200:
        return
    text = answer.read().decode(errors="replace")[:500]
    refused = answer.status_code == 503 and '"not_ready"' in text
    raise (NotReady if refused else Broken)(f"{answer.status_code}: {text}")


def _whole(client: httpx.Client, url: str, body: dict[str, Any]) -> Answer:
    answer = client.post(url, json=body)
    _check(answer)
    data = answer.json()
    choices = sorted(data["choices"], key=lambda one: one["index"])
    texts = tuple(c["text"] if "text" in c else c["message"]["content"] for c in choices)
    finish = tuple(c["finish_reason"] for c in choices)
    return Answer(texts, finish, data["usage"]["completion_tokens"])


def _streamed(client: httpx.Client, url: str, body: dict[str, Any]) -> Answer:
    texts: dict[int, str] = collections.defaultdict(str)
    finish: dict[int, str | None] = {}
    tokens, done = 0, False
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", url, json=asked) as answer:
        _check(answer)
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Told(f"error event: {event['error']['message'][:500]}")
            for choice in event["choices"]:
                piece = choice["text"] if "text" in choice else choice["delta"].get("content")
                texts[choice["index"]] += piece or ""
                finish[choice["index"]] = choice["finish_reason"] or finish.get(choice["index"])
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not done:
        raise Broken("the stream broke off")
    order = sorted(texts.keys() | finish.keys())
    return Answer(tuple(texts[i] for i in order), tuple(finish.get(i) for i in order), tokens)


# -------------------------------------------------------------------------------------- faults


class Faults:
    """Ways to break a deployment. Each returns what it did, or None if there was nothing to break.

    Args:
        deployment: what to break.
        draw: source of choices.
    """

    def __init__(self, deployment: Deployment, draw: random.Random) -> None:
        self._deployment = deployment
        self._draw = draw
        self.gateway_killed_at = -1e9

    def kinds(self) -> dict[str, Callable[[], str | None]]:
        """By name."""
        return {
            "kill a rank": lambda: self._signal(self._deployment.rank_processes(), signal.SIGKILL),
            "stop a rank": lambda: self._signal(self._deployment.rank_processes(), signal.SIGSTOP),
            "kill a replica": lambda: self._signal(self._deployment.replica_pids(), signal.SIGKILL),
            "starve a rank": self._starve,
            "kill the controller": self._kill_controller,
            "kill the gateway": self._kill_gateway,
        }

    def _pick(self, pids: set[int]) -> int | None:
        return self._draw.choice(sorted(pids)) if pids else None

    def _signal(self, pids: set[int], number: signal.Signals) -> str | None:
        pid = self._pick(pids)
        if pid is None:
            return None
        os.kill(pid, number)
        return f"pid {pid}"

    def _starve(self) -> str | None:
        pid = self._pick(self._deployment.rank_processes())
        if pid is None:
            return None
        starve(pid)
        return f"pid {pid}"

    def _kill_controller(self) -> str | None:
        controller = find_controller(self._deployment.name)
        if controller is None:
            return None
        pid = ray.get(controller.pid.remote(), timeout=60)
        os.kill(pid, signal.SIGKILL)
        return f"pid {pid}"

    def _kill_gateway(self) -> str | None:
        pid = self._deployment.gateway_pid()
        self.gateway_killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return f"pid {pid}"


# -------------------------------------------------------------------------------------- traffic


@dataclasses.dataclass
class Count:
    """What the clients saw."""

    right: int = 0
    retried: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)


class Traffic:
    """Clients that ask until told to stop."""

    def __init__(
        self, url: str, asked: list[Question], expected: list[Answer], faults: Faults, seed: int
    ) -> None:
        self._url = url
        self._asked = asked
        self._expected = expected
        self._faults = faults
        self._seed = seed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.count = Count()

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        """While the block runs; then waits for the answers under way."""
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _client(self, number: int) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        while not self._stop.is_set():
            which = draw.randrange(len(self._asked))
            begun = time.monotonic()
            try:
                answer, retried = self._answer(self._asked[which], begun)
            except Exception as error:
                self._tell(which, f"{type(error).__name__}: {error}", begun)
                continue
            if answer != self._expected[which]:
                self._tell(which, f"altered: {answer}\nexpected {self._expected[which]}", begun)
                continue
            with self._lock:
                self.count.right += 1
                self.count.retried += retried
                took = time.monotonic() - begun
                self.count.slowest_s = max(self.count.slowest_s, took)

    def _answer(self, question: Question, begun: float) -> tuple[Answer, int]:
        """The answer, and how often it had to be asked again because the gateway was gone."""
        retried = 0
        deadline = begun + ANSWER_S
        while True:
            try:
                with httpx.Client(timeout=ANSWER_S) as client:
                    return ask(client, self._url, question), retried
            except NotReady:
                if time.monotonic() > deadline:
                    raise
                with self._lock:
                    self.count.refused += 1
            except Broken as broken:
                killed = self._faults.gateway_killed_at
                with_it = killed > begun - GATEWAY_GRACE_S and not isinstance(broken, Told)
                if not with_it or time.monotonic() - killed > GATEWAY_GRACE_S:
                    raise
                retried += 1
            time.sleep(1.0)

    def _tell(self, which: int, what: str, begun: float) -> None:
        text = f"{time.strftime('%H:%M:%S')} question {which}, {time.monotonic() - begun:.1f} s: "
        print(f"FAILED {text}{what}", flush=True)
        with self._lock:
            self.count.failures.append(text + what)


# -------------------------------------------------------------------------------------- the run


def spec_of(port: int, replicas: int) -> DeploymentSpec:
    """The deployment to break."""
    target, drafter = pair_paths()
    return DeploymentSpec(
        name="soak",
        model=target,
        drafter=drafter,
        served_model_name="tiny",
        replicas=replicas,
        tree={"budget": 15},
        engine={"tp_size": 1, "context_length": 1024},
        resources={"cpus_per_rank": 0.5},
        gateway={
            "port": port,
            "max_concurrent_requests": 8,
            "request_timeout_s": ANSWER_S,
            "max_resumes": 100,
        },
        control={"unresponsive_s": 20.0, "proven_s": 0, "restart_budget": 100},
    )


def soak(arguments: argparse.Namespace, deployment: Deployment) -> dict[str, Any]:
    """Traffic and faults; the report."""
    draw = random.Random(arguments.seed)
    url = deployment.endpoint.url
    asked = questions(deployment.endpoint.spec.served_model_name)
    deployment.await_whole(arguments.replicas)
    with httpx.Client(timeout=ANSWER_S) as client:
        expected = [ask(client, url, question) for question in asked]
    memory = memory_of(process.pid for process in workers())
    faults = Faults(deployment, draw)
    traffic = Traffic(url, asked, expected, faults, arguments.seed)
    done: list[dict[str, Any]] = []
    begun = time.monotonic()
    with traffic.running(arguments.clients):
        while (now := time.monotonic() - begun) < arguments.seconds:
            time.sleep(max(0.0, min(arguments.every * (len(done) + 1), arguments.seconds) - now))
            if time.monotonic() - begun >= arguments.seconds:
                break
            kind = draw.choice(sorted(faults.kinds()))
            what = faults.kinds()[kind]()
            row = {"at_s": round(time.monotonic() - begun, 1), "fault": kind, "what": what}
            done.append({**row, "right_before": traffic.count.right})
            print(json.dumps(done[-1]), flush=True)
    mended_s = deployment.await_whole(arguments.replicas)
    wait_until(deployment.endpoint.idle, 60, "gateway and replicas idle")
    after = memory_of(process.pid for process in workers())
    left = {
        "ranks": len(deployment.rank_processes()) - arguments.replicas,
        "replica processes": len(deployment.replica_pids()) - arguments.replicas,
        "placement groups": len(placement_groups()) - arguments.replicas,
        "front files": len(dead_fronts()),
    }
    failures = list(traffic.count.failures)
    failures += [f"left over: {count} {what}" for what, count in left.items() if count]
    if after > memory * (1 + MEMORY_SLACK):
        failures.append(f"memory: {memory / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after")
    return {
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - begun, 1),
        "clients": arguments.clients,
        "replicas": arguments.replicas,
        "answers": traffic.count.right,
        "asked again after the gateway's loss": traffic.count.retried,
        "refused while no replica was up": traffic.count.refused,
        "slowest answer, s": round(traffic.count.slowest_s, 1),
        "whole again after, s": round(mended_s, 1),
        "memory, MiB": [round(memory / 2**20), round(after / 2**20)],
        "faults": done,
        "failures": failures,
    }


@contextmanager
def deployed(replicas: int) -> Iterator[Deployment]:
    """A Ray and a deployment of their own; proved gone at the end."""
    record = start_local_ray(cpus=8, gpus=0)
    try:
        connect(record.address, record)
        spec = spec_of(free_port(), replicas)
        serve.start(proxy_location="Disabled")
        ensure_controller(spec.name, spec.control)
        yield Deployment(_serve(build_app(spec), spec, START_S))
        remove_app(spec.name)
        wait_until(lambda: not actors_of(spec.name), 60, "actors to go")
        wait_until(lambda: not placement_groups(), 60, "placement groups to go")
        serve.shutdown()
        ray.shutdown()
    except BaseException:
        traceback.print_exc()  # Ray ends this process with itself, before Python would say it.
        raise
    finally:
        stop_local_ray(record)
    wait_until(lambda: not processes_naming(record.folder), 60, "Ray's processes to end")
    assert not dead_fronts(), dead_fronts()


def main() -> int:
    """Runs it; 0 if nothing was lost, altered or left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    host = host_facts()
    with deployed(arguments.replicas) as deployment:
        report = {"host": host} | soak(arguments, deployment)
    text = json.dumps(report, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
