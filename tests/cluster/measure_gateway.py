"""What the gateway costs: the endpoint against SGLang's own HTTP server, one engine, one run.

Both servers are up; each cell is measured turn by turn. SGLang's server is stopped (SIGSTOP) while
it is not its turn: its scheduler polls without a pause, which takes one core from the other, and
two processes that share a core's threads slow each other by a third. The deployment's ranks sleep.
The client is the same process for both. Tokens/s are those of whole rounds, medians over
them; the first token's time is that of the first event of a stream.

    .venv/bin/python tests/cluster/measure_gateway.py --json docs/benchmarks/gateway_cpu.json
    tests/gpu/gateway_session.sh OUT SECONDS       the same on a GPU
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from deep_pair import Shape, write_pair
from gateway_load import Timed, load, times_of_get
from measure_deployment import role
from ray import serve
from two_servers import both

from overstory.orchestrator.bench_load import load_prompts
from overstory.orchestrator.control import connected
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.host_facts import host_facts
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.local_ray import free_port
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.spec import DeploymentSpec, load_spec

LOCAL = Path(__file__).parents[2] / "clusters" / "local" / "deployment.yaml"
HOPS = 40
TURNS = 4
OURS, THEIRS = "gateway", "sglang"
ON_A_GPU = (
    "engine.attention_backend=overstory",
    "engine.disable_prefill_cuda_graph=true",
    "engine.mem_fraction_static=0.3",  # two engines on one GPU
    "engine.max_total_tokens=131072",
    "engine.cuda_graph_bs_decode=[1,8,32]",
)


# -------------------------------------------------------------------- servers


def spec_of(given: argparse.Namespace, folder: Path) -> DeploymentSpec:
    """The deployment to measure; a pair that is made lies in `folder`."""
    pair: list[str] = []
    if given.pair == "deep":
        target, drafter = write_pair(folder, Shape(*given.shape))
        pair = [f"model={target}", f"drafter={drafter}", "engine.load_format=dummy"]
    return load_spec(
        LOCAL,
        [
            *pair,
            "served_model_name=measured",
            f"gateway.port={free_port()}",
            f"resources.device={given.device}",
            *(ON_A_GPU if given.device == "cuda" else ()),
            f"engine.tp_size={given.tp}",
            f"engine.max_running_requests={max(given.concurrency)}",
            f"tree.budget={given.budget}",
            *given.set,
        ],
    )


# -------------------------------------------------------------------- what is measured


def bodies(given: argparse.Namespace, name: str, concurrency: int) -> list[dict[str, Any]]:
    """The requests of a cell: texts, since both servers are to tokenize."""
    prompts = load_prompts(min(given.prompts, 16), as_ids=False)
    count = max(given.requests, concurrency)
    return [
        {
            "model": name,
            "prompt": prompts[number % len(prompts)],
            "max_tokens": given.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(count)
    ]


def cpu_s(first: psutil.Process, name: Callable[[psutil.Process], str]) -> collections.Counter[str]:
    """CPU seconds of a process and all below it, by what they are."""
    used: collections.Counter[str] = collections.Counter()
    for process in _tree(first):
        with contextlib.suppress(psutil.Error):
            used[name(process)] += sum(process.cpu_times()[:2])
    return used


def _tree(first: psutil.Process) -> list[psutil.Process]:
    """A process and all below it."""
    return [first, *first.children(recursive=True)]


def sglang_role(process: psutil.Process) -> str:
    """Role of a process of SGLang's server by its title."""
    title = " ".join(process.cmdline())
    kinds = ("scheduler", "detokenizer")
    return next((kind for kind in kinds if kind in title), "HTTP, tokenizer, others")


