"""Speeds of several engines in turn, at 1 to 64 requests. `engine_runs.py` uses it.

The engines live in processes of their own on one GPU. A cell is one (repeat, requests, temperature)
under every policy; the engines run a cell one after the other before any begins the next, so that
what else the machine does falls on all alike.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

SIZES = (1, 2, 4, 8, 16, 32, 64)
ORDER = (1, 8, 64, 32, 2, 16, 4)
TEMPERATURES = (0.0, 1.0)
REPEATS = 3
POLICIES = ("plain", "chain", "tree-15", "tree-31", "tree-63", "auto")
WARM_NEW = 24
MEASURE_SECONDS = 8.0
TIMED_SECONDS = 0.4
"""Least time of a row; batches of greedy requests are done in a tenth of a second."""


class Cell(NamedTuple):
    """Repeat 0 is for warming up."""

    repeat: int
    requests: int
    temperature: float


def new_tokens(drafts: bool, requests: int, temperature: float) -> int:
    """Tokens per request that are timed: plain decoding takes a forward for each, and what many
    requests say counts many times."""
    if not drafts:
        return 96 if requests < 32 else 64
    return (256 if temperature == 0 else 128) // (1 if requests < 32 else 2)


def cells() -> Iterator[Cell]:
    """Repeats outermost: when time is up, all cells have about as many. Each size and temperature
    is run once before any is timed."""
    for repeat in range(1 + REPEATS):
        for requests in ORDER:
            for temperature in TEMPERATURES:
                yield Cell(repeat, requests, temperature)


class Ring:
    """One of several processes that take turns.

    Args:
        role: this one's.
        others: the roles that take part.
        out: folder that all share.
        ready_by, until: seconds since the epoch: who has not joined by the one is left out, and
            nothing begins after the other.
    """

    def __init__(
        self, role: str, others: Sequence[str], out: Path, ready_by: float, until: float
    ) -> None:
        self._role, self._out = role, out
        self._others = [other for other in others if other != role]
        self._ready_by, self._until = ready_by, until

    def run(
        self, alone: Callable[[], AbstractContextManager[None]], act: Callable[[Cell], None]
    ) -> int:
        """Runs ``act`` on each cell, alone on the machine; returns how many."""
        for number, cell in enumerate(cells()):
            self._file(self._role).write_text(str(number))
            while not all(self._through(other, number) for other in self._others):
                time.sleep(0.002)
            if time.time() > self._until:
                break
            with alone():
                act(cell)
        self._file(self._role).write_text("1000000")
        return number

    def _file(self, role: str) -> Path:
        return self._out / f"{role}.cell"

    def _through(self, other: str, number: int) -> bool:
        """Whether ``other`` has run all cells before this one, or will not."""
        try:
            return int(self._file(other).read_text() or 0) >= number
        except FileNotFoundError:
            gone = (self._out / f"{other}.done").exists()
            return gone or time.time() > self._ready_by


class Bench:
    """Times one engine; every figure is on disk as soon as it is there."""

    def __init__(
        self,
        engine: Any,
        policies: Sequence[str | None],
        prompts: Callable[[int], list[list[int]]],
        under: Callable[[str | None], AbstractContextManager[None]],
        file: Path,
    ) -> None:
        self._engine, self._policies = engine, policies
        self._prompts, self._under, self._file = prompts, under, file
        self.rows: list[dict[str, Any]] = []

    def cell(self, cell: Cell) -> None:
        """All policies once, in an order that turns with the repeat."""
        turn = cell.repeat % len(self._policies)
        for policy in (*self._policies[turn:], *self._policies[:turn]):
            row = self._timed(policy, cell)
            if cell.repeat:
                self.rows.append(row)
                with self._file.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def _timed(self, policy: str | None, cell: Cell) -> dict[str, Any]:
        from engine_cuda import timed_for
        from machine_noise import quiet_and_watched

        alone = self._engine.scheduler.server_args.speculative_algorithm is None
        new = new_tokens(not alone and policy != "plain", cell.requests, cell.temperature)
        params = {
            "temperature": cell.temperature,
            "max_new_tokens": new if cell.repeat else WARM_NEW,
            "ignore_eos": True,
        }
        if cell.temperature:
            params["sampling_seed"] = 10 + cell.repeat
        before, noise = _by_depth(), dict[str, float]()
        seconds = TIMED_SECONDS if cell.repeat else 0.001
        with self._under(policy), quiet_and_watched(noise):
            rate, each = timed_for(self._engine, self._prompts(cell.requests), params, seconds)
        after = _by_depth()
        return {
            "policy": str(policy),
            "conc": cell.requests,
            "T": cell.temperature,
            "repeat": cell.repeat,
            **rate.as_dict(),
            "each_ms": [round(ms, 3) for ms in each],
            "noise": {name: round(value, 3) for name, value in noise.items()},
            "ran": {
                name: [now - was for now, was in zip(counts, before.get(name, ()), strict=False)]
                or counts
                for name, counts in after.items()
                if counts != before.get(name)
            },
        }


def _by_depth() -> dict[str, list[int]]:
    """Of each policy: forwards, then offered and accepted by depth in turn."""
    from overstory.workers.step_stats import STATS

    found = {}
    for name, counts in STATS.snapshot()["verify"].items():
        pairs = zip(counts["offered_by_depth"], counts["accepted_by_depth"], strict=True)
        depths = [number for pair in pairs for number in pair]
        found[name] = [counts["forwards"], *depths, *[0] * (14 - len(depths))]
    return found


def learn_costs(scheduler: Any) -> dict[str, Any]:
    """Measures a cost table where nothing else runs and puts the automatic rule in force's reach.

    Run it at a boundary of an idle engine with an empty cache: it writes to KV slots.
    """
    from overstory.workers import tree_policy
    from overstory.workers.policy import FLOOR
    from overstory.workers.policy.start import _measured

    worker = scheduler.draft_worker
    table = _measured(worker, MEASURE_SECONDS)
    worker.chooser.start(table, FLOOR)
    tree_policy.HOLDER.automatic = True
    return table.to_json()


class Leases:
    """The step gate in a harness's loop, with a thread that grants leases as a controller does.

    Free running: nothing of it. The digests of a rank come with it.
    """

    STEPS = 64

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        from overstory.orchestrator.lease import Lease
        from overstory.workers.digest import DigestChain
        from overstory.workers.gate import StepGate
        from overstory.workers.scheduler_view import choice_of

        engine = self._engine
        view, receiver = engine._view, engine._gate
        gate = StepGate(0, 30.0, lambda lease: None)
        digests = DigestChain()
        self._given = receiver.recv_requests, engine.scheduler.process_batch_result
        receive, process = self._given

        def recv_requests() -> list[Any]:
            if view.idle():  # the harness has no sockets to sleep on
                return receive()
            begins = gate.before_pull(view)
            return gate.after_broadcast([*begins, *receive()], view)

        def process_batch_result(batch: Any, result: Any) -> None:
            process(batch, result)
            digests.add(batch.forward_iter, view.step_facts(batch, choice_of(result)))

        receiver.recv_requests = recv_requests
        engine.scheduler.process_batch_result = process_batch_result
        epoch, self._ending = gate.attach(), threading.Event()

        def grant() -> None:
            seq = 0
            while not self._ending.is_set():
                if seq == 0 or gate.view().wants_next:
                    seq += 1
                    gate.offer(Lease(epoch, seq, self.STEPS, "tree-31"))
                gate.await_due(0.05, view.launched(), self.STEPS)

        self._thread = threading.Thread(target=grant, daemon=True)
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._thread.join(5)
        receive, process = self._given
        self._engine._gate.recv_requests = receive
        self._engine.scheduler.process_batch_result = process


def leases(
    engine: Any,
    prompt: list[int],
    under: Callable[[str | None], AbstractContextManager[None]],
    pairs: int = 8,
) -> list[dict[str, float]]:
    """Tokens/s of tree-31 with and without leases, in turn."""
    from engine_cuda import timed_for
    from machine_noise import quiet_and_watched

    params: Mapping[str, Any] = {"temperature": 0.0, "max_new_tokens": 640, "ignore_eos": True}
    found = []

    def rate() -> float:
        whole, _ = timed_for(engine, [prompt], params, TIMED_SECONDS)
        return whole.as_dict()["tokens_per_s"]

    for number in range(1 + pairs):
        rates = {}
        for kind in ("free", "leased") if number % 2 else ("leased", "free"):
            with under("tree-31"), quiet_and_watched({}):
                with Leases(engine) if kind == "leased" else contextlib.nullcontext():
                    rates[kind] = rate()
        if number:
            found.append(rates)
    return found
