"""Memory of one rank, estimated from the model's shape. Pure arithmetic."""

from collections.abc import Mapping
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
ROUNDING_OF_LAYER = 7.0e6
"""Of a target's layer on a GPU, beyond its weights: torch takes memory in pieces of 2 and 20 MiB.
What 61 layers took of an H200 beyond their weights (docs/benchmarks/rank_slice_h200.md)."""
_ROPE_BYTES = 4.0
"""SGLang keeps its tables of sines and cosines in float32, one for all layers of a model."""


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

    On a GPU `spare` is what is left beside weights and KV pool for `request_table`, `graphs` and
    `workspace`; 0 where the GPU's size is unknown. `kv_reserved_per_token` is what SGLang reckons
    for a token when it sizes the pool, which is not what the token takes.
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
    kv_reserved_per_token: float = 0.0

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


def vision_elements(t: TargetFacts) -> Shard:
    """The vision tower and its projector: SGLang cuts the attention of the tower alone."""
    return Shard(t.vision_attention, t.vision_elements - t.vision_attention)


def other_elements(t: TargetFacts) -> Shard:
    """All weights of the target's language part but its routed experts, as in the checkpoint."""
    return attention_elements(t) + dense_elements(t) + shared_elements(t) + plain_elements(t)


def drafter_elements(d: DrafterFacts, target_hidden: int, tp_size: int = 1) -> Shard:
    """Weights of the drafter, as in its checkpoint (embedding and head are the target's).

    Args:
        d: the drafter.
        target_hidden: width of the target's states, which it reads.
        tp_size: ranks that it is cut over. Beyond one for each of its key/value heads, several
            hold the same head.
    """
    kv_heads = max(d.num_kv_heads, tp_size)
    heads = Shard(2 * d.hidden_size * d.head_dim * (d.num_heads + kv_heads))
    mlp = Shard(3 * d.hidden_size * d.mlp_width)
    norms = Shard(whole=2 * d.hidden_size + 2 * d.head_dim)
    features = max(1, len(d.target_layer_ids)) * target_hidden
    ends = Shard(whole=features * d.hidden_size + 2 * d.hidden_size)
    return (heads + mlp + norms).times(d.num_layers) + ends


def checkpoint_bytes(t: TargetFacts, dtype: str = "auto") -> float:
    """Bytes of the weights as they lie in the checkpoint, vision tower included."""
    return _weight_bytes(t, dtype, 1)


def exchanges_tokens(flags: Mapping[str, Any]) -> bool:
    """Whether ranks send tokens to each other's experts (`moe_a2a_backend`)."""
    return flags.get("moe_a2a_backend") not in (None, "none", "ascend_tp")


def weight_bytes(
    t: TargetFacts, dtype: str, tp_size: int, redundant: int = 0, shared_whole: bool = False
) -> float:
    """Bytes of the target's weights on one of `tp_size` ranks.

    SGLang keeps the absorbed half of `kv_b_proj` in the plain type even where the checkpoint is
    quantised.

    Args:
        t: the target.
        dtype: the flag of that name.
        tp_size: ranks.
        redundant: copies of experts that each layer holds more (`ep_num_redundant_experts`).
        shared_whole: every rank holds all of the shared experts (`exchanges_tokens`).
    """
    plain = dtype_bytes(t.dtype if dtype == "auto" else dtype)
    absorbed = absorbed_elements(t).on_rank(tp_size) * plain
    more, widths = 0.0, weight_widths(t.quantization, plain)
    if redundant and t.routed_experts:
        copies = expert_elements(t).on_rank(tp_size) * redundant / t.routed_experts
        more += copies * widths.experts
    if shared_whole:
        shared = shared_elements(t)
        more += (shared.on_rank(1) - shared.on_rank(tp_size)) * widths.shared
    return _weight_bytes(t, dtype, tp_size) + absorbed + more


def _weight_bytes(t: TargetFacts, dtype: str, tp_size: int) -> float:
    plain = dtype_bytes(t.dtype if dtype == "auto" else dtype)
    widths = weight_widths(t.quantization, plain)
    groups = (
        (expert_elements(t), widths.experts),
        (attention_elements(t), widths.attention),
        (shared_elements(t), widths.shared),
        (dense_elements(t), widths.dense),
        (plain_elements(t) + vision_elements(t), plain),
    )
    return sum(elements.on_rank(tp_size) * width for elements, width in groups)


