"""Measures what decode steps cost, with made-up requests, before an engine takes real ones.

The steps are the worker's own, draft to commit, over garbage in the KV pools; nothing is allocated,
and whoever measures clears the slot table. What stays in the pools is overwritten before a read.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from overstory.workers.ddtree.sampler import draw
from overstory.workers.policy.cost_table import CostTable

if TYPE_CHECKING:
    from overstory.workers.ddtree.worker import DDTreeWorker
    from overstory.workers.policy.options import Options
    from overstory.workers.tree_policy import TreePolicy

logger = logging.getLogger(__name__)

DRAWS = 3
"""Timings of the sampler alone."""

ROUNDS = 5
"""Most timings of a cell. The shortest counts: whatever else the machine does only adds."""

Cell = tuple[int, int]
"""Batch and context."""


class Timer(Protocol):
    """Runs steps."""

    def prepare(self, batch: int, context: int) -> None:
        """Next steps are of ``batch`` requests with ``context`` tokens each."""

    def step_us(self, policy: TreePolicy) -> int:
        """Microseconds of one greedy step under ``policy``."""

    def draw_us(self, policy: TreePolicy) -> int:
        """Microseconds that sampling adds to such a step."""

    def parts_us(self, policy: TreePolicy) -> int | None:
        """Microseconds of such a step in parts; None where it is one in any case."""


@dataclass(frozen=True)
class Grid:
    """Batches and contexts to measure, ascending."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    most_slots: int
    rows: int

    @classmethod
    def within(
        cls,
        batches: Iterable[int],
        contexts: Iterable[int],
        most_requests: int,
        most_context: int,
        most_slots: int,
        rows: int,
    ) -> Grid:
        """The part of a grid that an engine can run; its smallest cell always is part of it.

        Args:
            batches, contexts: the whole grid.
            most_requests, most_context, most_slots: what the engine holds.
            rows: most rows of a request's step.
        """
        fitting = [c for c in contexts if c <= min(most_context, most_slots - rows - 1)]
        least = fitting or [max(1, min(most_context, most_slots - rows - 1))]
        held = [
            b
            for b in batches
            if b <= most_requests and (b == 1 or b * (least[0] + rows) < most_slots)
        ]
        return cls(tuple(held), tuple(least), most_slots, rows)

    def fits(self, cell: Cell) -> bool:
        """Whether the pool holds the cell's tokens (slot 0 is SGLang's padding)."""
        batch, context = cell
        return batch * (context + self.rows) < self.most_slots

    def cells(self) -> list[Cell]:
        """Cells in the order in which they are worth having: extremes first, then between.

        A table needs its corners; what lies between them is filled along lines. Of the others the
        largest batches come first: a context costs several requests less than so many times what
        it costs one, by how much only they tell.
        """
        first, *others = self.batches
        cells = [(b, self.contexts[0]) for b in dict.fromkeys([first, *others[-1:], *others])]
        cells += [(first, c) for c in self.contexts[1:]]
        cells += [(b, c) for b in reversed(others) for c in reversed(self.contexts[1:])]
        return [cell for cell in cells if self.fits(cell)]


def measure(
    timer: Timer,
    options: Options,
    grid: Grid,
    seconds: float,
    agree: Callable[[int], int],
    clock: Callable[[], float] = time.monotonic,
) -> CostTable:
    """The table of what could be measured in ``seconds``.

    Each cell's options are timed in turn, round by round, so that what else the machine does falls
    on all alike. The first cell is always measured; what there was no time for is left out, or
    filled in from its batch and its context.

    Args:
        timer: runs the steps.
        options: what to time.
        grid: where.
        seconds: bound, checked between rounds.
        agree: gives rank 0's value on every rank: all run the same steps.
        clock: seconds.
    """
    deadline = clock() + seconds
    found: dict[Cell, list[int]] = {}
    draws: dict[int, list[int]] = {}
    parts: dict[int, list[int]] = {}
    cells = grid.cells()
    for number, cell in enumerate(cells):
        share = clock() + (deadline - clock()) / (len(cells) - number)
        timer.prepare(*cell)
        rounds: list[list[int]] = []
        while len(rounds) < ROUNDS:
            until = share if rounds else deadline
            first = not found and len(rounds) < 2  # the very first steps of a process are slow
            if not agree(int(first or clock() < until)):
                break
            rounds.append([timer.step_us(policy) for policy in options.policies])
        if not rounds:
            break
        found[cell] = [min(times) for times in zip(*rounds, strict=True)]
        if cell[0] not in draws:
            draws[cell[0]] = [timer.draw_us(policy) for policy in options.policies]
            parts[cell[0]] = [
                _more(timer.parts_us(policy), whole)
                for policy, whole in zip(options.policies, found[cell], strict=True)
            ]
    logger.info("cost table: %d of %d cells in time", len(found), len(cells))
    return _table(options, found, draws, parts)


def _more(in_parts: int | None, whole: int) -> int:
    return 0 if in_parts is None else max(0, in_parts - whole)


def _table(
    options: Options,
    found: dict[Cell, list[int]],
    draws: dict[int, list[int]],
    parts: dict[int, list[int]],
) -> CostTable:
    batches = sorted({batch for batch, _ in found})
    contexts = sorted({context for _, context in found})
    costs = {
        (o, b, c): _at(o, batch, context, found)
        for o in range(len(options))
        for b, batch in enumerate(batches)
        for c, context in enumerate(contexts)
    }
    drawn, in_parts = (
        {(o, b): more[batch][o] for o in range(len(options)) for b, batch in enumerate(batches)}
        for more in (draws, parts)
    )
    return CostTable.measured(
        options.names, batches, contexts, costs, options.rising, drawn, in_parts
    )


