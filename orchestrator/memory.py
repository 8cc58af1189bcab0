"""Memory of one rank, estimated from the model's shape. Pure arithmetic."""

from dataclasses import dataclass
from math import prod
from typing import Any

from overstory.orchestrator import gpu_memory
from overstory.orchestrator.model_facts import DrafterFacts, TargetFacts
from overstory.orchestrator.quantization import weight_widths

GIB = 2**30

_DTYPE_BYTES = {
    "float32": 4.0,
    "float": 4.0,
    "float16": 2.0,
    "half": 2.0,
    "bfloat16": 2.0,
    "fp8_e5m2": 1.0,
    "fp8_e4m3": 1.0,
    "fp4_e2m1": 0.5,
}

# Allowances for what the model's shape does not tell: interpreter and imported libraries of a CPU
# rank (measured: 0.75 to 0.9 GB of unique memory); CUDA context, NCCL's buffers and loaded modules.
PROCESS_BYTES = {"cpu": 0.9e9, "cuda": 1.5 * GIB}
# What a GPU rank takes of its node's memory: allowance for pinned buffers and libraries.
HOST_BYTES_OF_GPU_RANK = 6.0 * GIB
FRONT_HALF_BYTES = 0.8e9


@dataclass(frozen=True)
class Shard:
    """Elements of a weight group on one rank: cut over the ranks, or whole on each."""

    cut: int = 0
    whole: int = 0

    def __add__(self, other: "Shard") -> "Shard":
        return Shard(self.cut + other.cut, self.whole + other.whole)

    def times(self, count: int) -> "Shard":
        """`count` of these."""
        return Shard(self.cut * count, self.whole * count)

    def on_rank(self, tp_size: int) -> float:
        """Elements that one of `tp_size` ranks holds."""
        return self.cut / tp_size + self.whole


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; `kv_tokens` is how many tokens its KV pool holds.

    On a GPU `spare` is what `mem_fraction_static` leaves for `request_table`, `graphs` and
    `workspace`; 0 where the GPU's size is unknown.
    """

    target_weights: float
    drafter_weights: float
    kv_bytes_per_token: float
    kv_tokens: int
    request_table: float
    process: float
    graphs: float = 0.0
    workspace: float = 0.0
    spare: float = 0.0

    @property
    def kv_pool(self) -> float:
        """Bytes of the KV pool (target and drafter)."""
        return self.kv_bytes_per_token * self.kv_tokens

    @property
    def total(self) -> float:
        """All of it."""
        weights = self.target_weights + self.drafter_weights
        return weights + self.kv_pool + self.process + self.beside_pool

    @property
    def beside_pool(self) -> float:
        """What must fit beside weights and KV pool."""
        return self.request_table + self.graphs + self.workspace


def dtype_bytes(name: str) -> float:
    """Bytes per element; `auto` and unknown names count as bfloat16."""
    return _DTYPE_BYTES.get(name, 2.0)


def _attention(t: TargetFacts) -> Shard:
    query_width = t.num_heads * (t.nope_dim + t.rope_dim)
    if t.q_lora_rank:
        query = Shard(t.q_lora_rank * query_width, t.hidden_size * t.q_lora_rank + t.q_lora_rank)
    else:
        query = Shard(t.hidden_size * query_width)
    latent = t.hidden_size * (t.kv_lora_rank + t.rope_dim) + t.kv_lora_rank
    expand = t.kv_lora_rank * t.num_heads * (t.nope_dim + t.value_dim)
    output = t.num_heads * t.value_dim * t.hidden_size
    return query + Shard(expand + output, latent)


def absorbed_elements(t: TargetFacts) -> Shard:
    """SGLang keeps `kv_b_proj` a second time, split for the absorbed form of MLA."""
    per_layer = prod((t.kv_lora_rank, t.num_heads, t.nope_dim + t.value_dim))
    return Shard(per_layer).times(t.num_layers)


def expert_elements(t: TargetFacts) -> Shard:
    """Weights of the routed experts of all layers."""
    per_layer = 3 * t.hidden_size * t.expert_width * t.routed_experts
    return Shard(per_layer).times(t.moe_layers)


def attention_elements(t: TargetFacts) -> Shard:
    """Projections of all layers' attention, with the small norms between them."""
    return _attention(t).times(t.num_layers)


def dense_elements(t: TargetFacts) -> Shard:
    """MLPs of the layers without experts."""
    return Shard(3 * t.hidden_size * t.dense_width).times(t.dense_layers)


def shared_elements(t: TargetFacts) -> Shard:
    """Shared experts of all layers."""
    per_layer = Shard(3 * t.hidden_size * t.expert_width * t.shared_experts)
    return per_layer.times(t.moe_layers)


def plain_elements(t: TargetFacts) -> Shard:
    """What no scheme quantises: embedding, head, norms, router."""
    norms = Shard(whole=2 * t.hidden_size).times(t.num_layers)
    router = Shard(whole=(t.hidden_size + 1) * t.routed_experts).times(t.moe_layers)
    ends = Shard(t.vocab_size * t.hidden_size * (1 if t.tied_head else 2), t.hidden_size)
    return norms + router + ends


def other_elements(t: TargetFacts) -> Shard:
    """All weights of the target's language part but its routed experts, as in the checkpoint."""
    return attention_elements(t) + dense_elements(t) + shared_elements(t) + plain_elements(t)