class Bench:
    """Both servers by name: their ports, first processes, and what their processes are called."""

    def __init__(self, given: argparse.Namespace, spec: DeploymentSpec) -> None:
        self.given = given
        self.model = spec.served_model_name
        self.deployment = spec.name
        self.ports: dict[str, int] = {}
        self.firsts: dict[str, psutil.Process] = {}

    def measure(self) -> list[dict[str, Any]]:
        """Rows: one for each server and concurrency."""
        found: dict[tuple[str, int], list[dict[str, Any]]] = collections.defaultdict(list)
        for server in (OURS, THEIRS):  # Each prompt once: the prefix caches are filled.
            with self._turn(server):
                asyncio.run(load(self.ports[server], bodies(self.given, self.model, 16), 4))
        for number in range(self.given.rounds):
            for concurrency in self.given.concurrency:
                turn = (OURS, THEIRS) if number % 2 else (THEIRS, OURS)
                for server in turn:
                    with self._turn(server):
                        cell = self._cell(server, concurrency)
                    found[server, concurrency].append(cell)
                    print(f"round {number + 1}  {server:<8} {concurrency:>3}  {cell}", flush=True)
        return [summed(server, number, cells) for (server, number), cells in found.items()]

    @contextlib.contextmanager
    def _turn(self, server: str) -> Iterator[None]:
        """Only `server` runs, warm from one request; SGLang's waits until its next turn."""
        for process in _tree(self.firsts[THEIRS]):
            process.suspend() if server == OURS else process.resume()
        asyncio.run(load(self.ports[server], bodies(self.given, self.model, 1)[:1], 1))
        yield

    def _cell(self, server: str, concurrency: int) -> dict[str, Any]:
        name = role if server == OURS else sglang_role
        asked = bodies(self.given, self.model, concurrency)
        before, begun = cpu_s(self.firsts[server], name), time.perf_counter()
        answers = asyncio.run(load(self.ports[server], asked, concurrency))
        seconds = time.perf_counter() - begun
        used = cpu_s(self.firsts[server], name) - before
        return figures(answers, seconds) | {"cpu_s": {k: round(v, 2) for k, v in used.items()}}

    def first_token(self, count: int) -> dict[str, Any]:
        """Milliseconds to the one token of an answer, one request at a time, turn by turn; and of
        a GET that goes no further than the gateway."""
        times: dict[str, list[float]] = {OURS: [], THEIRS: []}
        body = {**bodies(self.given, self.model, 1)[0], "max_tokens": 1}
        models: dict[str, list[float]] = {OURS: [], THEIRS: []}
        for _ in range(TURNS):
            for server in (THEIRS, OURS):
                port = self.ports[server]
                with self._turn(server):
                    for _ in range(count // TURNS):
                        answer = asyncio.run(load(port, [body], 1))[0]
                        times[server].append(answer.first_s)
                    models[server] += asyncio.run(times_of_get(port, "/v1/models", count // TURNS))
        rows = {f"one token, {server}": spread(one) for server, one in times.items()}
        rows |= self._hops(count)
        rows |= {f"GET /v1/models, {server}": spread(one) for server, one in models.items()}
        return rows

    def _hops(self, count: int) -> dict[str, Any]:
        """Without proxy and gateway: a call of the replica that goes no further, and one token,
        from this process by Serve's handle."""
        handle = serve.get_deployment_handle("Replica", self.deployment)
        ids = tuple(load_prompts(1, as_ids=True)[0])
        sampling = Sampling(seed=0, max_new_tokens=1, temperature=0.0)
        near, whole = [], []
        for _ in range(count):
            begun = time.perf_counter()
            handle.limits.remote().result(timeout_s=60)
            near.append(time.perf_counter() - begun)
            call = GenerateCall(f"hop-{uuid.uuid4().hex}", ids, sampling)
            begun = time.perf_counter()
            for _chunk in handle.options(stream=True).generate.remote(call):
                pass
            whole.append(time.perf_counter() - begun)
        return {
            "handle, replica alone": spread(near),
            "handle, one token": spread(whole),
        }


def figures(answers: list[Timed], seconds: float) -> dict[str, Any]:
    """Of one cell in one round."""
    return {
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / seconds, 2),
        "first_ms": round(1000 * median(answer.first_s for answer in answers), 2),
        "events": sum(answer.events for answer in answers),
        "tokens": sum(answer.tokens for answer in answers),
    }


def summed(server: str, concurrency: int, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of a cell: medians over the rounds."""
    return {
        "server": server,
        "concurrency": concurrency,
        "tokens_per_s": round(median(cell["tokens_per_s"] for cell in cells), 2),
        "first_ms": round(median(cell["first_ms"] for cell in cells), 2),
        "tokens_per_s_rounds": [cell["tokens_per_s"] for cell in cells],
        "first_ms_rounds": [cell["first_ms"] for cell in cells],
        "tokens": sum(cell["tokens"] for cell in cells),
        "events": sum(cell["events"] for cell in cells),
        "cpu_s": dict(
            sum((collections.Counter(cell["cpu_s"]) for cell in cells), start=collections.Counter())
        ),
    }


def spread(times: list[float]) -> dict[str, float]:
    """Median and tenths in milliseconds."""
    ordered = sorted(times)
    at = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
    return {k: round(1000 * ordered[int(q * (len(ordered) - 1))], 2) for k, q in at.items()}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gateway against SGLang's server by concurrency."""
    by = {(row["server"], row["concurrency"]): row for row in rows}
    return [
        {
            "concurrency": concurrency,
            "share_of_tokens_per_s": round(
                by[OURS, concurrency]["tokens_per_s"] / by[THEIRS, concurrency]["tokens_per_s"], 3
            ),
            "first_token_added_ms": round(
                by[OURS, concurrency]["first_ms"] - by[THEIRS, concurrency]["first_ms"], 2
            ),
        }
        for concurrency in sorted({row["concurrency"] for row in rows})
    ]


def go_first(*firsts: psutil.Process) -> None:
    """Before whatever else a shared machine does: Linux divides its cores among sessions, so that
    one process of another session takes as much as a whole Ray. Both servers and this client alike;
    nothing where the kernel does not group by sessions or does not allow it."""
    for process in (*firsts, psutil.Process()):
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/autogroup").write_text("-15")


def _portable(fields: dict[str, Any]) -> dict[str, Any]:
    """Server arguments without the folders of this machine."""
    return {k: Path(v).name if k.endswith("model_path") else v for k, v in fields.items()}


# -------------------------------------------------------------------- command line


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pair", choices=("built-in", "deep"), default="built-in")
    parser.add_argument("--shape", default="", help="LAYERS,HIDDEN,HEADS,EXPERTS,WIDTH of deep")
    parser.add_argument("--together", action="store_true", help="start both servers at once")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--budget", type=int, default=31, help="of the tree; 0: plain decoding")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--requests", type=int, default=8, help="of a cell, at least")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the deployment")
    parser.add_argument("--first", action="store_true", help="before other work on this machine")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.shape = [int(part) for part in given.shape.split(",") if part]
    given.concurrency = [int(part) for part in given.concurrency.split(",")]
    return given


def main() -> None:
    """Measures and says what it found."""
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        run(given, spec_of(given, Path(folder)))


def run(given: argparse.Namespace, spec: DeploymentSpec) -> None:
    """Both servers up, loaded, and what it gave written down."""
    bench = Bench(given, spec)
    bench.ports = {OURS: spec.gateway.port, THEIRS: free_port()}
    facts = host_facts()
    with both(spec, bench.ports[THEIRS], given.together) as (ours, theirs):
        bench.firsts = {OURS: ours, THEIRS: theirs}
        if given.first:
            go_first(ours, theirs)
        with connected(spec.name):
            rows = bench.measure()
            first = bench.first_token(HOPS)
    result = {
        "host": facts,
        "settings": {k: v for k, v in vars(given).items() if k != "json"},
        "engine": _portable(resolve_engine(spec).server_args),
        "compared": compared(rows),
        "first_token_ms": first,
        "rows": rows,
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"compared": result["compared"], "first_token_ms": first}, indent=1))


if __name__ == "__main__":
    main()
