"""What would run where, and why it cannot: a pure function of a deployment and an inventory.

Needs neither Ray nor a GPU and imports no torch and no SGLang: every fault that can be known
beforehand is told before anything expensive starts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.engine_flags import EngineSettings, resolve_engine
from overstory.orchestrator.expert_faults import fusion_faults, runner_faults
from overstory.orchestrator.experts import ExpertPlan, plan_experts
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.memory import (
    FRONT_HALF_BYTES,
    HOST_BYTES_OF_GPU_RANK,
    RankMemory,
    estimate_rank,
    exchanges_tokens,
    longest_context,
)
from overstory.orchestrator.memory_faults import gpu_faults, gpu_warnings
from overstory.orchestrator.model_facts import DrafterFacts, PlanError, TargetFacts
from overstory.orchestrator.placement import NodeShare, RankNeeds, place
from overstory.orchestrator.ports import PortUse, planned_ports, port_warnings
from overstory.orchestrator.spec import DeploymentSpec

CONTEXT_BATCHES = (1, 8, 32)
"""Batch sizes for which a plan says how long a context may be."""


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica: its placement group and where its ranks go. Bundle `i` is share `i`."""

    index: int
    shares: tuple[NodeShare, ...]
    bundles: tuple[dict[str, float], ...]
    strategy: str


