"""The host's time of a step, all of it: SGLang's loop and ours, with nothing to compute. Results:
docs/benchmarks/cpu_step.md.

A real rank under leases (`bench_rank_step.Rank`) whose captured whole steps are made up: each
gives every request the next of a few fixed answers. All that a GPU's host does beside its launches
is real and runs at the pace of a GPU's steps, so caches are about as warm as there. Launches and
copies themselves cost a CPU less than a GPU's host.

`--temperature 1` has requests sample. With `--profile` cProfile says where the loop's time goes.

    .venv/bin/python tests/engine/bench_host_step.py --policies tree-63,auto --requests 1,8,32
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_rank_step import Rank, wait_until

from overstory.kernels.reference import Accepted, Tree
from overstory.workers import tree_policy
from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import prepare_process
from overstory.workers.policy import FLOOR
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.options import Options

ROWS = 64
WARM_STEPS = 150
BATCHES, CONTEXTS = (1, 8, 32), (256, 2048)
COSTS = {
    0: ((359, 379), (433, 465), (493, 1133)),
    15: ((518, 560), (738, 846), (979, 2445)),
    31: ((573, 640), (885, 1066), (979, 3123)),
    63: ((598, 700), (1058, 1366), (1805, 5069)),
}
"""Microseconds of greedy steps by drafted nodes, as an H200 measured them."""

SAMPLED = (300, 300, 320)

ANSWERS = (3, 5, 4, 2, 6, 1, 7, 4)
"""Tokens that a step hands out, step by step."""


def cost_table(options: Options) -> CostTable:
    """As of a GPU."""
    count = len(options)
    rows = tuple(COSTS[next(n for n in COSTS if n >= nodes)] for nodes in options.nodes)
    none = ((0,) * len(BATCHES),) * count
    return CostTable(options.names, BATCHES, CONTEXTS, rows, (SAMPLED,) * count, none)


class MadeUpSteps(dict[Any, Any]):
    """Stands for `StepGraphs._steps`: what a replay of any shape writes."""

    def __init__(self, graphs: Any, block_size: int) -> None:
        super().__init__()
        self._graphs, self._block_size = graphs, block_size
        self.between: Callable[[], None] | None = None
        """Called at each step."""

    def __missing__(self, shape: Any) -> Any:
        from overstory.workers.ddtree.step_graph import _packed, _Raw

        bs, rows, width = shape.bs, shape.rows, min(shape.rows, self._block_size)
        order = torch.arange(rows)
        parents = (order - 1).expand(bs, rows).contiguous()
        depths = order.clamp(max=width - 1).expand(bs, rows).contiguous()
        tree = Tree(
            torch.ones(bs, rows, dtype=torch.int64),
            parents,
            depths,
            parents.clamp(max=0),
            torch.full((bs,), rows),
        )
        lengths = self._graphs._inputs.ids[0, :bs]
        answers = []
        for tokens in ANSWERS:
            given = min(tokens, width)
            path = torch.arange(width).expand(bs, width)
            accepted = Accepted(
                torch.where(path < given, path, -1),
                torch.full((bs,), given - 1),
                torch.full((bs,), 9),
                torch.where(path < given, 7 + path, -1),
            )
            none = torch.empty(0, 1, dtype=torch.int64)
            answers.append((given, accepted.rows, _packed(tree, accepted, lengths, none)))
        rows_kept = accepted.rows.clone()
        raw = _Raw(answers[0][2].clone(), tree, accepted._replace(rows=rows_kept))
        after = raw.packed[bs * (width + 2) : bs * (width + 3)]
        turn = [0]

        def replay() -> Any:
            turn[0] += 1
            if self.between is not None:
                self.between()
            given, path, packed = answers[turn[0] % len(answers)]
            rows_kept.copy_(path)
            raw.packed.copy_(packed)
            torch.add(lengths, given, out=after)
            return raw

        self[shape] = replay
        return replay


class HostRank(Rank):
    """A rank with made-up captured steps."""

    rows = ROWS
    slots = 160_000
    parts = False


def made_up_steps(scheduler: Any, sizes: list[int]) -> None:
    """Has a scheduler take made-up steps for up to so many requests. After its start, before the
    first request."""
    from overstory.workers.ddtree.graph_tiers import GraphTiers, tier_rows
    from overstory.workers.ddtree.step_graph import StepGraphs, StepInputs

    worker = scheduler.draft_worker
    limits = worker.limits
    rows = tier_rows(limits.max_rows, limits.block_size)
    worker._tiers = GraphTiers(worker.model_runner, dict.fromkeys(rows))
    graphs = StepGraphs.__new__(StepGraphs)
    graphs._worker, graphs._sizes, graphs._speculate = worker, sizes, []
    graphs._inputs = StepInputs(sizes[-1], "cpu")
    graphs._steps, graphs._landings = MadeUpSteps(graphs, limits.block_size), {}
    worker._step_graphs, worker.timed = graphs, False
    worker.chooser.captured(worker._tiers.tier)
    worker.chooser._host_waits = False
    tree_policy.HOLDER.automatic = True
    worker.chooser.start(cost_table(worker.chooser.options), FLOOR)


class LoopProfile:
    """cProfile of the loop's thread; what else it runs is not seen."""

    def __init__(self, rank: Rank) -> None:
        self._profile = cProfile.Profile()
        self._wanted = threading.Event()
        self._on = False
        scheduler = rank.scheduler
        act = scheduler.process_input_requests

        def noticed(requests: Any) -> Any:
            if self._wanted.is_set() != self._on:
                self._on = not self._on
                (self._profile.enable if self._on else self._profile.disable)()
            return act(requests)

        scheduler.process_input_requests = noticed

    def run(self, rank: Rank, steps: int) -> None:
        """Prints where ``steps`` steps spend their time."""
        self._profile.clear()
        self._wanted.set()
        begun = rank.launched()
        wait_until(lambda: rank.launched() >= begun + steps)
        self._wanted.clear()
        wait_until(lambda: not self._on)
        taken = rank.launched() - begun
        stats = pstats.Stats(self._profile)
        rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
        print(f"{'own us':>8s} {'all us':>8s} {'calls':>7s}")
        for (file, line, name), (_, calls, own, total, _) in rows[:110]:
            where = file.replace(str(Path(torch.__file__).parents[1]), "")
            print(
                f"{own / taken * 1e6:8.2f} {total / taken * 1e6:8.2f} {calls / taken:7.2f} "
                f"{where}:{line}({name})"
            )