def kv_bytes_per_token(
    t: TargetFacts, d: DrafterFacts | None, element_bytes: float, tp_size: int
) -> float:
    """Bytes that one token takes in a rank's KV pools.

    The target's MLA latent is whole on every rank; the drafter's heads are cut over the ranks.
    """
    heads = 0
    if d is not None:
        heads = 2 * max(1, d.num_kv_heads // tp_size) * d.head_dim * d.num_layers
    return (_latent(t) + heads) * element_bytes


def _latent(t: TargetFacts) -> int:
    """Elements that one token takes in the target's pool."""
    return (t.kv_lora_rank + t.rope_dim) * t.num_layers


def kv_reserved_per_token(t: TargetFacts, d: DrafterFacts | None, element_bytes: float) -> float:
    """Bytes that SGLang reckons for a token when it sizes the pools.

    It takes a layer of the drafter to be as wide as one of the target (its
    `scale_kv_cell_size_per_token_for_dflash`), so pools hold fewer tokens than would fit.
    """
    target = _latent(t) * element_bytes
    if d is None or not t.num_layers:
        return target
    return float(-(-target * (t.num_layers + d.num_layers) // t.num_layers))


def rope_bytes(t: TargetFacts, d: DrafterFacts | None) -> tuple[float, float]:
    """Tables of sines and cosines of target and drafter, whole on every rank."""
    drafter = 0.0 if d is None else _ROPE_BYTES * d.max_positions * d.head_dim
    return _ROPE_BYTES * t.max_positions * t.rope_dim, drafter


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
        gpu_bytes: memory of the rank's GPU (its share of it), 0 if unknown. On `cuda` the KV pool
            fills what `mem_fraction_static` leaves, but for `max_total_tokens`.
    """
    tp_size, dtype = flags["tp_size"], flags.get("dtype", "auto")
    redundant = flags.get("ep_num_redundant_experts") or 0
    weights = weight_bytes(target, dtype, tp_size, redundant, exchanges_tokens(flags))
    width = dtype_bytes(target.dtype if dtype == "auto" else dtype)
    draft = 0.0
    if drafter is not None:
        elements = drafter_elements(drafter, target.hidden_size, tp_size)
        draft = elements.on_rank(tp_size) * width
    cache_dtype = flags.get("kv_cache_dtype", "auto")
    element = width if cache_dtype == "auto" else dtype_bytes(cache_dtype)
    per_token = kv_bytes_per_token(target, drafter, element, tp_size)
    context = flags.get("context_length") or target.max_positions
    requests = flags.get("max_running_requests") or 256
    table, process = 4.0 * requests * context, PROCESS_BYTES[device]
    tokens = flags.get("max_total_tokens")
    if device == "cpu":
        return RankMemory(weights, draft, per_token, tokens or 0, table, process)
    tables = rope_bytes(target, drafter)
    weights += tables[0] + ROUNDING_OF_LAYER * target.num_layers
    draft += tables[1]
    fraction = flags.get("mem_fraction_static") or gpu_memory.default_fraction(
        target, flags, gpu_bytes
    )
    # SGLang divides what was free before the weights came.
    free = max(0.0, gpu_bytes - process)
    reserved = kv_reserved_per_token(target, drafter, element)
    room = int(max(0.0, free * fraction - weights - draft) / reserved)
    held = room if tokens is None else min(tokens, room) if gpu_bytes else tokens
    return RankMemory(
        target_weights=weights,
        drafter_weights=draft,
        kv_bytes_per_token=per_token,
        kv_tokens=held,
        request_table=table,
        process=process,
        graphs=gpu_memory.graph_bytes(target, drafter, flags, gpu_bytes),
        workspace=gpu_memory.workspace_bytes(target, drafter, flags, gpu_bytes),
        spare=max(0.0, free - weights - draft - held * per_token),
        kv_reserved_per_token=reserved,
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
