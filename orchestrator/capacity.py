"""Tokens per second of a deployment that nobody has yet: a model of one step. Pure.

Every stage is bytes over bandwidth, operations over rate, or a measured time; `BASIS` says which.
docs/capacity.md has the formulas in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from overstory.orchestrator.attention_cost import attention_seconds
from overstory.orchestrator.experts import busiest_group
from overstory.orchestrator.gpus import H200, GpuFacts
from overstory.orchestrator.memory import (
    attention_elements,
    dense_elements,
    drafter_elements,
    shared_elements,
)
from overstory.orchestrator.model_facts import DrafterFacts, TargetFacts
from overstory.orchestrator.quantization import weight_widths

Basis = Literal["measured", "modelled", "estimated"]

BASIS: dict[str, Basis] = {
    "attention": "modelled",
    "experts": "modelled",
    "dense": "modelled",
    "head": "modelled",
    "draft": "modelled",
    "tree": "measured",
    "exchange": "modelled",
    "host": "estimated",
}
"""What each stage's time rests on, at best."""

# Of decode steps of one rank of Kimi-K2.6 at TP 8 on an H200, docs/benchmarks/rank_slice_h200.md.
TREE_S = 0.23e-3
"""Tree, mask, walk, moving accepted rows, the drafter's KV."""
EXPERT_LAYER_S = 18e-6
"""Of an expert layer before the first expert is read: router, sorting of rows, sum."""
EXPERT_RATE_PER_SM = 23.5e9
"""Bytes per second of INT4 experts that one multiprocessor works through."""
DENSE_LAYER_S = 46e-6
"""Of a layer's projections, norms, shared expert and KV writes beyond their weights' bytes."""
DRAFT_LAYER_S = 18e-6
"""The same of a layer of the drafter."""
STEP_PAUSE_S = 0.4e-3
"""Between the kernels of a captured step, and from step to step."""
DRAFT_PAUSE_S = 0.1e-3
"""What that is more if something is drafted."""
PARTS_S = 0.2e-3
"""What a step in parts, as several ranks run them, takes more than one that is one graph."""
EXPERT_EFFICIENCY = 0.9
"""Share of the memory bandwidth that grouped INT4 products reach where it is what bounds them.
Assumed: on an H200 the multiprocessors bound them, at 0.74."""
PRODUCT_EFFICIENCY = 0.5
"""Share of the GPU's rate that products of few rows reach. Assumed; on an H200 it holds."""


@dataclass(frozen=True)
class Draft:
    """A way to draft: rows of verify, and tokens that a step then yields on average."""

    name: str
    rows: int
    tokens: float


CHAIN_TOKENS = 4.5
"""Tokens that a step of a chain of 7 yields. Published for z-lab/Kimi-K2.5-DFlash in blocks of 8,
thinking on: GSM8K 5.3, Math500 5.5, HumanEval 5.3, MBPP 4.5, MT-Bench 3.7."""
TREE_GAIN = {15: 1.12, 31: 1.20}
"""What a tree adds over the chain. Assumed; it is to be measured with this pair."""


def drafts(chain_tokens: float, block_size: int) -> tuple[Draft, ...]:
    """Plain, chain, and trees, with `chain_tokens` for the chain."""
    trees = (Draft(f"tree-{n}", n + 1, chain_tokens * gain) for n, gain in TREE_GAIN.items())
    return (Draft("plain", 1, 1.0), Draft("chain", block_size, chain_tokens), *trees)


