"""GPU memory beside weights and KV pool: captured graphs and the buffers of a forward. Pure.

SGLang reserves by a rule of its own and does not measure before it runs; the sums here say what the
reserve is for, so that a plan can tell when it is too small. Defaults are those of SGLang 0.5.17's
`ServerArgs` (`_handle_gpu_memory_settings`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from overstory.orchestrator.model_facts import DrafterFacts, TargetFacts
from overstory.workers.ddtree.graph_tiers import tier_rows

MIB = 2**20

# (GPU memory below this many MiB, prefill chunk, largest captured batch below TP 4, from TP 4 on)
_BY_MEMORY = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 2048, 24, 80),
    (60 * 1024, 4096, 32, 160),
    (90 * 1024, 8192, 256, 512),
    (160 * 1024, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
_UNKNOWN_GPU = (4096, 160)

GRAPH_LAYER_BYTES = 0.18e6
"""Of a layer in a captured graph, some 25 kernels: what 33 captured forwards of 61 layers took
of an H200 beyond torch's buffers (docs/benchmarks/rank_slice_h200.md)."""
CAPTURE_BYTES = (32 + 20) * MIB
"""Of each set of graphs, whatever its size: cuBLAS's workspace on Hopper, and the least piece of
large memory that torch takes."""
WHOLE_STEP_DRAWS = 3
"""Ways to draw that whole steps are captured with (`overstory.workers.ddtree.step_graph.DRAWS`)."""
PREFIX_CHUNK_TOKENS = 128 * 1024
"""Tokens whose keys and values SGLang expands at a time in a prefill over a cached prefix."""
_ALIVE = 6
"""Hidden-sized tensors alive in a layer: residual, normed, projected, reduced, two of experts."""


def _defaults(flags: Mapping[str, Any], gpu_bytes: float) -> tuple[int, int]:
    """SGLang's prefill chunk and largest captured decode batch for a GPU of this size."""
    if gpu_bytes <= 0:
        return _UNKNOWN_GPU
    small = flags.get("tp_size", 1) < 4
    for below, chunk, few, many in _BY_MEMORY:
        if gpu_bytes / MIB < below:
            return chunk, few if small else many
    raise AssertionError("the last row takes every GPU")


def prefill_chunk(flags: Mapping[str, Any], gpu_bytes: float) -> int:
    """Prompt tokens of one prefill forward."""
    return flags.get("chunked_prefill_size") or _defaults(flags, gpu_bytes)[0]


def captured_batches(flags: Mapping[str, Any], gpu_bytes: float) -> list[int]:
    """Batch sizes of which a decode graph is captured; empty without graphs."""
    off = ("disable_cuda_graph", "disable_decode_cuda_graph")
    if any(flags.get(key) for key in off) or flags.get("cuda_graph_backend_decode") == "disabled":
        return []
    if given := flags.get("cuda_graph_bs_decode"):
        return sorted(given)
    most = flags.get("cuda_graph_max_bs_decode") or _defaults(flags, gpu_bytes)[1]
    if flags.get("speculative_algorithm") is None:
        tiers = [
            1,
            2,
            4,
            8,
            12,
            *range(16, 257, 8),
            *range(272, 512, 16),
            *range(512, most + 1, 32),
        ]
    else:
        tiers = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]
        tiers += range(272, most + 1, 16)
    return sorted({*(tier for tier in tiers if tier <= most), most})


def layer_bytes(target: TargetFacts, rows: int, tp_size: int) -> float:
    """Buffers alive while `rows` tokens are in a layer with experts (bfloat16)."""
    heads = target.num_heads / tp_size
    attention = heads * (target.nope_dim + 2 * target.rope_dim + 2 * target.kv_lora_rank)
    routed = target.experts_per_token * (target.hidden_size + 3 * target.expert_width / tp_size)
    dense = 3 * target.dense_width / tp_size
    return 2.0 * rows * (_ALIVE * target.hidden_size + max(attention, routed, dense))


