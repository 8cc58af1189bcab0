"""Settings of experts that SGLang ignores, loads wrongly in silence, or runs on other GPUs. Pure.

By SGLang 0.5.17's `compressed_tensors.py` and `deepseek_v2.py`.
"""

from collections.abc import Mapping
from typing import Any

from overstory.orchestrator.model_facts import TargetFacts
from overstory.orchestrator.quantization import packed_integers, weight_widths

INTEGER_RUNNERS = ("auto", "marlin", "triton")
"""What packed integer experts run with on the GPUs that our kernels are built for."""
NEWER_GPU_RUNNER = "flashinfer_trtllm"


def runner_faults(target: TargetFacts, args: Mapping[str, Any]) -> list[str]:
    """Why the experts would not run as `moe_runner_backend` says; empty if they would."""
    runner = args.get("moe_runner_backend") or "auto"
    packed = target.routed_experts and packed_integers(target.quantization)
    if not packed or runner in INTEGER_RUNNERS:
        return []
    why = (
        "is for compute capability 10.0"
        if runner == NEWER_GPU_RUNNER
        else "is ignored by SGLang, which takes Marlin"
    )
    return [
        f"engine.moe_runner_backend: {runner} {why} where experts are packed integers, as the "
        "model's are; leave it out (Marlin), or take triton"
    ]


def fusion_faults(target: TargetFacts, args: Mapping[str, Any]) -> list[str]:
    """Why the shared expert cannot be fused into the others as asked; empty if it can."""
    if not args.get("enforce_shared_experts_fusion") or not target.shared_experts:
        return []
    widths = weight_widths(target.quantization, 2.0)
    if widths.shared == widths.experts:
        return []
    return [
        "engine.enforce_shared_experts_fusion: got true, but the checkpoint holds the shared "
        "expert in another format than the experts, and SGLang would load it wrongly without a "
        "word; leave it out"
    ]
