"""A plan as text for a person."""

from collections.abc import Iterator

from overstory.orchestrator.experts import ExpertPlan, HeldExperts
from overstory.orchestrator.memory import GIB, RankMemory
from overstory.orchestrator.plan import Plan, ReplicaPlan
from overstory.orchestrator.ports import PortUse


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def _memory_lines(memory: RankMemory) -> Iterator[str]:
    yield f"Memory per rank (estimated)  {_size(memory.total)}"
    yield f"  target weights             {_size(memory.target_weights)}"
    yield f"  drafter weights            {_size(memory.drafter_weights)}"
    per_token = f"{memory.kv_tokens} tokens x {memory.kv_bytes_per_token:.0f} B"
    if memory.kv_reserved_per_token > memory.kv_bytes_per_token:
        per_token += f", SGLang reckons {memory.kv_reserved_per_token:.0f} B"
    yield f"  KV pool, both models       {_size(memory.kv_pool)} ({per_token})"
    yield f"  request table              {_size(memory.request_table)}"
    if memory.graphs or memory.workspace:
        yield f"  CUDA graphs                {_size(memory.graphs)}"
        yield f"  buffers of a prefill chunk {_size(memory.workspace)}"
        yield f"  CUDA context, libraries    {_size(memory.process)}"
    else:
        yield f"  process and libraries      {_size(memory.process)}"
    if memory.spare:
        yield f"  left beside pool, weights  {_size(memory.spare)} (graphs, buffers, table)"


def _context_lines(contexts: tuple[tuple[int, int], ...]) -> Iterator[str]:
    if contexts:
        listed = ", ".join(f"{tokens:,} at batch {batch}" for batch, tokens in contexts)
        yield f"Longest context  {listed} (tokens of each request, prompt and answer)"


def _expert_lines(experts: ExpertPlan | None) -> Iterator[str]:
    if experts is None:
        return
    cut = f", each cut over {experts.ranks_per_group} ranks" if experts.ranks_per_group > 1 else ""
    groups = f"{experts.groups} groups of ranks" if experts.groups > 1 else "every rank"
    more = f", {experts.redundant} of all of them copies" if experts.redundant else ""
    yield (
        f"Experts          {experts.experts_per_rank} a layer on {groups}{cut} "
        f"(width {experts.width_per_rank}){more}; expected, with an even router:"
    )
    if experts.groups > 1:
        yield f"  placed at the start: {'; '.join(map(_held, experts.held))}"
    yield "  batch   rows  distinct experts  rows each  on the busiest rank  balance"
    for load in experts.loads:
        yield (
            f"  {load.batch:5d}  {load.rows:5d}  {load.touched:16.1f}  {load.rows_per_expert:9.1f}"
            f"  {load.touched_by_busiest:19.1f}  {load.balance:7.2f}"
        )


def _held(group: HeldExperts) -> str:
    first, last = group.ranks
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return f"{ranks}: {', '.join(f'{begin}-{end}' for begin, end in group.experts)}"


def _port_lines(ports: tuple[PortUse, ...]) -> Iterator[str]:
    yield "Ports"
    for port in ports:
        number = str(port.number) if port.number else "drawn"
        yield f"  {number:>5}  {port.where}: {port.what} (from {port.clients})"


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
        f"Policy     {plan.settings.rule}",
        f"Endpoint   {spec.gateway.url}"
        f"  ({spec.gateway.max_concurrent_requests} sequences per replica, "
        f"{spec.gateway.max_queued_requests} requests waiting)",
        f"Ranks      {spec.replicas} x {spec.tp_size} on {spec.resources.device}",
    ]
    for replica in plan.replicas:
        lines += _replica_lines(replica)
    lines += _memory_lines(plan.memory)
    lines += _context_lines(plan.contexts)
    lines += _expert_lines(plan.experts)
    lines += _port_lines(plan.ports)
    lines.append("Engine flags (SGLang)")
    lines += [f"  {name}: {value}" for name, value in sorted(plan.settings.server_args.items())]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines)