@dataclass(frozen=True)
class Replica:
    """What one replica runs on.

    Attributes:
        one_graph: a step is one graph; several ranks run it in parts.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    gpu: GpuFacts
    tp_size: int
    nodes: int = 1
    ep_size: int = 1
    redundant: int = 0
    plain_bytes: float = 2.0
    one_graph: bool = False

    @property
    def per_node(self) -> int:
        """Ranks on each node."""
        return self.tp_size // self.nodes


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by stage."""

    attention: float
    experts: float
    dense: float
    head: float
    draft: float
    tree: float
    exchange: float
    host: float

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def bottleneck(self) -> str:
        """The longest stage."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


def _speed(gpu: GpuFacts) -> float:
    """Its clock over that of the GPU on which starts and granules were measured."""
    return gpu.clock / H200.clock


def _product(elements: float, width: float, rows: int, gpu: GpuFacts) -> float:
    """Seconds of matrix products: weights once over memory, or operations of many rows."""
    compute = 2.0 * elements * rows / (gpu.flops * PRODUCT_EFFICIENCY)
    return max(elements * width / gpu.dram, compute)


def all_reduce(replica: Replica, size: float) -> float:
    """Seconds to sum `size` bytes over all ranks: inside of a node, then between nodes."""
    ranks, inside, between = replica.per_node, replica.gpu.inside, replica.gpu.between
    seconds = 0.0
    if ranks > 1:
        seconds += inside.latency_s + 2 * (ranks - 1) / ranks * size / inside.rate
    if replica.nodes > 1:
        share = 2 * (replica.nodes - 1) / replica.nodes * size / ranks
        seconds += between.latency_s + share / between.rate
    return seconds


def _experts(replica: Replica, rows: int) -> float:
    target, gpu = replica.target, replica.gpu
    if not target.routed_experts:
        return 0.0
    inner = replica.tp_size // replica.ep_size
    one = 3.0 * target.hidden_size * target.expert_width / inner
    widths = weight_widths(target.quantization, replica.plain_bytes)
    experts, chosen = target.routed_experts, target.experts_per_token
    touched = busiest_group(experts, chosen, rows, replica.ep_size, replica.redundant)
    walked = EXPERT_RATE_PER_SM * gpu.sms * _speed(gpu)
    read = touched * one * widths.experts / min(gpu.dram * EXPERT_EFFICIENCY, walked)
    worked = rows * chosen / replica.ep_size
    compute = 2.0 * one * worked / (gpu.flops * PRODUCT_EFFICIENCY)
    return (EXPERT_LAYER_S / _speed(gpu) + read + compute) * target.moe_layers


def _dense(replica: Replica, rows: int) -> float:
    """Projections of attention, shared experts, dense layers, router."""
    target, gpu, tp = replica.target, replica.gpu, replica.tp_size
    widths = weight_widths(target.quantization, replica.plain_bytes)
    router = float(target.hidden_size * target.routed_experts * target.moe_layers)
    groups = (
        (attention_elements(target).on_rank(tp), widths.attention),
        (shared_elements(target).on_rank(tp), widths.shared),
        (dense_elements(target).on_rank(tp), widths.dense),
        (router, replica.plain_bytes),
    )
    starts = DENSE_LAYER_S / _speed(gpu) * target.num_layers
    return starts + sum(_product(elements, width, rows, gpu) for elements, width in groups)


def _head(replica: Replica, rows: int) -> float:
    """The head's product and the gathering of the ranks' logits."""
    target, tp = replica.target, replica.tp_size
    elements = target.vocab_size * target.hidden_size / tp
    gathered = (tp - 1) / tp * rows * target.vocab_size * 2.0 / replica.gpu.inside.rate
    return _product(elements, replica.plain_bytes, rows, replica.gpu) + gathered


def _draft(replica: Replica, batch: int, context: int) -> float:
    drafter, target, gpu, tp = replica.drafter, replica.target, replica.gpu, replica.tp_size
    assert drafter is not None
    rows = batch * drafter.block_size
    elements = drafter_elements(drafter, target.hidden_size, tp).on_rank(tp)
    kv = 2.0 * max(1, drafter.num_kv_heads // tp) * drafter.head_dim * drafter.num_layers
    seconds = _product(elements, replica.plain_bytes, rows, gpu)
    seconds += batch * context * kv * replica.plain_bytes / gpu.dram
    seconds += 2 * drafter.num_layers * all_reduce(replica, 2.0 * rows * drafter.hidden_size)
    seconds += drafter.num_layers * DRAFT_LAYER_S / _speed(gpu)
    return seconds + _head(replica, rows)


def step_time(replica: Replica, batch: int, rows: int, context: int) -> StepTime:
    """One step of `batch` requests with `context` tokens each and `rows` verify rows each.

    With one row nothing is drafted: plain decoding.
    """
    target, gpu = replica.target, replica.gpu
    every = batch * rows
    heads = max(1, target.num_heads // replica.tp_size)
    attention = attention_seconds(
        batch, rows, heads, context, gpu.sms, _speed(gpu), gpu.dram, gpu.flops
    )
    exchanges = 2 * target.num_layers * all_reduce(replica, 2.0 * every * target.hidden_size)
    return StepTime(
        attention=attention * target.num_layers,
        experts=_experts(replica, every),
        dense=_dense(replica, every),
        head=_head(replica, every),
        draft=_draft(replica, batch, context) if rows > 1 else 0.0,
        tree=TREE_S,
        exchange=exchanges,
        host=_host(replica, rows),
    )


def _host(replica: Replica, rows: int) -> float:
    """Pauses in a step and between two of them."""
    whole = replica.one_graph or replica.tp_size == 1
    drafted = DRAFT_PAUSE_S if rows > 1 else 0.0
    return STEP_PAUSE_S + drafted + (0.0 if whole else PARTS_S)


@dataclass(frozen=True)
class Estimate:
    """The best way to draft at one point, by the model.

    Attributes:
        nodes, batch, context: the point; `batch` over all replicas.
        draft: what is best there, None where the requests do not fit the KV pools.
        tokens_per_s: of all requests together.
        step: its stages.
    """

    nodes: int
    batch: int
    context: int
    draft: Draft | None
    tokens_per_s: float
    step: StepTime | None


def estimate(
    replica: Replica,
    replicas: int,
    batch: int,
    context: int,
    ways: Sequence[Draft],
    kv_tokens: int,
) -> Estimate:
    """The best of `ways` for `batch` requests spread evenly over equal replicas.

    Args:
        replica: one of them.
        replicas: how many.
        batch: requests at a time on all of them.
        context: tokens that each holds.
        ways: how to draft; without a drafter only those with one row count.
        kv_tokens: what one replica's KV pool holds.
    """
    nodes = replicas * replica.nodes
    busy = min(replicas, batch)
    each = -(-batch // busy)
    best: tuple[float, Draft, StepTime] | None = None
    for way in ways:
        undrafted = way.rows > 1 and replica.drafter is None
        if undrafted or each * (context + 2 * way.rows) > kv_tokens:
            continue
        step = step_time(replica, each, way.rows, context)
        rate = batch * way.tokens / step.total
        if best is None or rate > best[0]:
            best = (rate, way, step)
    if best is None:
        return Estimate(nodes, batch, context, None, 0.0, None)
    return Estimate(nodes, batch, context, best[1], best[0], best[2])
