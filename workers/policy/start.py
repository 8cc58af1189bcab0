"""The cost table of an engine that starts: from the cache, or measured. Needs SGLang.

Rank 0 reads, measures by its own clock and writes; the others run the same forwards and get the
table by broadcast.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers import tree_policy
from overstory.workers.ddtree.step_record import PENDING
from overstory.workers.policy import FLOOR, FLOOR_ENV, MEASURE_SECONDS, MEASURE_SECONDS_ENV
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.measure import CellTimer, Grid, measure
from overstory.workers.policy.table_cache import TableCache, cache_folder

if TYPE_CHECKING:
    from overstory.workers.ddtree.decisions import DecisionGroup
    from overstory.workers.ddtree.worker import DDTreeWorker

logger = logging.getLogger(__name__)

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXTS = (256, 2048, 16384, 65536)
_PACKAGES = ("overstory", "sglang", "torch")

_ARGUMENTS = (
    "attention_backend",
    "disable_overlap_schedule",
    "dtype",
    "kv_cache_dtype",
    "moe_runner_backend",
    "page_size",
    "quantization",
    "speculative_draft_attention_backend",
    "speculative_num_draft_tokens",
    "tp_size",
)
"""Server arguments that change what a step costs."""


def prepare(_result: Any, scheduler: Any) -> None:
    """AFTER hook on SGLang's ``Scheduler.init_model_worker``: memory, backends and graphs are
    there, requests are not."""
    from overstory.workers.ddtree.worker import DDTreeWorker

    worker = scheduler.draft_worker
    if isinstance(worker, DDTreeWorker) and tree_policy.HOLDER.automatic:
        worker.chooser.start(_table(worker), _setting(FLOOR_ENV, FLOOR))


def _table(worker: DDTreeWorker) -> CostTable:
    group = worker.chooser.group
    seconds = _setting(MEASURE_SECONDS_ENV, MEASURE_SECONDS)
    cache = TableCache(cache_folder(), cache_key(worker))

    def anew() -> CostTable:
        group.host_ints([1])
        return _measured(worker, seconds)

    if group.decides:
        measured = False

        def noted() -> CostTable:
            nonlocal measured
            measured = True
            return anew()

        table = cache.load_or_measure(noted, patience_s=4 * seconds)
        if not measured:
            group.host_ints([0])
        logger.info("cost table %d %s %s", table.version, "in" if measured else "from", cache.path)
    elif group.host_ints([0])[0]:
        _measured(worker, seconds)
    return _shared(group, table if group.decides else None)


def _measured(worker: DDTreeWorker, seconds: float) -> CostTable:
    options = worker.chooser.options
    runner = worker.model_runner
    grid = Grid.within(
        _BATCHES,
        _CONTEXTS,
        most_requests=int(runner.max_running_requests),
        most_context=int(runner.model_config.context_len) - worker.limits.max_rows,
        most_slots=int(runner.max_total_num_tokens),
        rows=worker.limits.max_rows,
    )
    table = measure(CellTimer(worker), options, grid, seconds, _rank_0_says(worker.chooser.group))
    PENDING.start()  # nobody reads the outcome of made-up steps
    runner.req_to_token_pool.req_to_token.zero_()
    return table


def _rank_0_says(group: DecisionGroup) -> Callable[[int], int]:
    return lambda value: group.host_ints([value])[0]


def _shared(group: DecisionGroup, table: CostTable | None) -> CostTable:
    """Rank 0's table on all ranks."""
    text = b"" if table is None else table.to_json().encode()
    length = group.host_ints([len(text)])[0]
    values = group.host_ints(list(text) if text else [0] * length)
    return CostTable.from_json(json.loads(bytes(values)))


def cache_key(worker: DDTreeWorker) -> dict[str, object]:
    """Everything that the costs depend on: models, device, versions, settings."""
    arguments = worker.server_args
    return {
        "target": _model_identity(arguments.model_path),
        "drafter": _model_identity(arguments.speculative_draft_model_path),
        "device": _device_name(worker.device),
        "threads": torch.get_num_threads() if worker.device == "cpu" else 0,
        "graphs": not arguments.disable_cuda_graph,
        "captured": worker.captured_requests(),
        "whole_steps": worker.whole_step_requests(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "arguments": {name: str(getattr(arguments, name, None)) for name in _ARGUMENTS},
        "options": worker.chooser.options.names,
        "grid": [_BATCHES, _CONTEXTS, int(worker.model_runner.max_running_requests)],
    }


def _model_identity(path: str) -> list[object]:
    """Path, and the sizes and times of its files: another checkpoint there is another model."""
    folder = Path(path)
    if not folder.is_dir():
        return [path]
    files = sorted(f for f in folder.iterdir() if f.suffix in (".json", ".safetensors"))
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return [str(folder.resolve()), *facts]


def _device_name(device: str) -> str:
    if device != "cpu":
        return str(torch.cuda.get_device_name())
    cores = os.cpu_count()
    return f"{platform.machine()} {_processor()} x {cores}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _setting(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
