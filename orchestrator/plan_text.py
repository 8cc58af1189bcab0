"""A plan as text for a person."""

from collections.abc import Iterator

from overstory.orchestrator.memory import GIB, RankMemory
from overstory.orchestrator.plan import Plan, ReplicaPlan


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def _memory_lines(memory: RankMemory) -> Iterator[str]:
    yield f"Memory per rank (estimated)  {_size(memory.total)}"
    yield f"  target weights             {_size(memory.target_weights)}"
    yield f"  drafter weights            {_size(memory.drafter_weights)}"
    per_token = f"{memory.kv_tokens} tokens x {memory.kv_bytes_per_token:.0f} B"
    yield f"  KV pool                    {_size(memory.kv_pool)} ({per_token})"
    yield f"  request table              {_size(memory.request_table)}"
    yield f"  process and libraries      {_size(memory.process)}"


def _replica_lines(replica: ReplicaPlan) -> Iterator[str]:
    for number, (share, bundle) in enumerate(zip(replica.shares, replica.bundles, strict=True)):
        ranks = ", ".join(map(str, share.ranks))
        holds = ", ".join(f"{value:g} {name}" for name, value in bundle.items())
        front = " + front half" if number == 0 else ""
        where = f"replica {replica.index}  bundle {number}  {share.node}"
        yield f"  {where}: rank {ranks}{front} ({holds})"


def render_plan(plan: Plan) -> str:
    """Several lines, without a trailing newline."""
    spec, drafter = plan.spec, plan.settings.drafter
    lines = [
        f"Deployment {spec.name}: {spec.model} as {spec.served_model_name!r}",
        f"Drafter    {spec.drafter or 'none'}"
        + (f" (block size {drafter.block_size})" if drafter else ""),
        f"Policy     {plan.settings.policy}",
        f"Endpoint   http://{spec.gateway.host}:{spec.gateway.port}"
        f"  ({spec.gateway.max_concurrent_requests} sequences per replica, "
        f"{spec.gateway.max_queued_requests} requests waiting)",
        f"Ranks      {spec.replicas} x {spec.tp_size} on {spec.resources.device}",
    ]
    for replica in plan.replicas:
        lines += _replica_lines(replica)
    lines += _memory_lines(plan.memory)
    lines.append("Engine flags (SGLang)")
    lines += [f"  {name}: {value}" for name, value in sorted(plan.settings.server_args.items())]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)
