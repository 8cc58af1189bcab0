"""Times decode steps of an engine, and says which stage and which experts they go to.

Steps are the worker's own over made-up requests (`overstory.workers.policy.measure.CellTimer`).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slice_points import POLICIES, Cell
from slice_stages import Kernel, from_trace, median_times, split_steps, stage_times

WARM = 2
MOST_STEPS = 12
POINT_S = 0.45
"""Seconds of timed steps of a point, at least two steps."""
SLEEP_S = 0.006
"""Between profiled steps; longer than any pause within one."""


class StepBench:
    """Steps of one engine's worker.

    Attributes:
        timer: launches steps of the cell at hand.

    Args:
        worker: the DDTREE worker.
        on_cuda: false leaves profiles out (a rehearsal on a CPU).
    """

    def __init__(self, worker: Any, on_cuda: bool) -> None:
        self._worker, self._on_cuda = worker, on_cuda
        self.timer = _row_timer()(worker)

    def prepare(self, cell: Cell) -> None:
        """Next steps are of this cell."""
        from overstory.workers.ddtree.step_record import PENDING

        PENDING.start()  # nobody reads the steps' records here
        self.timer.prepare(cell.batch, cell.context)

    def point(self, rows: int, longest_s: float) -> dict[str, Any]:
        """Microseconds of steps of ``rows`` rows per request, each waited for, and in a row.

        Args:
            longest_s: no more timed steps after this; two are always taken.
        """
        policy = self._policy(rows)
        begun = time.perf_counter()
        for _ in range(WARM):
            self.timer.step_us(policy)
            if time.perf_counter() - begun > longest_s:
                break
        times: list[int] = []
        begun = time.perf_counter()
        while len(times) < MOST_STEPS:
            times.append(self.timer.step_us(policy))
            if len(times) >= 2 and time.perf_counter() - begun > min(POINT_S, longest_s):
                break
        found: dict[str, Any] = {
            "policy": str(policy),
            "steps": len(times),
            "step_us": statistics.median(times),
            "least_us": min(times),
            "most_us": max(times),
        }
        if statistics.median(times) < 2e5:
            found["in_a_row_us"] = round(self._in_a_row(policy, 6), 1)
        return found

    def stages(
        self, rows: Sequence[int], steps: int = 2, keep: Path | None = None
    ) -> list[dict[str, float]]:
        """Stages of a step of each number of rows, from one profile; empty on a CPU.

        Args:
            keep: file for the launches themselves (see `keep_launches`), written first.
        """
        import torch
        from torch.profiler import ProfilerActivity

        if not self._on_cuda:
            return []
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as tracer:
            for policy in map(self._policy, rows):
                for _ in range(steps):
                    self.timer.step_us(policy)
                    time.sleep(SLEEP_S)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            tracer.export_chrome_trace(str(file))
            found = from_trace(json.loads(file.read_text())["traceEvents"])
        if keep is not None:
            keep_launches(keep, found, rows, steps)
        every = [stage_times(one) for one in split_steps(found, steps * len(rows))]
        return [median_times(every[i * steps : (i + 1) * steps]) for i in range(len(rows))]

    def experts(self, rows: int) -> dict[str, float]:
        """Distinct experts of each expert layer in one step, run without graphs."""
        seen: list[int] = []

        def note(module: Any, args: Any, output: Any) -> None:
            del module, args
            seen.append(int(output.topk_ids.unique().numel()))

        layers = self._worker.model_runner.model.model.layers
        routers = [layer.mlp.topk for layer in layers if hasattr(layer.mlp, "topk")]
        hooks = [router.register_forward_hook(note) for router in routers]
        try:
            with eager(self._worker):
                self.timer.step_us(self._policy(rows))
        finally:
            for hook in hooks:
                hook.remove()
        assert len(seen) == len(routers), (len(seen), len(routers))
        return {"mean": statistics.mean(seen), "least": min(seen), "most": max(seen)}

    def _in_a_row(self, policy: Any, count: int) -> float:
        """Microseconds of a step when none is waited for."""
        begun = time.perf_counter_ns()
        for _ in range(count):
            self.timer.launch(policy)
        self.timer.wait()
        return (time.perf_counter_ns() - begun) / 1000 / count

    @staticmethod
    def _policy(rows: int) -> Any:
        from overstory.workers.tree_policy import TreePolicy

        return TreePolicy.parse(POLICIES[rows])


def keep_launches(file: Path, found: Sequence[Kernel], rows: Sequence[int], steps: int) -> None:
    """Writes a profile in short (gzip): names, and of each launch its name's number, its start and
    its length in microseconds; ``steps`` steps of each of ``rows``, in that order."""
    names = {name: number for number, name in enumerate(dict.fromkeys(k.name for k in found))}
    begun = found[0].start if found else 0.0
    launches = [
        (names[k.name], round(k.start - begun, 2), round(k.end - k.start, 2)) for k in found
    ]
    content = {"rows": list(rows), "steps": steps, "names": list(names), "launches": launches}
    file.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 3))


def read_launches(file: Path) -> tuple[list[int], int, list[Kernel]]:
    """Rows, steps of each, and launches of a file of `keep_launches`."""
    content = json.loads(gzip.decompress(file.read_bytes()))
    found = [Kernel(content["names"][n], at, at + us) for n, at, us in content["launches"]]
    return content["rows"], content["steps"], found


def _row_timer() -> Any:
    """`CellTimer` that can launch a step without waiting for it; made late, as it loads SGLang."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from overstory.workers.policy.measure import CellTimer

    class RowTimer(CellTimer):
        def launch(self, policy: Any) -> None:
            batch, worker = self._batch, self._worker
            batch.forward_mode = ForwardMode.DECODE
            batch.spec_info = worker._draft_input(self._roots, batch.seq_lens)
            with torch.inference_mode():
                worker.run_step(policy, batch)

        def wait(self) -> None:
            self._wait()

    return RowTimer


@contextlib.contextmanager
def in_parts(worker: Any) -> Iterator[None]:
    """Steps as those of several ranks: graphs of the forwards, and small launches between them."""
    kept, worker._step_graphs = worker._step_graphs, None
    try:
        yield
    finally:
        worker._step_graphs = kept


@contextlib.contextmanager
def eager(worker: Any, attention: Any = None) -> Iterator[None]:
    """Steps in parts without graphs of the target, with another attention backend if given."""
    runner = worker.model_runner
    kept = (
        worker._step_graphs,
        worker._tiers,
        runner.decode_cuda_graph_runner,
        runner.attn_backend,
    )
    worker._step_graphs = worker._tiers = runner.decode_cuda_graph_runner = None
    if attention is not None:
        runner.attn_backend = attention
    try:
        yield
    finally:
        (
            worker._step_graphs,
            worker._tiers,
            runner.decode_cuda_graph_runner,
            runner.attn_backend,
        ) = kept