def drafter_elements(d: DrafterFacts, target_hidden: int) -> Shard:
    """Weights of the drafter, as in its checkpoint (embedding and head are the target's)."""
    heads = Shard(2 * d.hidden_size * d.head_dim * (d.num_heads + d.num_kv_heads))
    mlp = Shard(3 * d.hidden_size * d.mlp_width)
    norms = Shard(whole=2 * d.hidden_size + 2 * d.head_dim)
    features = max(1, len(d.target_layer_ids)) * target_hidden
    ends = Shard(whole=features * d.hidden_size + 2 * d.hidden_size)
    return (heads + mlp + norms).times(d.num_layers) + ends


def checkpoint_bytes(t: TargetFacts, dtype: str = "auto") -> float:
    """Bytes of the weights as they lie in the checkpoint, vision tower included."""
    return _weight_bytes(t, dtype, 1)


def weight_bytes(t: TargetFacts, dtype: str, tp_size: int, redundant: int = 0) -> float:
    """Bytes of the target's weights on one of `tp_size` ranks.

    Each layer holds `redundant` copies of experts more (`ep_num_redundant_experts`).

    SGLang keeps the absorbed half of `kv_b_proj` in the plain type even where the checkpoint is
    quantised.
    """
    plain = dtype_bytes(t.dtype if dtype == "auto" else dtype)
    absorbed = absorbed_elements(t).on_rank(tp_size) * plain
    copies = 0.0
    if redundant and t.routed_experts:
        width = weight_widths(t.quantization, plain).experts
        copies = expert_elements(t).on_rank(tp_size) * width * redundant / t.routed_experts
    return _weight_bytes(t, dtype, tp_size) + absorbed + copies


def _weight_bytes(t: TargetFacts, dtype: str, tp_size: int) -> float:
    plain = dtype_bytes(t.dtype if dtype == "auto" else dtype)
    widths = weight_widths(t.quantization, plain)
    groups = (
        (expert_elements(t), widths.experts),
        (attention_elements(t), widths.attention),
        (shared_elements(t), widths.shared),
        (dense_elements(t), widths.dense),
        (plain_elements(t) + Shard(whole=t.vision_elements), plain),
    )
    return sum(elements.on_rank(tp_size) * width for elements, width in groups)


def kv_bytes_per_token(
    t: TargetFacts, d: DrafterFacts | None, element_bytes: float, tp_size: int
) -> float:
    """Bytes that one token takes in a rank's KV pools.

    The target's MLA latent is whole on every rank; the drafter's heads are cut over the ranks.
    """
    latent = (t.kv_lora_rank + t.rope_dim) * t.num_layers
    heads = 0
    if d is not None:
        heads = 2 * max(1, d.num_kv_heads // tp_size) * d.head_dim * d.num_layers
    return (latent + heads) * element_bytes


def estimate_rank(
    target: TargetFacts,
    drafter: DrafterFacts | None,
    flags: dict[str, Any],
    device: str,
    gpu_bytes: float = 0.0,
) -> RankMemory:
    """Memory of one rank of a replica.

    Args:
        target, drafter: shapes.
        flags: resolved engine flags (`engine_flags`): `tp_size`, `dtype`, `max_total_tokens`,
            `mem_fraction_static`, ...
        device: `cpu` or `cuda`.
        gpu_bytes: memory of the rank's GPU (its share of it). On `cuda` without
            `max_total_tokens` the KV pool fills what `mem_fraction_static` leaves; 0 if unknown.
    """
    tp_size, dtype = flags["tp_size"], flags.get("dtype", "auto")
    weights = weight_bytes(target, dtype, tp_size, flags.get("ep_num_redundant_experts") or 0)
    width = dtype_bytes(target.dtype if dtype == "auto" else dtype)
    draft = 0.0
    if drafter is not None:
        draft = drafter_elements(drafter, target.hidden_size).on_rank(tp_size) * width
    cache_dtype = flags.get("kv_cache_dtype", "auto")
    element = width if cache_dtype == "auto" else dtype_bytes(cache_dtype)
    per_token = kv_bytes_per_token(target, drafter, element, tp_size)
    context = flags.get("context_length") or target.max_positions
    requests = flags.get("max_running_requests") or 256
    table, process = 4.0 * requests * context, PROCESS_BYTES[device]
    tokens = flags.get("max_total_tokens")
    if device == "cpu":
        return RankMemory(weights, draft, per_token, tokens or 0, table, process)
    fraction = flags.get("mem_fraction_static") or gpu_memory.default_fraction(
        flags, gpu_bytes, multimodal=target.vision_elements > 0
    )
    # SGLang divides what was free before the weights came.
    free = max(0.0, gpu_bytes - process)
    room = int(max(0.0, free * fraction - weights - draft) / per_token)
    return RankMemory(
        target_weights=weights,
        drafter_weights=draft,
        kv_bytes_per_token=per_token,
        kv_tokens=room if tokens is None else tokens,
        request_table=table,
        process=process,
        graphs=gpu_memory.graph_bytes(target, drafter, flags, gpu_bytes),
        workspace=gpu_memory.workspace_bytes(target, drafter, flags, gpu_bytes),
        spare=free * (1 - fraction),
    )


def longest_context(memory: RankMemory, batch: int, rows: int, cap: int) -> int:
    """Tokens that each of `batch` requests may hold at a time: prompt and answer together.

    Args:
        memory: of a rank.
        batch: requests at a time, all of one length.
        rows: KV rows that a step reserves for a request's tree (twice: the step in flight too).
        cap: the most that one request may hold anyhow.
    """
    return max(0, min(cap, memory.kv_tokens // batch - 2 * rows))