def _at(option: int, batch: int, context: int, found: dict[Cell, list[int]]) -> int:
    """A measured cell, else what its batch costs with the first context and what its own context
    adds, on a line between the batches next to it that were measured with that context.

    The first batch and the first context are measured before the others (`Grid.cells`), so both
    terms exist for each batch and context of the table. Beyond the largest measured batch a
    context is taken to add as much for each further request.
    """
    if (batch, context) in found:
        return max(1, found[batch, context][option])
    first = min(c for _, c in found)

    def added(known: int) -> int:
        return max(0, found[known, context][option] - found[known, first][option])

    measured = sorted(b for b, c in found if c == context)
    low = max(b for b in measured if b < batch)
    high = next((b for b in measured if b > batch), None)
    if high is None:
        more = added(low) * batch // low
    else:
        more = added(low) + (added(high) - added(low)) * (batch - low) // (high - low)
    return max(1, found[batch, first][option] + max(0, more))


class CellTimer:
    """Steps of a worker over made-up requests."""

    def __init__(self, worker: DDTreeWorker) -> None:
        self._worker = worker
        self._draw = torch.Generator().manual_seed(0)
        self._batch: Any = None
        self._roots = torch.empty(0, dtype=torch.int64)

    def prepare(self, batch: int, context: int) -> None:
        """See `Timer`."""
        worker, device = self._worker, self._worker.device
        vocabulary = int(worker.model_runner.model_config.vocab_size)
        self._roots = torch.randint(vocabulary, (batch,), generator=self._draw).to(device)
        width = context + worker.limits.max_rows
        table = worker.model_runner.req_to_token_pool.req_to_token
        slots = torch.arange(1, 1 + batch * width, dtype=table.dtype, device=device)
        table[1 : 1 + batch, :width] = slots.view(batch, width)
        self._batch = _made_up_batch(worker, batch, context)

    def step_us(self, policy: TreePolicy) -> int:
        """See `Timer`."""
        return self._timed(self._worker.run_step, policy)

    def parts_us(self, policy: TreePolicy) -> int | None:
        """See `Timer`."""
        if not self._worker.runs_whole(policy, self._batch):
            return None
        return min(self._timed(self._worker.run_in_parts, policy) for _ in range(ROUNDS))

    def _timed(self, run: Callable[[TreePolicy, Any], Any], policy: TreePolicy) -> int:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = self._batch
        batch.forward_mode = ForwardMode.DECODE
        batch.spec_info = self._worker._draft_input(self._roots, batch.seq_lens)
        self._wait()
        begun = time.perf_counter_ns()
        with torch.inference_mode():
            run(policy, batch)
        self._wait()
        return max(1, (time.perf_counter_ns() - begun) // 1000)

    def draw_us(self, policy: TreePolicy) -> int:
        """See `Timer`."""
        worker, bs = self._worker, len(self._roots)
        rows = 1 + policy.drafted_nodes(worker.limits.block_size)
        vocabulary = int(worker.model_runner.model_config.vocab_size)
        logits = torch.empty((bs * rows, vocabulary), device=worker.device).normal_()
        positions = torch.arange(bs * rows, device=worker.device)
        greedy = self._batch.sampling_info
        sampled = _sampling_info(self._batch, vocabulary, 1.0)
        times: dict[bool, list[int]] = {True: [], False: []}
        for info in (greedy, sampled) * DRAWS:
            self._wait()
            begun = time.perf_counter_ns()
            draw(logits, info, positions, rows)
            self._wait()
            times[info is sampled].append(time.perf_counter_ns() - begun)
        return max(0, min(times[True]) - min(times[False])) // 1000

    def _wait(self) -> None:
        if self._worker.device != "cpu":
            torch.cuda.synchronize()


def _made_up_batch(worker: DDTreeWorker, size: int, context: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = worker.model_runner
    vocabulary = int(runner.model_config.vocab_size)
    reqs = []
    for number in range(size):
        ids = array("q", [0] * 8)
        reqs.append(Req(f"cost-{number}", "", ids, SamplingParams(), vocab_size=vocabulary))
    batch = ScheduleBatch.init_new(
        reqs,
        runner.req_to_token_pool,
        runner.token_to_kv_pool_allocator,
        None,
        runner.model_config,
        not worker.server_args.disable_overlap_schedule,
        SpeculativeAlgorithm.from_string(worker.server_args.speculative_algorithm),
    )
    lengths = torch.full((size,), context, dtype=torch.int64)
    batch.seq_lens = lengths.to(worker.device)
    batch.seq_lens_cpu = lengths
    batch.seq_lens_sum = size * context
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.req_pool_indices = torch.arange(1, 1 + size, device=worker.device)
    batch.sampling_info = _sampling_info(batch, vocabulary, 0.0)
    return batch


def _sampling_info(batch: Any, vocabulary: int, temperature: float) -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

    for req in batch.reqs:
        req.sampling_params = SamplingParams(temperature=temperature, max_new_tokens=1 << 20)
        req.sampling_params.normalize(None)
    return SamplingBatchInfo.from_schedule_batch(batch, vocabulary)