def logits_bytes(target: TargetFacts, rows: int, tp_size: int) -> float:
    """Logits of `rows`: a rank's part in bfloat16, all of them in float32."""
    return rows * target.vocab_size * (2.0 / tp_size + 4.0)


def graph_bytes(
    target: TargetFacts, drafter: DrafterFacts | None, flags: Mapping[str, Any], gpu_bytes: float
) -> float:
    """All captured decode graphs: see `capture_bytes`.

    With a drafter there is a set for each tier of rows, one of the drafter's own, and with one rank
    whole steps.
    """
    batches = captured_batches(flags, gpu_bytes)
    if not batches:
        return 0.0
    most, tp_size = flags.get("speculative_num_draft_tokens") or 1, flags.get("tp_size", 1)
    rows = (most,) if drafter is None else tier_rows(most, drafter.block_size)
    draws = WHOLE_STEP_DRAWS if drafter is not None and tp_size == 1 else 0
    return capture_bytes(target, drafter, batches, rows, tp_size, draws)


def capture_bytes(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    batches: Sequence[int],
    rows: Sequence[int],
    tp_size: int,
    draws: int,
) -> float:
    """Memory of graphs: their nodes, and for each set of them the buffers of its largest batch.

    Sets do not share buffers (measured: docs/benchmarks/rank_slice_h200.md).

    Args:
        batches: numbers of requests that are captured.
        rows: per request, a set for each.
        draws: whole steps are captured with so many ways to draw; 0: none are.
    """
    largest = max(batches)

    def one_set(tokens: int) -> float:
        return (
            CAPTURE_BYTES
            + layer_bytes(target, tokens, tp_size)
            + logits_bytes(target, tokens, tp_size)
        )

    total = sum(one_set(largest * each) for each in rows)
    layers = len(batches) * len(rows) * target.num_layers
    if drafter is not None:
        total += one_set(largest * drafter.block_size)
        layers += len(batches) * drafter.num_layers
        if draws:
            steps = len(batches) * draws * (2 + sum(each > 1 for each in rows))
            total += one_set(largest * max(rows)) + CAPTURE_BYTES
            layers += steps * (target.num_layers + drafter.num_layers)
    return total + layers * GRAPH_LAYER_BYTES


def workspace_bytes(
    target: TargetFacts, drafter: DrafterFacts | None, flags: Mapping[str, Any], gpu_bytes: float
) -> float:
    """Buffers of one prefill chunk: a layer's, the drafter's features, an expanded prefix."""
    chunk, tp_size = prefill_chunk(flags, gpu_bytes), flags.get("tp_size", 1)
    features = 0
    if drafter is not None:
        features = 2 * chunk * len(drafter.target_layer_ids) * target.hidden_size
    context = flags.get("context_length") or target.max_positions
    prefix = min(PREFIX_CHUNK_TOKENS, context) * target.num_heads / tp_size
    expanded = 2.0 * prefix * (target.nope_dim + target.rope_dim + target.value_dim)
    return layer_bytes(target, chunk, tp_size) + features + expanded


def vision_factor(target: TargetFacts) -> float:
    """What SGLang leaves of its own fraction to a model with a vision tower."""
    if not target.vision_layers:
        return 1.0
    growth = target.vision_layers * target.vision_hidden**2 / (24 * 1024**2) - 1.0
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * growth))


def default_fraction(target: TargetFacts, flags: Mapping[str, Any], gpu_bytes: float) -> float:
    """SGLang's `mem_fraction_static` where the deployment sets none."""
    if gpu_bytes <= 0:
        return 0.88 * vision_factor(target)
    gpu = gpu_bytes / MIB
    reserved = 512 + max(prefill_chunk(flags, gpu_bytes), 2048) * 1.5
    reserved += flags.get("tp_size", 1) / 8 * 1024
    reserved += max(captured_batches(flags, gpu_bytes), default=0) * 2
    if not flags.get("disable_cuda_graph") and not flags.get("disable_prefill_cuda_graph"):
        reserved += 1.5 * 1024
    if gpu > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    fraction = round((gpu - reserved) / gpu, 3)
    return fraction * vision_factor(target)
