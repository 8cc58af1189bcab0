"""Which stage of a decode step each kernel belongs to, and how long each stage takes. Pure.

Names alone do not tell: the same matrix kernels serve drafter, projections and head. So a step is
cut where only one kernel can be (the drafter's candidates, the walk of the tree), and names decide
within the verify forward.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

STAGES = ("draft", "build", "attention", "moe", "dense", "head", "commit")
"""In the order of a step. ``dense`` is the verify forward's rest: projections, norms, shared
experts, KV writes. ``commit`` is the walk, the compaction and the drafter's KV."""

_CANDIDATES = ("merge_candidates", "candidates_topk")
_ACCEPT = ("tree_accept",)
_NORM = ("rmsnorm",)
_OUR_ATTENTION = ("overstory::mla", "mla::attention", "mla::combine")
_TRITON_ATTENTION = ("_fwd_kernel", "_fwd_grouped_kernel", "_decode_att")
_EXPERT_GEMM = ("marlin", "fused_moe_kernel")
_MOE = ("moe", "router", "topk", "fused_gate", "gating", "fillfunctor", "memset")
_GATED = ("act_and_mul", "silu_and_mul", "run_activation")


IDLE_US = 5900.0
"""Between profiled steps; a little under the bench's sleep."""


class Kernel(NamedTuple):
    """One launch on the device's clock, microseconds."""

    name: str
    start: float
    end: float


def from_trace(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Kernels, copies and fills of a Chrome trace's ``traceEvents``, by start."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [
        Kernel(str(e["name"]), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in kinds and "dur" in e
    ]
    return sorted(found, key=lambda k: k.start)


def split_steps(
    kernels: Sequence[Kernel], steps: int, idle_us: float = IDLE_US
) -> list[list[Kernel]]:
    """Cuts a run of ``steps`` steps where the device is idle after a walk of the tree.

    The longest pauses alone do not tell: while it profiles, CUPTI may hold a graph's launch back
    for longer than the sleep between two steps.

    Args:
        kernels: by start; every step has one walk.
        idle_us: the least pause between two steps.

    Raises:
        ValueError: not as many steps are found.
    """
    parts: list[list[Kernel]] = [[]]
    walked, last = False, kernels[0].end if kernels else 0.0
    for kernel in kernels:
        if walked and kernel.start - last >= idle_us:
            parts.append([])
            walked = False
        parts[-1].append(kernel)
        last = max(last, kernel.end)
        walked |= any(part in kernel.name.lower() for part in _ACCEPT)
    if len(parts) != steps:
        raise ValueError(f"got {len(parts)} steps in a profile of {steps}")
    return parts


def stages_of(kernels: Sequence[Kernel]) -> list[str]:
    """The stage of each kernel of one step.

    Args:
        kernels: of one step, by start.

    Raises:
        ValueError: no norm or no attention among them: this is no step of a target.
    """
    names = [k.name.lower() for k in kernels]
    drafted = _last(names, _CANDIDATES, len(names))
    accept = _first(names, _ACCEPT, drafted + 1)
    accept = len(names) if accept is None else accept
    verify = _first(names, _NORM, drafted + 1)
    if verify is None or verify >= accept:
        raise ValueError("no norm between the draft and the walk: not a step of a target")
    inside = [_inside(name) for name in names[verify:accept]]
    if "attention" not in inside:
        raise ValueError("no attention kernel known here among those of the verify forward")
    busy = verify + max(i for i, stage in enumerate(inside) if stage != "dense")
    final = _first(names, _NORM, busy + 1)
    head = accept if final is None or final >= accept else final + 1
    _gated_by_experts(names, verify, inside)
    return [
        "draft"
        if i <= drafted
        else "build"
        if i < verify
        else inside[i - verify]
        if i < head
        else "head"
        if i < accept
        else "commit"
        for i in range(len(names))
    ]


def stage_times(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Microseconds of each stage of one step, of the pauses between its kernels, and in all.

    Where kernels of two stages overlap, the time goes to the one that began first, so that stages
    and pauses add up to ``span``.
    """
    times = dict.fromkeys((*STAGES, "pauses"), 0.0)
    reached = kernels[0].start
    for kernel, stage in zip(kernels, stages_of(kernels), strict=True):
        times["pauses"] += max(0.0, kernel.start - reached)
        begun = max(kernel.start, reached)
        if kernel.end > begun:
            times[stage] += kernel.end - begun
            reached = kernel.end
    return times | {"span": reached - kernels[0].start}


def median_times(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each stage, over several steps."""
    return {name: round(statistics.median(s[name] for s in steps), 1) for name in steps[0]}


def _inside(name: str) -> str:
    if any(part in name for part in (*_OUR_ATTENTION, *_TRITON_ATTENTION)):
        return "attention"
    if any(part in name for part in (*_EXPERT_GEMM, *_MOE)):
        return "moe"
    return "dense"


def _gated_by_experts(names: Sequence[str], verify: int, inside: list[str]) -> None:
    """The activation between an expert layer's two products is the experts', in place."""
    open_layer = False
    for i in range(len(inside)):
        name = names[verify + i]
        if any(part in name for part in _EXPERT_GEMM):
            open_layer = not open_layer
        elif open_layer and any(part in name for part in _GATED):
            inside[i] = "moe"


def _first(names: Sequence[str], parts: Sequence[str], start: int) -> int | None:
    found = (i for i in range(start, len(names)) if any(part in names[i] for part in parts))
    return next(found, None)


def _last(names: Sequence[str], parts: Sequence[str], end: int) -> int:
    """-1 if there is none."""
    return max((i for i in range(end) if any(part in names[i] for part in parts)), default=-1)
