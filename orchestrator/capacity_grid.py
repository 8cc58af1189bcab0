"""A deployment's estimates over nodes, batches and contexts, and their text. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from overstory.orchestrator.capacity import (
    BASIS,
    CHAIN_TOKENS,
    Estimate,
    Replica,
    StepTime,
    drafts,
    estimate,
)
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.gpus import GpuFacts
from overstory.orchestrator.memory import estimate_rank
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.plan import model_faults
from overstory.orchestrator.spec import DeploymentSpec

GPUS_PER_NODE = 8
NODES = (1, 2, 4)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (1_000, 8_000, 32_000, 65_000, 131_000, 200_000)
SHOWN_BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Grid:
    """All estimates of one deployment on one kind of GPU."""

    spec: DeploymentSpec
    gpu: GpuFacts
    kv_tokens: int
    chain_tokens: float
    estimates: tuple[Estimate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `--json`. Seconds, bytes, tokens."""
        return {
            "deployment": self.spec.name,
            "model": self.spec.model,
            "tp_size": self.spec.tp_size,
            "gpu": asdict(self.gpu),
            "kv_tokens_per_replica": self.kv_tokens,
            "chain_tokens_per_step": self.chain_tokens,
            "basis": BASIS | {"tokens_per_s": "estimated"},
            "estimates": [asdict(row) for row in self.estimates],
        }


def make_grid(
    spec: DeploymentSpec,
    gpu: GpuFacts,
    nodes: Sequence[int] = NODES,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    chain_tokens: float = CHAIN_TOKENS,
    gpus_per_node: int = GPUS_PER_NODE,
) -> Grid:
    """Estimates of `spec` on nodes of `gpus_per_node` of `gpu`, as many replicas as fit them.

    Numbers of nodes that hold no whole replica are left out of the grid.

    Raises:
        PlanError: the models do not fit the deployment, or no number of nodes holds a replica.
    """
    settings = resolve_engine(spec, published=True)
    if faults := model_faults(spec, settings):
        raise PlanError(*faults)
    args = settings.server_args
    memory = estimate_rank(settings.target, settings.drafter, args, "cuda", gpu.memory)
    per_replica = -(-spec.tp_size // gpus_per_node)
    if spec.tp_size % per_replica:
        raise PlanError(
            f"--gpus: {spec.tp_size} ranks do not fall into {per_replica} equal parts on nodes of "
            f"{gpus_per_node} GPUs; use a number that divides engine.tp_size"
        )
    replica = Replica(
        target=settings.target,
        drafter=settings.drafter,
        gpu=gpu,
        tp_size=spec.tp_size,
        nodes=per_replica,
        ep_size=args.get("ep_size", 1),
        redundant=args.get("ep_num_redundant_experts") or 0,
    )
    block = settings.drafter.block_size if settings.drafter else 2
    ways = drafts(chain_tokens, block)
    rows = []
    for count in nodes:
        replicas = count // per_replica * (gpus_per_node // min(gpus_per_node, spec.tp_size))
        if replicas == 0:
            continue
        for batch in batches:
            for context in contexts:
                at = estimate(replica, replicas, batch, context, ways, memory.kv_tokens)
                rows.append(replace(at, nodes=count))
    if not rows:
        raise PlanError(
            f"--nodes: {', '.join(map(str, nodes))} nodes of {gpus_per_node} GPUs hold no replica "
            f"of {spec.tp_size} ranks; it needs {per_replica}"
        )
    return Grid(spec, gpu, memory.kv_tokens, chain_tokens, tuple(rows))


def _short(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens >= 1000 else str(tokens)


def _cell(row: Estimate) -> str:
    if row.draft is None:
        return "-"
    letter = {"plain": "p", "chain": "c"}.get(row.draft.name, row.draft.name.removeprefix("tree-"))
    return f"{row.tokens_per_s:.0f} {letter}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _rates(grid: Grid, nodes: int) -> Iterator[str]:
    chosen = [row for row in grid.estimates if row.nodes == nodes]
    contexts = sorted({row.context for row in chosen})
    batches = sorted({row.batch for row in chosen})
    at = {(row.batch, row.context): _cell(row) for row in chosen}
    header = ["batch", *(_short(context) for context in contexts)]
    yield from _table(header, [[str(b), *(at[b, c] for c in contexts)] for b in batches])


def _stages(grid: Grid) -> Iterator[str]:
    names = [field.name for field in fields(StepTime)]
    header = ["batch", "context", "draft", "tokens/step (estimated)", "step (estimated)"]
    header += [f"{name} ({BASIS[name]})" for name in names]
    rows = []
    first = min(row.nodes for row in grid.estimates)
    for row in grid.estimates:
        if row.nodes != first or row.batch not in SHOWN_BATCHES or row.step is None:
            continue
        assert row.draft is not None
        step = row.step
        shares = [
            f"**{1e3 * getattr(step, name):.2f}**"
            if name == step.bottleneck
            else f"{1e3 * getattr(step, name):.2f}"
            for name in names
        ]
        begin = [str(row.batch), _short(row.context), row.draft.name, f"{row.draft.tokens:.1f}"]
        rows.append([*begin, f"{1e3 * step.total:.1f}", *shares])
    yield from _table(header, rows)


def render_grid(grid: Grid) -> str:
    """Markdown, without a trailing newline."""
    spec, gpu = grid.spec, grid.gpu
    chain = f"a step of a chain yields {grid.chain_tokens:g} (estimated)"
    drafts = chain if spec.drafter else "no drafter"
    lines = [
        f"{spec.model.rsplit('/', 1)[-1]}, tensor parallel {spec.tp_size}, {gpu.name}; a replica's "
        f"KV pool holds {grid.kv_tokens:,} tokens (modelled); {drafts}.",
        "",
    ]
    for nodes in sorted({row.nodes for row in grid.estimates}):
        lines += [
            f"Tokens/s, all requests together, {nodes} node{'s' if nodes > 1 else ''} (estimated):",
            "",
            *_rates(grid, nodes),
            "",
        ]
    lines += ["One step, one replica, ms:", "", *_stages(grid)]
    return "\n".join(lines)