@dataclass(frozen=True)
class Plan:
    """What `overstory plan` shows."""

    spec: DeploymentSpec
    settings: EngineSettings
    memory: RankMemory
    replicas: tuple[ReplicaPlan, ...]
    nodes: tuple[NodeInventory, ...]
    warnings: tuple[str, ...] = ()
    contexts: tuple[tuple[int, int], ...] = ()
    """Pairs of a batch size and the most tokens that each of its requests may hold; empty where
    the size of the KV pool is not known."""
    experts: ExpertPlan | None = None
    ports: tuple[PortUse, ...] = ()

    @property
    def nodes_per_replica(self) -> int:
        """Nodes that one replica is cut over; the same for all."""
        return len(self.replicas[0].shares)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`. Memory in bytes."""
        return {
            "deployment": self.spec.model_dump(),
            "policy": str(self.settings.rule),
            "engine": self.settings.server_args,
            "memory_per_rank": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "longest_context": [
                {"batch": batch, "tokens": tokens} for batch, tokens in self.contexts
            ],
            "experts": dataclasses.asdict(self.experts) if self.experts else None,
            "ports": [dataclasses.asdict(port) for port in self.ports],
            "replicas": [dataclasses.asdict(replica) for replica in self.replicas],
            "nodes": [dataclasses.asdict(node) for node in self.nodes],
            "endpoint": self.spec.gateway.url,
            "warnings": list(self.warnings),
        }


def drafter_faults(target: TargetFacts, drafter: DrafterFacts) -> list[str]:
    """Why `drafter` cannot draft for `target`; empty if it can."""
    faults = []
    for what, theirs, ours in (
        ("vocabulary", drafter.vocab_size, target.vocab_size),
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("number of target layers", drafter.num_target_layers, target.num_layers),
    ):
        if theirs is not None and theirs != ours:
            faults.append(
                f"drafter: its {what} is {theirs}, the model's is {ours}; "
                "use the drafter that was trained for this model"
            )
    # SGLang captures "before layer id + 1", so the last layer's output is never captured.
    beyond = [i for i in drafter.target_layer_ids if not 0 <= i < target.num_layers - 1]
    if beyond:
        faults.append(
            f"drafter: target_layer_ids {list(drafter.target_layer_ids)} name layer {beyond[0]}, "
            f"wanted ids from 0 to {target.num_layers - 2} for a model of {target.num_layers} "
            "layers; use the drafter that was trained for this model"
        )
    mask = drafter.mask_token_id
    if mask is None or not 0 <= mask < target.vocab_size:
        faults.append(
            f"drafter: mask_token_id is {mask}, wanted an id below the model's vocabulary of "
            f"{target.vocab_size}; use the drafter that was trained for this model"
        )
    return faults


def split_faults(target: TargetFacts, drafter: DrafterFacts | None, tp: int, ep: int) -> list[str]:
    """Why the models cannot be cut over `tp` ranks, the experts over `ep` groups; else empty."""
    rows = [
        ("attention heads", target.num_heads),
        ("vocabulary", target.vocab_size),
        ("dense MLP width", target.dense_width if target.dense_layers else 0),
        ("shared expert width", target.expert_width * target.shared_experts),
    ]
    if ep == 1:
        rows.append(("expert width", target.expert_width))
    if drafter is not None:
        rows += [
            ("drafter's attention heads", drafter.num_heads),
            ("drafter's MLP width", drafter.mlp_width),
        ]
    faults = [
        f"engine.tp_size: {tp} does not divide the {what} {size}; "
        f"use one of {', '.join(map(str, _divisors(target.num_heads)))}"
        for what, size in rows
        if size % tp
    ]
    if drafter is not None and max(tp, drafter.num_kv_heads) % min(tp, drafter.num_kv_heads):
        faults.append(
            f"engine.tp_size: {tp} neither divides nor is a multiple of the drafter's "
            f"{drafter.num_kv_heads} key/value heads"
        )
    if tp > target.routed_experts > 0:
        faults.append(f"engine.tp_size: {tp} is more than the {target.routed_experts} experts")
    if target.routed_experts % ep or tp % ep:
        faults.append(
            f"engine.ep_size: {ep} must divide tp_size {tp} and the {target.routed_experts} experts"
        )
    return faults


def balance_faults(target: TargetFacts, args: Mapping[str, Any]) -> list[str]:
    """Why SGLang could not balance experts as asked, which it says by failed assertions."""
    ep, redundant = args.get("ep_size", 1), args.get("ep_num_redundant_experts") or 0
    exchange, tp = args.get("moe_a2a_backend"), args["tp_size"]
    faults = []
    if exchanges_tokens(args) and ep != tp:
        faults.append(
            f"engine.moe_a2a_backend: {exchange} makes SGLang set ep_size to tp_size; set "
            f"engine.ep_size to {tp} (now {ep}), or leave moe_a2a_backend out"
        )
    if args.get("enable_eplb") and ep == 1:
        faults.append(
            "engine.enable_eplb: got true with engine.ep_size 1, where every rank holds a slice of "
            "every expert; raise engine.ep_size or leave enable_eplb out"
        )
    if redundant < 0 or (target.routed_experts + redundant) % ep:
        faults.append(
            f"engine.ep_num_redundant_experts: got {redundant}; with the {target.routed_experts} "
            f"experts they must divide into engine.ep_size {ep} equal groups; take a multiple of "
            f"{ep}"
        )
    return faults


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


KERNEL_HEADS = (2, 4, 8, 16)
"""Query heads of a rank that `attention_backend: overstory` is built for."""
KERNEL_KEY = (512, 64)
"""Latent and rotary columns of a key that it is built for."""


def kernel_faults(target: TargetFacts, tp: int, server_args: dict[str, Any]) -> list[str]:
    """Why our CUDA attention cannot serve the model so cut; empty if it can or is not asked to."""
    if server_args.get("attention_backend") != "overstory":
        return []
    faults = []
    heads = target.num_heads // tp
    if heads not in KERNEL_HEADS:
        sizes = _divisors(target.num_heads)
        fitting = [str(size) for size in sizes if target.num_heads // size in KERNEL_HEADS]
        faults.append(
            f"engine.attention_backend: overstory takes {', '.join(map(str, KERNEL_HEADS))} heads "
            f"a rank, tp_size {tp} leaves {heads} of {target.num_heads}; use engine.tp_size "
            f"{' or '.join(fitting)}, or triton"
        )
    key = (target.kv_lora_rank, target.rope_dim)
    if key != KERNEL_KEY:
        faults.append(
            f"engine.attention_backend: overstory takes keys of {KERNEL_KEY[0]} + {KERNEL_KEY[1]} "
            f"columns, the model has {key[0]} + {key[1]}; use triton"
        )
    return faults


def length_faults(target: TargetFacts, server_args: dict[str, Any]) -> list[str]:
    """Why the context length cannot be served; empty if it can."""
    context = server_args.get("context_length")
    if context is None:
        return []
    if context < 1:
        return [f"engine.context_length: got {context}, wanted at least 1"]
    if context > target.max_positions:
        return [
            f"engine.context_length: got {context}, the model was made for at most "
            f"{target.max_positions} positions; lower it or remove it"
        ]
    return []


def _bundles(spec: DeploymentSpec, shares: Sequence[NodeShare]) -> tuple[dict[str, float], ...]:
    bundles = []
    for share in shares:
        bundle = {"CPU": spec.resources.cpus_per_rank * len(share.ranks)}
        if spec.resources.gpus:
            bundle["GPU"] = spec.resources.gpus * len(share.ranks)
        bundles.append(bundle)
    return tuple(bundles)


def node_memory_per_rank(spec: DeploymentSpec, memory: RankMemory) -> float:
    """Host memory that a rank takes; its share of the replica's front half included."""
    front = FRONT_HALF_BYTES / spec.tp_size
    return front + (memory.total if spec.resources.device == "cpu" else HOST_BYTES_OF_GPU_RANK)


def model_faults(spec: DeploymentSpec, settings: EngineSettings) -> list[str]:
    """Everything that is wrong between the deployment and its models, nodes aside."""
    target, drafter = settings.target, settings.drafter
    ep = settings.server_args.get("ep_size", 1)
    faults = drafter_faults(target, drafter) if drafter else []
    faults += split_faults(target, drafter, spec.tp_size, ep)
    faults += balance_faults(target, settings.server_args)
    faults += runner_faults(target, settings.server_args)
    faults += fusion_faults(target, settings.server_args)
    faults += kernel_faults(target, spec.tp_size, settings.server_args)
    return faults + length_faults(target, settings.server_args)


def check_models(spec: DeploymentSpec, published: bool = False) -> EngineSettings:
    """The engine's settings, if deployment and models fit each other.

    Args:
        spec: the deployment.
        published: as in `resolve_engine`.

    Raises:
        PlanError: they do not; one line for each fault.
    """
    settings = resolve_engine(spec, published)
    faults = model_faults(spec, settings)
    if faults:
        raise PlanError(*faults)
    return settings


def _contexts(settings: EngineSettings, memory: RankMemory) -> tuple[tuple[int, int], ...]:
    if not memory.kv_tokens:
        return ()
    args = settings.server_args
    cap = args.get("context_length") or settings.target.max_positions
    rows = args.get("speculative_num_draft_tokens") or 1
    return tuple(
        (batch, longest_context(memory, batch, rows, cap))
        for batch in CONTEXT_BATCHES
        if batch <= (args.get("max_running_requests") or batch)
    )


def make_plan(
    spec: DeploymentSpec, nodes: Sequence[NodeInventory], published: bool = False
) -> Plan:
    """The plan of `spec` on `nodes`.

    Args:
        spec: the deployment.
        nodes: where it is to run.
        published: as in `resolve_engine`.

    Raises:
        PlanError: it cannot run there; one line for each fault.
    """
    settings = check_models(spec, published)
    device = spec.resources.device
    gpu_bytes = min((n.gpu_memory for n in nodes if n.gpus), default=0.0) * spec.resources.gpus
    args = settings.server_args
    memory = estimate_rank(settings.target, settings.drafter, args, device, gpu_bytes)
    if device == "cuda" and (faults := gpu_faults(spec, settings, memory, gpu_bytes)):
        raise PlanError(*faults)
    needs = RankNeeds(
        spec.resources.cpus_per_rank, spec.resources.gpus, node_memory_per_rank(spec, memory)
    )
    placed = place(nodes, needs, spec.replicas, spec.tp_size)
    replicas = tuple(
        ReplicaPlan(
            index=index,
            shares=tuple(shares),
            bundles=_bundles(spec, shares),
            strategy="STRICT_PACK" if len(shares) == 1 else "STRICT_SPREAD",
        )
        for index, shares in enumerate(placed)
    )
    rows = args.get("speculative_num_draft_tokens") or 1
    return Plan(
        spec=spec,
        settings=settings,
        memory=memory,
        replicas=replicas,
        nodes=tuple(nodes),
        warnings=(*_warnings(spec, settings), *gpu_warnings(memory)),
        contexts=_contexts(settings, memory),
        experts=plan_experts(
            settings.target,
            spec.tp_size,
            args.get("ep_size", 1),
            rows,
            args.get("ep_num_redundant_experts") or 0,
        ),
        ports=planned_ports(spec, len(replicas[0].shares)),
    )


def _warnings(spec: DeploymentSpec, settings: EngineSettings) -> tuple[str, ...]:
    warnings = [*settings.stand_ins, *port_warnings(spec)]
    args = settings.server_args
    backend = args.get("attention_backend")
    uncaptured = backend == "triton" and args.get("disable_cuda_graph")
    drafts_on_gpu = args["device"] == "cuda" and settings.drafter is not None
    if drafts_on_gpu and backend != "overstory" and not uncaptured:
        warnings.append(
            "engine.attention_backend: trees on a GPU need overstory, or triton with "
            f"disable_cuda_graph: true; got {backend or 'none'}, which the engine will refuse"
        )
    if settings.drafter is not None:
        chain = settings.drafter.block_size - 1
        if 0 < spec.tree.budget < chain:
            warnings.append(
                f"tree.budget: {spec.tree.budget} nodes are fewer than a chain of this drafter "
                f"({chain}); {chain} costs hardly more"
            )
    if spec.gateway.host not in ("127.0.0.1", "localhost", "::1"):
        warnings.append(
            f"gateway.host: {spec.gateway.host} is reachable from other machines and the endpoint "
            "asks for no key"
        )
    return tuple(warnings)
