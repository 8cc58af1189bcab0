"""Cost of one scheduler step and of start-up on a CPU. Results: docs/benchmarks/cpu_step.md.

CPU time is that of the whole process, so it hardly depends on what else the machine does; wall time
does. `--own NAME` leaves one of our changes out and lets SGLang's own code run, for comparison.

    .venv/bin/python tests/engine/bench_cpu_step.py --mode plain --own moe --own norm
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overstory.workers.environment import prepare_process
from overstory.workers.tiny.paths import resolve_model

if TYPE_CHECKING:
    from harness import EngineHarness

    from overstory.workers.seam.patches import Patch

#: What `--own` may leave out: part of the name of the change.
OWN = {
    "moe": "moe_forward_native",
    "norm": "RMSNorm.forward_native",
    "attention": "attention backend torch_native",
}
PROMPT_TOKENS = 160
WARM_STEPS = 20
STEPS = 120


def main() -> None:
    arguments = _arguments()
    prepare_process("cpu", arguments.threads)
    if arguments.all_imports:
        _undo_standins()
    begun = _clocks()
    import sglang.srt.managers.scheduler  # noqa: F401

    imported = _since(begun)
    _leave_out(arguments.own)
    os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "0"
    from harness import EngineHarness

    begun = _clocks()
    engine = EngineHarness(arguments.target, **_mode_fields(arguments))
    built = _since(begun)
    _row("import scheduler", imported, "s")
    _row("build scheduler", built, "s")
    import psutil

    print(f"unique memory: {psutil.Process().memory_full_info().uss >> 20} MB")
    for batch in (1, 4):
        _measure(engine, batch)
    print(f"load average {os.getloadavg()[0]:.1f}, {arguments.threads} thread(s)")
    os._exit(0)  # nothing here is worth SGLang's slow shutdown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="overstory-tiny", type=resolve_model)
    parser.add_argument("--drafter", default="overstory-tiny-drafter", type=resolve_model)
    parser.add_argument(
        "--mode", default="plain", help="plain, dflash, or a tree policy: chain, tree-15"
    )
    parser.add_argument("--own", action="append", default=[], choices=sorted(OWN))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--all-imports",
        action="store_true",
        help="only sgl_kernel has a stand-in, nothing is hidden",
    )
    return parser.parse_args()


def _mode_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.mode == "plain":
        return {}
    if arguments.mode == "dflash":
        return {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": arguments.drafter,
        }
    from overstory.workers.ddtree import server_fields
    from overstory.workers.ddtree.drafter_config import read_drafter
    from overstory.workers.tree_policy import TreePolicy

    block_size = read_drafter(arguments.drafter).block_size
    return server_fields(TreePolicy.parse(arguments.mode), block_size, arguments.drafter)


def _undo_standins() -> None:
    import sys

    from overstory.workers.seam import standins

    for name in standins.HIDDEN:
        if sys.modules.get(name, "") is None:
            del sys.modules[name]
    for name in set(standins.STANDINS) - {standins.KERNEL_PACKAGE}:
        del standins.STANDINS[name]


def _leave_out(names: list[str]) -> None:
    """Keeps changes from being installed."""
    from overstory.workers.seam import attention
    from overstory.workers.seam.portable import installer

    for module in (installer, attention):
        module.patches = _without(module.patches, [OWN[name] for name in names])


def _without(patches: Callable[[], list[Patch]], parts: list[str]) -> Callable[[], list[Patch]]:
    return lambda: [p for p in patches() if not any(part in p.name for part in parts)]


def _measure(engine: EngineHarness, batch: int) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
    prompts = [list(range(10 + i, 10 + i + PROMPT_TOKENS)) for i in range(batch)]
    rids = [engine.submit(prompt, greedy) for prompt in prompts]
    engine.step(WARM_STEPS)
    before = sum(len(engine.outputs[rid].ids) for rid in rids)
    begun = _clocks()
    engine.step(STEPS)
    cpu, wall = _since(begun)
    tokens = sum(len(engine.outputs[rid].ids) for rid in rids) - before
    _row(f"step, batch {batch}", (cpu / STEPS * 1e3, wall / STEPS * 1e3), "ms")
    print(f"tokens/s, batch {batch}: {tokens / wall:.1f}")
    for rid in rids:
        engine.abort(rid)
    engine.run(rids)


def _clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(begun: tuple[float, float]) -> tuple[float, float]:
    cpu, wall = _clocks()
    return cpu - begun[0], wall - begun[1]


def _row(name: str, taken: tuple[float, float], unit: str) -> None:
    print(f"{name}: {taken[0]:.2f} {unit} CPU, {taken[1]:.2f} {unit} wall", flush=True)


if __name__ == "__main__":
    main()
