"""Whether a rank fits its GPU, and which setting makes it fit. Pure."""

from overstory.orchestrator.engine_flags import EngineSettings
from overstory.orchestrator.memory import GIB, RankMemory
from overstory.orchestrator.spec import DeploymentSpec


def _smaller_kv(settings: EngineSettings) -> str:
    cache = settings.server_args.get("kv_cache_dtype", "auto")
    if cache in ("auto", "bfloat16", "bf16"):
        return ", set engine.kv_cache_dtype: fp8_e4m3 (half the bytes)"
    return ""


def _weights_fault(spec: DeploymentSpec, memory: RankMemory, gpu_bytes: float) -> str | None:
    needed = memory.target_weights + memory.drafter_weights + memory.process
    if needed <= gpu_bytes:
        return None
    return (
        f"engine.tp_size: a rank's weights and CUDA's own take {needed / GIB:.1f} GiB, its GPU "
        f"share has {gpu_bytes / GIB:.1f} GiB; raise engine.tp_size (now {spec.tp_size}) or "
        "resources.gpus_per_rank"
    )


def _pool_fault(
    spec: DeploymentSpec, settings: EngineSettings, memory: RankMemory, room: int
) -> str | None:
    """The pool cannot hold one request of the promised length."""
    args = settings.server_args
    rows = 2 * (args.get("speculative_num_draft_tokens") or 1)
    wanted = args.get("context_length") or 1
    page = args.get("page_size") or 1
    most = room // page * page - max(rows, 2 * page)
    if most >= wanted:
        return None
    lower = f"lower engine.context_length to {most}" if most > 0 else "it holds no request at all"
    return (
        f"engine.context_length: one request of {wanted} tokens and {rows} rows of its trees do "
        f"not fit the KV pool, which has room for {max(0, room)} tokens of "
        f"{memory.kv_reserved_per_token:.0f} B; {lower}, raise engine.mem_fraction_static (now "
        f"{args.get('mem_fraction_static') or 'by SGLang'}) or engine.tp_size (now {spec.tp_size})"
        f"{_smaller_kv(settings)}"
    )


def gpu_faults(
    spec: DeploymentSpec, settings: EngineSettings, memory: RankMemory, gpu_bytes: float
) -> list[str]:
    """What cannot fit for certain; empty where the GPU's size (bytes of a rank's share) is 0."""
    if not gpu_bytes:
        return []
    if fault := _weights_fault(spec, memory, gpu_bytes):
        return [fault]
    asked = settings.server_args.get("max_total_tokens") or 0
    if asked > memory.kv_tokens:  # SGLang would go on with fewer
        return [
            f"engine.max_total_tokens: got {asked}, beside the weights engine.mem_fraction_static "
            f"(now {settings.server_args.get('mem_fraction_static') or 'by SGLang'}) leaves room "
            f"for {memory.kv_tokens} tokens; lower the one, raise the other or engine.tp_size "
            f"(now {spec.tp_size})"
        ]
    fault = _pool_fault(spec, settings, memory, memory.kv_tokens)
    return [fault] if fault else []


def gpu_warnings(memory: RankMemory) -> list[str]:
    """What may not fit by the estimate of buffers."""
    missing = memory.beside_pool - memory.spare
    if not memory.spare or missing <= 0:
        return []
    return [
        f"engine.mem_fraction_static: graphs, buffers and request table are estimated at "
        f"{memory.beside_pool / GIB:.1f} GiB, it leaves {memory.spare / GIB:.1f} GiB; lower it, "
        "engine.chunked_prefill_size, engine.cuda_graph_max_bs_decode or "
        "engine.max_running_requests"
    ]
