"""A real SGLang scheduler on CUDA inside this process: what `engine_runs.py` drives.

Needs SGLang on PYTHONPATH, and for engines of ours the plugin's
entry point. Sets environment variables: import it before SGLang.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"  # it would wait in every step
sys.path.append(str(Path(__file__).parents[1] / "engine"))

from harness import EngineHarness

RUN_DEADLINE_S = 240.0
_MANY = 1 << 40


class CudaEngine(EngineHarness):
    """As `EngineHarness`; `free_run` lets the event loop pass without a stop at each step."""

    device = "cuda"

    def _wire(self) -> None:
        super()._wire()
        self._left: set[str] = set()
        self._over = threading.Event()
        self._over_at = 0.0
        self.first_at: dict[str, float] = {}
        self.thread_s = 0.0  # CPU time of the loop's thread in the last `free_run`
        collector = self.scheduler.output_streamer.send_to_detokenizer
        given = collector.send_output

        def send_output(message: Any, request: Any = None) -> None:
            given(message, request)
            now = time.perf_counter()
            for rid in getattr(message, "rids", None) or ():
                self.first_at.setdefault(rid, now)
            if self._left and all(self.outputs[rid].done for rid in self._left):
                self._over_at = time.perf_counter()
                self._left = set()
                self._over.set()

        collector.send_output = send_output

    def free_run(self, rids: Sequence[str]) -> float:
        """Lets the loop run until the requests are done, then stops it at its gate.

        Nothing polls meanwhile: another thread that wakes takes the interpreter from the loop.

        Returns:
            when the last token was out, by `time.perf_counter`.
        """
        deadline = time.monotonic() + RUN_DEADLINE_S
        assert self._thread.ident is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        begun = time.clock_gettime(clock)
        self._over.clear()
        self._over_at = time.perf_counter()
        self._left = {rid for rid in rids if not self.outputs[rid].done}
        if not self._left:
            return self._over_at
        with self._gate.condition:
            self._gate.allowed = _MANY
            self._gate.condition.notify_all()
        try:
            while not self._over.wait(1.0):
                if self._gate.ended is not None or time.monotonic() > deadline:
                    break
        finally:
            with self._gate.condition:
                self._gate.allowed = 0
            self.thread_s = time.clock_gettime(clock) - begun
        self._gate.wait_idle()
        left = [rid for rid in rids if not self.outputs[rid].done]
        assert not left, f"{len(left)} of {len(rids)} requests not done"
        return self._over_at

    def run_steps(self, iterations: int) -> None:
        """Lets so many iterations pass without a stop at each."""
        with self._gate.condition:
            self._gate.allowed = iterations
            self._gate.condition.notify_all()
        self._gate.wait_idle()

    def texts(
        self,
        prompts: Sequence[Sequence[int]],
        params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        **fields: Any,
    ) -> list[str]:
        """Runs all prompts as one batch. Returns the ids of the requests, for `outputs`."""
        every = [params] * len(prompts) if isinstance(params, Mapping) else list(params)
        rids = [
            self.submit(prompt, one, **dict(fields))
            for prompt, one in zip(prompts, every, strict=True)
        ]
        self.free_run(rids)
        self.step(3)
        return rids


class StockEngine(CudaEngine):
    """SGLang as it is."""

    with_plugin = False


@dataclass
class Rate:
    """One timed batch. Time counts from when all requests have their first token.

    Attributes:
        first_s: seconds from when all were handed over to the first token of each.
    """

    tokens: int
    seconds: float
    forwards: int
    first_s: list[float]

    def as_dict(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "ms_per_forward": 1e3 * self.seconds / max(self.forwards, 1),
            "tokens_per_forward": self.tokens / max(self.forwards, 1),
        }


def timed(engine: CudaEngine, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]) -> Rate:
    """Decoding speed of a batch of requests."""
    handed_over = time.perf_counter()
    rids = [engine.submit(prompt, params) for prompt in prompts]
    watch = [engine.outputs[rid] for rid in rids]
    for _ in range(1000):
        engine.step()
        if all(output.ids for output in watch):
            break
    before = sum(len(output.ids) for output in watch)
    forwards, begun = engine.scheduler.forward_ct, time.perf_counter()
    seconds = engine.free_run(rids) - begun
    rate = Rate(
        sum(len(output.ids) for output in watch) - before,
        seconds,
        engine.scheduler.forward_ct - forwards,
        [engine.first_at.pop(rid) - handed_over for rid in rids],
    )
    engine.step(3)
    return rate


def together(rates: Sequence[Rate]) -> Rate:
    """Several batches as one."""
    return Rate(
        sum(rate.tokens for rate in rates),
        sum(rate.seconds for rate in rates),
        sum(rate.forwards for rate in rates),
        [first for rate in rates for first in rate.first_s],
    )
