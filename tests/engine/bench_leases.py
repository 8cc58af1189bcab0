"""What leases cost a step: `engine_bench.leases`, as a GPU measures it, with nothing to compute.
Results: docs/benchmarks/cpu_step.md.

A scheduler whose captured steps are made up (`bench_host_step`) runs texts in turn without and with
the step gate, the digests and a thread that grants leases. Between steps ``--spoil-kb`` of memory
are read outside the interpreter's lock, about as a driver's launches do: what a step needs of the
caches has to come back, and another thread that waits for the lock gets it.

`--parts` adds texts with a part of it alone: the bare wrappers, the gate, the digests.

    .venv/bin/python tests/engine/bench_leases.py --texts 200
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from bench_host_step import ROWS, made_up_steps
from engine_bench import Leases
from engine_cuda import CudaEngine, timed

from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.environment import prepare_process
from overstory.workers.gate import StepGate
from overstory.workers.settled_heap import settle_heap
from overstory.workers.tiny.paths import resolve_model

WARM_TEXTS = 6


class HostEngine(CudaEngine):
    """On a CPU."""

    device = "cpu"
    thread_s = 0.0
    """CPU time of the loop's thread in the last free run."""

    def free_run(self, rids: Sequence[str]) -> float:
        clock = time.pthread_getcpuclockid(self._thread.ident)
        begun = time.clock_gettime(clock)
        over = super().free_run(rids)
        self.thread_s = time.clock_gettime(clock) - begun
        return over


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


class _WithoutNotes:
    def note(self, batch: Any, choice: str) -> None: ...

    def close(self) -> None: ...


class _WithoutGate(StepGate):
    def before_pull(self, view: Any) -> list[Any]:
        return []

    def after_broadcast(self, requests: list[Any], view: Any) -> list[Any]:
        return requests


@contextlib.contextmanager
def without(engine: HostEngine, *names: str) -> Iterator[None]:
    """Leases whose parts ``names`` (`notes`, `gate`) do nothing."""
    leases = Leases(engine)
    if "notes" in names:
        leases.notes = lambda: _WithoutNotes()
    if "gate" in names:
        leases.gate = lambda notes: _WithoutGate(0, 30.0, lambda lease: None)
    with leases:
        yield


def measure(
    engine: HostEngine, kinds: dict[str, Callable[[], Any]], texts: int, tokens: int
) -> dict[str, list[tuple[float, float]]]:
    """Of each kind and text: microseconds of a step, of the wall and of the loop's thread."""
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    names = list(kinds)
    for number in range(texts + WARM_TEXTS):
        turn = number % len(names)
        for kind in (*names[turn:], *names[:turn]):
            with kinds[kind]():
                rate = timed(engine, [list(range(40, 100))], params)
            if number >= WARM_TEXTS:
                both = (rate.seconds, engine.thread_s)
                found[kind].append(tuple(1e6 * seconds / rate.forwards for seconds in both))
    return found


def say(found: dict[str, list[tuple[float, float]]]) -> None:
    """Prints medians, and medians of the differences of texts beside each other."""
    free = found["free"]
    for kind, rows in found.items():
        wall, own = (statistics.median(column) for column in zip(*rows, strict=True))
        more, more_own = (
            statistics.median(a[i] - b[i] for a, b in zip(rows, free, strict=True)) for i in (0, 1)
        )
        ratio = statistics.median(b[0] / a[0] for a, b in zip(rows, free, strict=True))
        print(
            f"{kind:10s} {wall:7.1f} us a step of the wall, {own:7.1f} of the thread; more than "
            f"free: {more:6.1f}, {more_own:6.1f}; speed against free {ratio:.4f}",
            flush=True,
        )


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
    kinds: dict[str, Callable[[], Any]] = {
        "free": contextlib.nullcontext,
        "leased": lambda: Leases(engine),
    }
    if options.parts:
        kinds |= {
            "wrappers": lambda: without(engine, "notes", "gate"),
            "gate": lambda: without(engine, "notes"),
            "digests": lambda: without(engine, "gate"),
        }
    replays = engine.scheduler.draft_worker._step_graphs._steps
    for kilobytes in map(int, options.spoil_kb.split(",")):
        replays.between = Spoiler(kilobytes).act
        print(f"{kilobytes} KB spoilt a step, load {os.getloadavg()[0]:.1f}")
        say(measure(engine, kinds, options.texts, options.tokens))
    gc.collect()
    print("threads:", ", ".join(thread.name for thread in threading.enumerate()))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
