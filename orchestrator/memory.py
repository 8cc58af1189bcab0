"""Memory of one rank, estimated from the model's shape. Pure arithmetic."""

from dataclasses import dataclass
from math import prod
from typing import Any

from overstory.orchestrator.model_facts import DrafterFacts, TargetFacts

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
# rank (measured: 0.75 to 0.9 GB of unique memory); CUDA context, captured graphs and workspaces.
PROCESS_BYTES = {"cpu": 0.9e9, "cuda": 3.0 * GIB}
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
    """Bytes of one rank; `kv_tokens` is how many tokens its KV pool holds."""

    target_weights: float
    drafter_weights: float
    kv_bytes_per_token: float
    kv_tokens: int
    request_table: float
    process: float

    @property
    def kv_pool(self) -> float:
        """Bytes of the KV pool (target and drafter)."""
        return self.kv_bytes_per_token * self.kv_tokens

    @property
    def total(self) -> float:
        """All of it."""
        weights = self.target_weights + self.drafter_weights
        return weights + self.kv_pool + self.request_table + self.process


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


def other_elements(t: TargetFacts) -> Shard:
    """All weights of the target but its routed experts, as in the checkpoint."""
    per_layer = _attention(t) + Shard(whole=2 * t.hidden_size)
    dense = Shard(3 * t.hidden_size * t.dense_width)
    shared = Shard(3 * t.hidden_size * t.expert_width * t.shared_experts)
    router = Shard(whole=(t.hidden_size + 1) * t.routed_experts)
    ends = Shard(t.vocab_size * t.hidden_size * (1 if t.tied_head else 2), t.hidden_size)
    return (
        per_layer.times(t.num_layers)
        + dense.times(t.dense_layers)
        + (shared + router).times(t.moe_layers)
        + ends
    )


def drafter_elements(d: DrafterFacts, target_hidden: int) -> Shard:
    """Weights of the drafter, as in its checkpoint (embedding and head are the target's)."""
    heads = Shard(2 * d.hidden_size * d.head_dim * (d.num_heads + d.num_kv_heads))
    mlp = Shard(3 * d.hidden_size * d.mlp_width)
    norms = Shard(whole=2 * d.hidden_size + 2 * d.head_dim)
    features = max(1, len(d.target_layer_ids)) * target_hidden
    ends = Shard(whole=features * d.hidden_size + 2 * d.hidden_size)
    return (heads + mlp + norms).times(d.num_layers) + ends


def _weight_bytes(t: TargetFacts, dtype: str, tp_size: int) -> float:
    width = dtype_bytes(t.dtype if dtype == "auto" else dtype)
    experts, others = width, width
    method = str(t.quantization.get("quant_method", ""))
    if "fp8" in method:
        experts = others = 1.0
    elif t.quantization:
        # 4-bit experts with a 2-byte scale for each group, the rest in the checkpoint's type: the
        # form in which Kimi-K2 and its kin are published.
        experts = 0.5 + 2.0 / 32
    plain = other_elements(t) + absorbed_elements(t)
    return plain.on_rank(tp_size) * others + expert_elements(t).on_rank(tp_size) * experts


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
    weights = _weight_bytes(target, dtype, tp_size)
    width = dtype_bytes(target.dtype if dtype == "auto" else dtype)
    draft = 0.0
    if drafter is not None:
        draft = drafter_elements(drafter, target.hidden_size).on_rank(tp_size) * width
    cache_dtype = flags.get("kv_cache_dtype", "auto")
    element = width if cache_dtype == "auto" else dtype_bytes(cache_dtype)
    per_token = kv_bytes_per_token(target, drafter, element, tp_size)
    tokens = flags.get("max_total_tokens")
    if tokens is None:
        static = gpu_bytes * (flags.get("mem_fraction_static") or 0.85)
        tokens = int(max(0.0, static - weights - draft) / per_token)
    context = flags.get("context_length") or target.max_positions
    requests = flags.get("max_running_requests") or 256
    return RankMemory(
        target_weights=weights,
        drafter_weights=draft,
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        request_table=4.0 * requests * context,
        process=PROCESS_BYTES[device],
    )
