"""An engine of one rank's shapes with made-up weights, KV and routing. Import before SGLang.

Changes SGLang in this process, each for a reason of the measurement alone:
- layers share KV memory in ``kv_sets`` sets, so that all layers and the longest contexts fit at
  once. Each layer still reads all of its context from memory: what the layers between two uses of
  a set read is several times the L2. Compaction moves the rows of the sets, not of every layer.
- of SGLang's models only those of the pair are loaded.
- norms are 1 and routers are random, so that states neither vanish nor all take the same experts.
- the rows' embeddings get noise of their own: which experts rows take is then independent of the
  (random) drafter's tokens. ``alike`` makes rows similar.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"  # it would wait in every step
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "0"  # slots are held by hand
sys.path.append(str(Path(__file__).parents[1] / "engine"))

import harness
from slice_modules import SLOW, WouldCompileError

harness.STEP_DEADLINE_S = 900.0
NOISE_ROWS = 16 * 33


class RowNoise:
    """Noise of the rows of a forward, at an address that stays.

    Args:
        hidden: width of a row.
        device: of the model.
    """

    def __init__(self, hidden: int, device: Any) -> None:
        import torch

        self._draw = torch.Generator(device=device).manual_seed(11)
        self.rows = torch.empty((NOISE_ROWS, hidden), dtype=torch.bfloat16, device=device)
        self.alike(0.0)

    def alike(self, share: float) -> None:
        """``share`` of the rows' variance (0 to 1) becomes common to all of them."""
        import torch

        own = torch.empty(self.rows.shape, device=self.rows.device).normal_(generator=self._draw)
        common = torch.empty_like(own[:1]).normal_(generator=self._draw)
        self.rows.copy_(common * share**0.5 + own * (1 - share) ** 0.5)

    def add(self, module: Any, args: Any, output: Any) -> Any:
        """A forward hook of the embedding."""
        del module, args
        rows = output.reshape(-1, output.shape[-1])
        if rows.shape[0] > NOISE_ROWS:
            return output
        return (rows + self.rows[: rows.shape[0]]).view_as(output)


def leave_other_models() -> None:
    """SGLang is not to load models but the pair's: it would load some 200 files of them first.

    Before SGLang's registry of models is there. A model that another one imports is loaded anyway.
    """
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations
    files = Path(package.submodule_search_locations[0], "srt", "models").glob("*.py")
    names = sorted({file.stem for file in files} - {"__init__", "deepseek_v2", "dflash"})
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(names)


def freshen(model: Any, scale: float = 1.0) -> None:
    """Makes a model of dummy weights compute something: see the module."""
    import torch

    draw = None
    for name, value in model.named_parameters():
        if draw is None:
            draw = torch.Generator(device=value.device).manual_seed(7)
        if name.endswith("e_score_correction_bias"):
            value.data.zero_()
        elif "norm" in name and value.dim() == 1:
            value.data.fill_(1.0)
        elif name.endswith("mlp.gate.weight"):
            value.data.normal_(0.0, value.shape[1] ** -0.5, generator=draw)
        elif value.dtype in (torch.int32, torch.uint8) and value.dim() == 3:  # packed INT4
            value.data.random_(generator=draw)
        elif scale != 1.0 and torch.is_floating_point(value) and value.dim() == 2:
            value.data.mul_(scale)


