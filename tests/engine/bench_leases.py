"""What leases cost a step: `engine_bench.leases`, as a GPU measures it, with nothing to compute.
Results: docs/benchmarks/cpu_step.md.

A scheduler whose captured steps are made up (`bench_host_step`) runs texts in turn without and with
the step gate, the digests and a thread that grants leases. Between steps ``--spoil-kb`` of memory
are read outside the interpreter's lock, about as a driver's launches do: what a step needs of the
caches has to come back, and another thread that waits for the lock gets it.

`--parts` adds texts with a part of it alone: what the harness adds, the gate, the digests.

    .venv/bin/python tests/engine/bench_leases.py --texts 200
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from bench_host_step import ROWS, made_up_steps
from engine_bench import LEASE_KINDS, leases
from engine_compare import lease_costs
from engine_cuda import CudaEngine

from overstory.workers import tree_policy
from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import prepare_process
from overstory.workers.settled_heap import settle_heap
from overstory.workers.tiny.paths import resolve_model

WARM_TEXTS = 6


class HostEngine(CudaEngine):
    """On a CPU."""

    device = "cpu"


class Spoiler:
    """Turns what the caches hold out."""

    def __init__(self, kilobytes: int) -> None:
        self._size = kilobytes * 1024
        self._from = ctypes.create_string_buffer(max(1, self._size))
        self._to = ctypes.create_string_buffer(max(1, self._size))
        self._objects = [[number, str(number)] for number in range(4000)] if kilobytes else []
        self._at = 0

    def act(self) -> None:
        """Once a step."""
        if not self._size:
            return
        ctypes.memmove(self._to, self._from, self._size)  # Without the interpreter's lock.
        self._at = (self._at + 200) % len(self._objects)
        for one in self._objects[self._at : self._at + 200]:
            one[0] += 1


@contextlib.contextmanager
def tree_31(_policy: str | None) -> Iterator[None]:
    """The policy all the time."""
    tree_policy.set_current(tree_policy.parse_policy("tree-31"))
    yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200, help="of each kind")
    parser.add_argument("--tokens", type=int, default=330, help="of a text, some 4 a step")
    parser.add_argument("--spoil-kb", default="0,2048", help="separated by commas")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    os.environ[POLICY_ENV] = "tree-31"
    prepare_process("cpu", 1)
    engine = HostEngine(
        resolve_model("overstory-tiny"),
        speculative_algorithm="DDTREE",
        speculative_draft_model_path=resolve_model("overstory-tiny-drafter"),
        speculative_num_draft_tokens=ROWS,
        max_total_tokens=32768,
        incremental_streaming_output=True,
        random_seed=1,
    )
    made_up_steps(engine.scheduler, [1, 2])
    engine._view._slot_table = None  # As on a GPU, where digests hold no slots.
    settle_heap()
    kinds = list(LEASE_KINDS) if options.parts else ["leased", "leased_500"]
    replays = engine.scheduler.draft_worker._step_graphs._steps
    for kilobytes in map(int, options.spoil_kb.split(",")):
        replays.between = Spoiler(kilobytes).act
        print(f"{kilobytes} KB spoilt a step, load {os.getloadavg()[0]:.1f}")
        prompt = list(range(40, 100))
        leases(engine, prompt, tree_31, math.inf, WARM_TEXTS, kinds, options.tokens)
        rows = leases(engine, prompt, tree_31, math.inf, options.texts, kinds, options.tokens)
        lease_costs("host", rows)
    gc.collect()
    print("threads:", ", ".join(thread.name for thread in threading.enumerate()))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
