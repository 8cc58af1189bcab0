"""Tokens/s of one engine under leases against the same engine running freely, interleaved.

The processes' CPU time per token goes with it: on a shared machine the wall clock also measures
others.

`.venv/bin/python tests/cluster/measure_leases.py --json docs/benchmarks/leases.json`
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from leftovers import wait_until
from live_engine import LiveEngine

from overstory.orchestrator.controller_actor import end_controller, ensure_controller
from overstory.orchestrator.spec import ControlSpec

ROUNDS = 12
TOKENS = 160
LEASE_STEPS = 64


def measure(live: LiveEngine, rounds: int = ROUNDS, tokens: int = TOKENS) -> dict[str, Any]:
    """Rounds of both kinds in the order free, leased, leased, free, ...; one request at a time."""
    rates: dict[str, list[float]] = {"free": [], "leased": []}
    cpu: dict[str, float] = {"free": 0.0, "leased": 0.0}
    outputs = {tuple(live.generate(tokens)) for _ in range(3)}  # warm
    for number in range(rounds):
        order = ("free", "leased") if number % 2 == 0 else ("leased", "free")
        for kind in order:
            pids = _engine_pids(live)
            if kind == "leased":
                pids.append(_lease(live))
            begun, cpu_begun = time.monotonic(), _cpu_s(pids)
            outputs.add(tuple(live.generate(tokens)))
            rates[kind].append(tokens / (time.monotonic() - begun))
            cpu[kind] += _cpu_s(pids) - cpu_begun
            if kind == "leased":
                _let_go(live)
    assert len(outputs) == 1, "leases must not change what comes out"
    ratios = [leased / free for leased, free in zip(rates["leased"], rates["free"], strict=True)]
    report = live.ask(0, "report", 10**9)
    return {
        "lease_steps": LEASE_STEPS,
        "tokens_per_round": tokens,
        "tokens_per_s": {kind: [round(rate, 2) for rate in some] for kind, some in rates.items()},
        "median_tokens_per_s": {k: round(statistics.median(v), 2) for k, v in rates.items()},
        "ratio_of_sums": round(sum(rates["leased"]) / sum(rates["free"]), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles_of_ratio": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
        "cpu_ms_per_token": {k: round(1000 * v / rounds / tokens, 3) for k, v in cpu.items()},
        "cpu_ratio": round(cpu["free"] / cpu["leased"], 4),
        "digest_us_per_forward": report["digest_us"],
    }


def _engine_pids(live: LiveEngine) -> list[int]:
    """The ranks and the front half, which lives in this process."""
    return [identity.pid for identity in live.engine.group.identities] + [os.getpid()]


def _cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _lease(live: LiveEngine) -> int:
    """Lets a controller of its own process, as in a deployment, lease the replica; its pid."""
    controller = ensure_controller(live.deployment, ControlSpec(lease_steps=LEASE_STEPS, lease_s=0))
    ray.get(controller.register.remote("r1", live.engine.group.plan.tp_size), timeout=60)
    wait_until(lambda: _mode(live) == "leased", 30, "a lease")
    return int(ray.get(controller.pid.remote(), timeout=30))


def _let_go(live: LiveEngine) -> None:
    end_controller(live.deployment)
    wait_until(lambda: _mode(live) != "leased", 30, "no lease")


def _mode(live: LiveEngine) -> str:
    return str(live.ask(0, "report", 10**9)["lease"]["mode"])


def main() -> None:
    """Measures on a Ray of its own and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--policy", default="tree-7")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    ray.init(
        address="local",
        namespace="overstory",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    live = LiveEngine(tp_size=options.tp, policy=options.policy)
    result = measure(live, options.rounds)
    live.close()
    ray.shutdown()
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": os.getloadavg(),
        "ray": ray.__version__,
        "tp_size": options.tp,
        "policy": options.policy,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(about | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