def share_kv(sets: int) -> None:
    """Layers of an MLA pool share memory in ``sets`` sets; SGLang's sizing is told."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    create, size = MLATokenToKVPool._create_buffers, DefaultPoolConfigurator._compute_cell_size

    def create_shared(self: Any) -> None:
        layers, self.layer_num = self.layer_num, min(sets, self.layer_num)
        try:
            create(self)
        finally:
            self.layer_num = layers
        made = self.kv_buffer
        for buffer in made:
            buffer.normal_()
        self.kv_buffer = [made[i % len(made)] for i in range(layers)]

    def sized(self: Any, kvc: Any, num_layers: int) -> int:
        whole = int(size(self, kvc, num_layers))
        return max(1, whole * min(sets, num_layers) // num_layers)

    MLATokenToKVPool._create_buffers = create_shared
    DefaultPoolConfigurator._compute_cell_size = sized
    _move_each_buffer_once()


def _move_each_buffer_once() -> None:
    """The mover is told of every set once; it refuses a buffer that is listed twice.

    On a CPU, where no table of buffers is made, one is made all the same: as on a GPU it refuses
    what cannot be moved.
    """
    from overstory.kernels import ops
    from overstory.workers.ddtree import commit

    listed, begin = commit.kv_buffers, commit.TargetKv.__init__

    def distinct(pool: Any) -> list[Any]:
        return list({buffer.data_ptr(): buffer for buffer in listed(pool)}.values())

    def checked(self: Any, pool: Any) -> None:
        begin(self, pool)
        for group in self._groups:
            if isinstance(group, list):
                ops.LayerTable(group)

    commit.kv_buffers = distinct
    commit.TargetKv.__init__ = checked  # type: ignore[method-assign]


def shape_steps(tree_tiers: tuple[int, ...], failed: list[str]) -> None:
    """Trees of these numbers of rows are captured, greedy steps only.

    Should whole steps not be captured, ``failed`` says why, and steps run in parts.
    """
    from overstory.workers.ddtree import graph_tiers, step_graph, worker

    graph_tiers.TREE_TIERS = tree_tiers  # type: ignore[assignment]
    step_graph.DRAWS = ("greedy",)  # type: ignore[assignment]
    whole = step_graph.StepGraphs

    def captured(*arguments: Any) -> Any:
        try:
            return whole(*arguments)
        except Exception:
            failed.append(traceback.format_exc()[-3000:])
            return None

    worker.StepGraphs = captured  # type: ignore[assignment,misc]


def note_modules(compiled: dict[str, float]) -> None:
    """Notes the seconds of each module that SGLang has to compile. Of the one that takes minutes
    nothing is compiled: it is built before (slice_modules.py)."""
    import tvm_ffi.cpp

    compile_one = tvm_ffi.cpp.load_inline

    def load_inline(name: str, **given: Any) -> Any:
        if SLOW in name:
            raise WouldCompileError(
                f"{name} is not in TVM_FFI_CACHE_DIR and takes minutes: bring what "
                "slice_modules.sh builds, as SLICE_MODULES"
            )
        begun = time.monotonic()
        try:
            return compile_one(name, **given)
        finally:
            compiled[name] = round(time.monotonic() - begun, 1)

    tvm_ffi.cpp.load_inline = load_inline


def weigh_graphs(found: list[dict[str, Any]]) -> None:
    """Notes what each capture takes: memory that torch holds more of (buffers), and memory that is
    gone beyond that (nodes, kernels that are loaded)."""
    import torch
    from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

    from overstory.workers.ddtree import step_graph

    if not torch.cuda.is_available():
        return
    capture, record = DecodeCudaGraphRunner.__init__, step_graph.CudaRecorder.record

    def state() -> tuple[int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free, torch.cuda.memory_reserved()

    def weighed(kind: str, act: Any) -> Any:
        used, held = state()
        made = act()
        used_after, held_after = state()
        buffers = held_after - held
        beyond = used_after - used - buffers
        found.append({"kind": kind, "buffer_bytes": buffers, "beyond_bytes": beyond})
        return made

    def runner(self: Any, *arguments: Any, **named: Any) -> None:
        rows = named.get("speculative_num_draft_tokens", "all")
        weighed(f"runner {rows}", lambda: capture(self, *arguments, **named))

    def recorded(self: Any, act: Any) -> Any:
        return weighed("step", lambda: record(self, act))

    DecodeCudaGraphRunner.__init__ = runner
    step_graph.CudaRecorder.record = recorded  # type: ignore[method-assign]


def after_loading(noise: list[RowNoise], scale: float, noisy: bool) -> None:
    """Every model is freshened when it is loaded; a target's embedding gets noise."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    def loaded(self: Any) -> None:
        load(self)
        freshen(self.model, scale)
        embedding = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        if noisy and embedding is not None and not noise:
            hidden = int(self.model_config.hidden_size)
            noise.append(RowNoise(hidden, next(self.model.parameters()).device))
            embedding.register_forward_hook(noise[0].add)

    ModelRunner.load_model = loaded


def leave_draft_attention() -> None:
    """The drafter stays on SGLang's attention."""
    from overstory.workers.seam.cuda_block_attention import BlockAttention

    BlockAttention.install = classmethod(lambda cls, runner, block: False)  # type: ignore[assignment,method-assign]


class SliceEngine(harness.EngineHarness):
    """One rank's engine.

    Args:
        pair: folders of target and drafter.
        rows: most rows per request.
        kv_sets: see the module; 0 leaves SGLang's KV as it is.
        noisy: rows get noise.
        scale: of the dummy weights.
        fields: further server arguments.
    """

    device = "cuda"

    def __init__(
        self,
        pair: tuple[str, str],
        rows: int,
        kv_sets: int = 0,
        noisy: bool = True,
        scale: float = 1.0,
        **fields: Any,
    ) -> None:
        from overstory.workers.environment import prepare_process

        prepare_process(self.device)
        self.noise: list[RowNoise] = []
        if kv_sets:
            share_kv(kv_sets)
        self.not_captured: list[str] = []
        self.graphs: list[dict[str, Any]] = []
        shape_steps((9, 17), self.not_captured)
        weigh_graphs(self.graphs)
        self.compiled: dict[str, float] = {}
        note_modules(self.compiled)
        after_loading(self.noise, scale, noisy)
        cuda = {
            "attention_backend": "overstory",
            "sampling_backend": "pytorch",
            "disable_prefill_cuda_graph": True,
            "mem_fraction_static": 0.9,
        }
        arguments = (cuda if self.device == "cuda" else {}) | {
            "load_format": "dummy",
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": pair[1],
            "speculative_num_draft_tokens": rows,
            "random_seed": 1,
            "skip_server_warmup": True,
            "page_size": 1,
            "log_level": "info",
        }
        super().__init__(pair[0], **(arguments | fields))

    @property
    def worker(self) -> Any:
        """The DDTREE worker."""
        return self.scheduler.model_worker
