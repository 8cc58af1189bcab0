"""Speeds of several engines in turn, at 1 to 64 requests. `engine_runs.py` uses it.

The engines live in processes of their own on one GPU. A cell is one (repeat, requests, temperature)
under every policy; the engines run a cell one after the other before any begins the next, so that
what else the machine does falls on all alike. Within a cell the policies of one engine take turns
batch by batch, for the same reason: what disturbs a machine comes in stretches of tenths of a
second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from engine_cuda import Rate

SIZES = (1, 2, 4, 8, 16, 32, 64)
ORDER = (1, 8, 64, 32, 2, 16, 4)
TEMPERATURES = (0.0, 1.0)
REPEATS = 3
POLICIES = tuple(
    os.environ.get("ENGINE_SESSION_POLICIES", "plain chain tree-15 tree-31 tree-63 auto").split()
)
"""`tree-8` runs in the graph of 16 rows: it is `tree-15` on a GPU."""

SPINE, SPINE_SIZES = "spine-15", (1, 8, 64)
"""Steps of it run in small launches: it is timed at some sizes, if ENGINE_SESSION_SPINE is 1."""

WARM_NEW = 24
MEASURE_SECONDS = 8.0
TIMED_SECONDS = float(os.environ.get("ENGINE_SESSION_TIMED", "0.3"))
"""Least time of a row of one repeat, in as many batches as it takes."""

FIRST_SECONDS = 1.0
"""How long `auto` runs at each size before it is timed: a server has run for hours. What it gives
meanwhile is a row of its own, `auto-first`."""


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
                if time.time() > self._until:
                    break
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
        if (self._out / f"{other}.done").exists():  # its process has ended
            return True
        try:
            return int(self._file(other).read_text() or 0) >= number
        except FileNotFoundError:
            return time.time() > self._ready_by


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
        """All policies in turn, batch by batch, until each has had its time."""
        from machine_noise import quiet_and_watched

        policies = [*self._policies]
        spine = os.environ.get("ENGINE_SESSION_SPINE") == "1"
        if spine and "auto" in policies and cell.requests in SPINE_SIZES:
            policies.append(SPINE)
        noise = dict[str, float]()
        with quiet_and_watched(noise):
            if cell.repeat:
                runs = self._in_turn(policies, cell)
            else:
                for policy in policies:
                    self._batch(policy, cell, 0, WARM_NEW)
                runs = {"auto-first": self._first(cell)} if "auto" in policies else {}
        for name, batches in runs.items():
            row = _row(name, cell, batches, noise)
            self.rows.append(row)
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _in_turn(self, policies: Sequence[str | None], cell: Cell) -> dict[str, list[_Batch]]:
        runs: dict[str, list[_Batch]] = {str(policy): [] for policy in policies}

        def wanting(policy: str | None) -> bool:
            return sum(batch.rate.seconds for batch in runs[str(policy)]) < TIMED_SECONDS

        number = 0
        while any(map(wanting, policies)):
            turn = (cell.repeat + number) % len(policies)
            for policy in (*policies[turn:], *policies[:turn]):
                if wanting(policy):
                    runs[str(policy)].append(self._batch(policy, cell, number))
            number += 1
        return runs

    def _first(self, cell: Cell) -> list[_Batch]:
        batches: list[_Batch] = []
        while sum(batch.rate.seconds for batch in batches) < FIRST_SECONDS:
            batches.append(self._batch("auto", cell, len(batches)))
        return batches

    def _batch(self, policy: str | None, cell: Cell, number: int, new: int | None = None) -> _Batch:
        """One batch. Sampled ones have the same seeds under every policy."""
        from engine_cuda import timed

        alone = self._engine.scheduler.server_args.speculative_algorithm is None
        drafts = not alone and policy != "plain"
        params = {
            "temperature": cell.temperature,
            "max_new_tokens": new or new_tokens(drafts, cell.requests, cell.temperature),
            "ignore_eos": True,
        }
        if cell.temperature:
            params["sampling_seed"] = 10 + cell.repeat + 1000 * number
        before = _by_depth()
        with self._under(policy):
            rate = timed(self._engine, self._prompts(cell.requests), params)
        return _Batch(rate, _ran_since(before))


@dataclass(frozen=True)
class _Batch:
    """``ran``: by policy, as `_by_depth` what this batch added."""

    rate: Rate
    ran: dict[str, list[int]]


def _row(
    name: str, cell: Cell, batches: Sequence[_Batch], noise: Mapping[str, float]
) -> dict[str, Any]:
    from engine_cuda import together

    rates = [batch.rate for batch in batches]
    whole = together(rates)
    firsts = sorted(1e3 * first for first in whole.first_s)
    ran: dict[str, list[int]] = {}
    for batch in batches:
        for policy, counts in batch.ran.items():
            known = ran.get(policy, [0] * len(counts))
            ran[policy] = [a + b for a, b in zip(known, counts, strict=True)]
    return {
        "policy": name,
        "conc": cell.requests,
        "T": cell.temperature,
        "repeat": cell.repeat,
        **whole.as_dict(),
        "batches": [[rate.tokens, round(rate.seconds, 6), rate.forwards] for rate in rates],
        "ttft_ms": round(statistics.median(firsts), 3),
        "ttft_p95_ms": round(firsts[math.ceil(0.95 * (len(firsts) - 1))], 3),
        "noise": {key: round(value, 3) for key, value in noise.items()},
        "ran": ran,
    }


def _ran_since(before: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    return {
        name: [now - was for now, was in zip(counts, before.get(name, [0] * 15), strict=False)]
        for name, counts in _by_depth().items()
        if counts != before.get(name)
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

    Args:
        steps: of a lease. 64 are `control.lease_steps`, the least that a controller grants by
            default; a replica of 1,000 steps/s is granted 500 (`control.lease_s`).
        without: parts that do nothing, of `gate` and `notes`; without both what is left is what
            the harness itself adds to a step.
    """

    def __init__(self, engine: Any, steps: int = 64, without: Sequence[str] = ()) -> None:
        self._engine, self._steps, self._without = engine, steps, without

    def _notes(self) -> Any:
        from overstory.workers.digest import DigestChain
        from overstory.workers.step_notes import StepNotes

        class Idle(StepNotes):
            def note(self, batch: Any, result: Any) -> None: ...

        kind = Idle if "notes" in self._without else StepNotes
        view = self._engine._view
        return kind(DigestChain(), view._slots, view._free_slots)

    def _gate(self, notes: Any) -> Any:
        from overstory.workers.gate import StepGate

        class Idle(StepGate):
            def before_pull(self, scheduler: Any) -> list[Any]:
                return []

            def after_broadcast(self, requests: list[Any], scheduler: Any) -> list[Any]:
                return requests

        kind = Idle if "gate" in self._without else StepGate
        return kind(0, 30.0, lambda lease: notes.lease(lease.steps))

    def __enter__(self) -> None:
        from overstory.orchestrator.controller import REPORT_WAIT_S
        from overstory.orchestrator.lease import Lease
        from overstory.workers.scheduler_view import SglangScheduler

        class View(SglangScheduler):
            def input_waits(self, timeout_s: float, wake_line: int) -> bool:
                return True  # The harness has no sockets to sleep on: it waits when it is asked.

        engine = self._engine
        view, receiver = View(engine.scheduler), engine._gate
        notes = self._notes()
        gate = self._gate(notes)
        self._given = receiver.recv_requests, engine.scheduler.process_batch_result
        receive, process = self._given

        def recv_requests() -> list[Any]:
            begins = gate.before_pull(view)
            pulled = receive()
            return gate.after_broadcast([*begins, *pulled] if begins else pulled, view)

        def process_batch_result(batch: Any, result: Any) -> None:
            process(batch, result)
            notes.note(batch, result)

        receiver.recv_requests = recv_requests
        engine.scheduler.process_batch_result = process_batch_result
        epoch, self._ending = gate.attach(), threading.Event()
        self._detach = lambda: gate.detach(epoch)

        def grant() -> None:
            seq = 0
            while not self._ending.is_set():
                if seq == 0 or gate.view().wants_next:
                    seq += 1
                    gate.offer(Lease(epoch, seq, self._steps, "tree-31"))
                gate.await_due(REPORT_WAIT_S, view.launched(), self._steps // 2)

        self._thread = threading.Thread(target=grant, daemon=True)
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._ending.set()
        self._detach()
        self._thread.join(5)
        receive, process = self._given
        self._engine._gate.recv_requests = receive
        self._engine.scheduler.process_batch_result = process


LEASE_KINDS: dict[str, dict[str, Any]] = {
    "leased": {},
    "leased_500": {"steps": 500},
    "harness": {"without": ("gate", "notes")},
    "gate": {"without": ("notes",)},
    "digests": {"without": ("gate",)},
}
"""What `leases` compares with free running, as arguments of `Leases`."""


def leases(
    engine: Any,
    prompt: list[int],
    under: Callable[[str | None], AbstractContextManager[None]],
    until: float,
    pairs: int = 60,
    kinds: Sequence[str] = ("leased", "leased_500"),
    tokens: int = 640,
) -> list[dict[str, float]]:
    """One request under tree-31 with and without leases, a text each in turn; for as many rounds,
    and not beyond ``until`` (seconds since the epoch).

    Returns:
        of each round, by kind (`free` and ``kinds``, of `LEASE_KINDS`): tokens/s; and microseconds
        of a step: KIND_us of the wall, KIND_own_us of CPU time of the loop's thread.
    """
    from engine_cuda import timed
    from machine_noise import quiet_and_watched

    params: Mapping[str, Any] = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    found: list[dict[str, float]] = []
    every = ("free", *kinds)
    with under("tree-31"), quiet_and_watched({}):
        for number in range(1 + pairs):
            row: dict[str, float] = {}
            turn = number % len(every)
            for kind in (*every[turn:], *every[:turn]):
                leased = Leases(engine, **LEASE_KINDS[kind]) if kind != "free" else None
                with leased or contextlib.nullcontext():
                    rate = timed(engine, [prompt], params)
                row[kind] = rate.tokens / rate.seconds
                row[f"{kind}_us"] = 1e6 * rate.seconds / rate.forwards
                row[f"{kind}_own_us"] = 1e6 * engine.thread_s / rate.forwards
            if number:
                found.append(row)
            if time.time() > until:
                break
    return found