def measure(
    rank: HostRank, policy: str, requests: int, steps: int, temperature: float, profile: Any
) -> None:
    """Prints microseconds of a step: of the loop's thread, and of the wall."""
    rank.policy = policy
    rank.tokens = min(7900, rank.slots // requests - 300)
    rids = [rank.submit(number, temperature) for number in range(requests)]
    wait_until(lambda: len(rank.scheduler.running_batch.reqs) == requests)
    begun = rank.launched() + WARM_STEPS
    wait_until(lambda: rank.launched() >= begun)
    clock = rank.clock
    walls, owns = [], []
    for _ in range(5):
        first, wall, own = rank.launched(), time.perf_counter(), time.clock_gettime(clock)
        wait_until(lambda first=first: rank.launched() >= first + steps // 5)
        taken = rank.launched() - first
        owns.append((time.clock_gettime(clock) - own) / taken * 1e6)
        walls.append((time.perf_counter() - wall) / taken * 1e6)
    print(
        f"{policy}, {requests} requests: {min(owns):.0f} us of the thread at best "
        f"({statistics.median(owns):.0f} median), {min(walls):.0f} of the wall "
        f"({statistics.median(walls):.0f})",
        flush=True,
    )
    if profile is not None:
        profile.run(rank, steps)
    rank.abort(rids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="tree-63", help="separated by commas")
    parser.add_argument("--requests", default="1,8,32", help="at a time, separated by commas")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--lease-steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    policies = options.policies.split(",")
    requests = [int(number) for number in options.requests.split(",")]
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    os.environ[POLICY_ENV] = "tree-63"
    prepare_process("cpu", 1)
    rank = HostRank("tree-63", max(requests), options.lease_steps)
    made_up_steps(rank.scheduler, [1, 2, 4, 8, 16, 32])
    profile = LoopProfile(rank) if options.profile else None
    for _ in range(options.rounds):
        for policy in policies:
            for number in requests:
                measure(rank, policy, number, options.steps, options.temperature, profile)
    gc.collect()
    rank.drain.kill()
    for file in Path(rank.folder).iterdir():
        file.unlink(missing_ok=True)
    Path(rank.folder).rmdir()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
