"""SGLang's CUDA graph runner without a GPU: captured forwards are run again instead of replayed.

Everything around the graph is real: static buffers, padding to captured batch sizes, planning ahead
of each replay, the choice between graph and eager forwards. What a graph would freeze is frozen: a
forward that is run again sees the tensors, sizes and plan of its capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.seam.attention import OverstoryCpuAttention
from overstory.workers.seam.cuda_attention import OverstoryAttention
from overstory.workers.seam.cuda_block_attention import BlockAttention
from overstory.workers.seam.cuda_limits import AttentionShape

if TYPE_CHECKING:
    import pytest
    from harness import EngineHarness

_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"


class RerunBackend:
    """Takes the place of SGLang's `FullCudaGraphBackend`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.replays = 0
        self._captured: dict[Any, tuple[Callable[[], Any], Any]] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], **_more: Any) -> None:
        forward_fn()
        plan = getattr(self.runner.attn_backend, "_plan", None)
        self._captured[shape_key] = (forward_fn, plan)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._captured

    def replay(self, shape_key: Any, forward_batch: Any, **_more: Any) -> Any:
        forward_fn, plan = self._captured[shape_key]
        if plan is not None:
            self.runner.attn_backend._plan = plan
        self.replays += 1
        return forward_fn()


class RerunRecorder:
    """Takes the place of `CudaRecorder`: a step is run again, on the tensors of its capture, and
    writes over what it gave the last time."""

    def __init__(self) -> None:
        self.replays = 0

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    def record(self, act: Callable[[], Any]) -> Callable[[], Any]:
        act()
        kept = act()

        def again() -> Any:
            self.replays += 1
            for place, value in zip(_tensors_of(kept), _tensors_of(act()), strict=True):
                place.copy_(value)
            return kept

        return again


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """Those of a step's output, each in its place."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = vars(value).values() if dataclasses.is_dataclass(value) else value
    return [tensor for part in parts for tensor in _tensors_of(part)]


def put_backends(monkeypatch: pytest.MonkeyPatch, max_rows: int, block_size: int = 8) -> None:
    """Targets made from now on use `OverstoryAttention`, on the reference ops, and their drafters
    `BlockAttention`."""
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup

    from overstory.workers.seam import cuda_attention

    def make(runner: Any) -> Any:
        if runner.is_draft_worker:
            return BlockAttention(runner, OverstoryCpuAttention(runner), block_size)
        return OverstoryAttention(runner, OverstoryCpuAttention(runner))

    monkeypatch.setattr(cuda_attention, "attention_shape", lambda _: AttentionShape(8, max_rows))
    monkeypatch.setattr(setup, "ATTENTION_BACKENDS", {"torch_native": make})


def capture(engine: EngineHarness, monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """Captures drafter and target, as `DDTreeWorker.init_cuda_graphs` does on CUDA."""
    import importlib

    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.speculative.draft_worker_common import make_draft_sampler_capture_hook

    from overstory.workers.ddtree.graph_tiers import GraphTiers

    module = importlib.import_module(_RUNNER)
    monkeypatch.setattr(
        module, "graph_capture", lambda: contextlib.nullcontext(SimpleNamespace(stream=None))
    )
    monkeypatch.setattr(module, "resolve_decode_backend", RerunBackend)
    monkeypatch.setattr(ForwardMode, "is_cpu_graph", ForwardMode.is_cuda_graph)
    worker = engine.scheduler.model_worker
    target, drafter = worker.model_runner, worker.draft_model_runner
    for runner in (drafter, target):
        graphs = runner.server_args.cuda_graph_config.decode
        graphs.backend, graphs.bs = "full", sizes
        runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(runner)
        if runner is drafter:
            hook = make_draft_sampler_capture_hook(worker._drafter.candidates_in_graph(max(sizes)))
            runner.capture_tail_hooks.append(hook)
        runner.decode_cuda_graph_runner = module.DecodeCudaGraphRunner(runner)
    worker._tiers = GraphTiers.capture(target, worker.limits)
    worker.chooser.captured(worker._tiers.tier)
    for runner in (drafter.decode_cuda_graph_runner, *worker._tiers._runners.values()):
        runner.device_module = SimpleNamespace(Event=lambda: SimpleNamespace(record=lambda: None))


def capture_steps(engine: EngineHarness, sizes: list[int]) -> RerunRecorder:
    """Captures whole steps as well, after `capture`."""
    from overstory.workers.ddtree.step_graph import StepGraphs

    recorder = RerunRecorder()
    worker = engine.scheduler.model_worker
    worker._step_graphs = StepGraphs(worker, sizes, recorder)
    return recorder
