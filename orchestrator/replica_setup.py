"""From a deployment to what its replicas' engines are started with, and what they can take.

Reads model configs; imports Ray (through `rank_group`) but starts nothing.
"""

from collections.abc import Mapping
from typing import Any

from overstory.orchestrator.engine_errors import RequestRefused
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.journal import GenerateCall
from overstory.orchestrator.rank_group import RankPlan
from overstory.orchestrator.replica_health import HealthLimits
from overstory.orchestrator.spec import DeploymentSpec
from overstory.workers.ddtree import POLICY_ENV
from overstory.workers.digest_gather import COMPARE_VARIABLE
from overstory.workers.handoff.rank_side import HAND_OFF_VARIABLE
from overstory.workers.policy import FLOOR_ENV, MEASURE_SECONDS_ENV


def policy_environment(spec: DeploymentSpec) -> dict[str, str]:
    """Environment of the ranks: how they compare, whether they hand over, their first tree policy,
    and what an automatic one needs."""
    rule = {
        POLICY_ENV: str(resolve_engine(spec).rule),
        COMPARE_VARIABLE: spec.control.compare_digests,
    }
    if spec.hands_over_kv or spec.hands_over_weights:
        rule[HAND_OFF_VARIABLE] = "1"
    if spec.tree.policy == "fixed":
        return rule
    return rule | {
        MEASURE_SECONDS_ENV: str(spec.tree.measure_s),
        FLOOR_ENV: str(spec.tree.acceptance_floor),
    }


def rank_plan(spec: DeploymentSpec, replica: str, nodes: int = 1) -> RankPlan:
    """How the ranks of one replica are launched; `replica` is unique per incarnation."""
    resources = spec.resources
    per_node = spec.tp_size // nodes
    return RankPlan(
        deployment=spec.name,
        replica=replica,
        tp_size=spec.tp_size,
        device=resources.device,
        cpus_per_rank=resources.cpus_per_rank,
        gpus_per_rank=resources.gpus,
        threads=resources.threads,
        bundles=tuple(rank // per_node for rank in range(spec.tp_size)),
        environment={**spec.environment, **policy_environment(spec)},
        lease_timeout_s=spec.control.lease_timeout_s,
        unresponsive_s=spec.control.unresponsive_s,
    )


def bundles(spec: DeploymentSpec, nodes: int = 1) -> list[dict[str, float]]:
    """A replica's placement group: one bundle per node with that node's ranks.

    Raises:
        ValueError: `nodes` does not divide the ranks.
    """
    if spec.tp_size % nodes:
        raise ValueError(
            f"engine.tp_size: {spec.tp_size} ranks do not fall into equal parts for {nodes} nodes"
        )
    ranks = spec.tp_size // nodes
    bundle = {"CPU": spec.resources.cpus_per_rank * ranks}
    if spec.resources.gpus:
        bundle["GPU"] = spec.resources.gpus * ranks
    return [dict(bundle) for _ in range(nodes)]


_WATCHDOG_S = 300.0  # SGLang's default of `watchdog_timeout`


def stall_limit_s(spec: DeploymentSpec) -> float:
    """How long work may stand still: as long as SGLang's own watchdog waits for a batch."""
    return float(spec.engine.get("watchdog_timeout") or _WATCHDOG_S)


def health_limits(spec: DeploymentSpec) -> HealthLimits:
    """When the health of a replica of this deployment changes."""
    return HealthLimits(
        suspect_s=spec.control.suspect_s,
        stall_s=stall_limit_s(spec),
        restarts=spec.control.restart_budget,
        proven_s=spec.control.proven_s,
    )


def engine_limits(info: Mapping[str, Any], page_size: int) -> dict[str, int]:
    """What the engine takes without clipping it, in tokens.

    SGLang shortens `max_new_tokens` in silence to what its context and its KV pool hold
    (`Scheduler.init_req_max_new_tokens`: the prompt counts in whole pages, and one page and one
    token are kept back) and takes prompts below `max_req_input_len`, which is 5 less than its
    longest request.

    Args:
        info: a scheduler's init info: `max_req_input_len`, `max_total_num_tokens`.
        page_size: of the KV pool.
    """
    longest = info["max_req_input_len"] + 5 - 1
    pool = info["max_total_num_tokens"] - 2 * page_size
    return {
        "context_tokens": min(longest, pool),
        "prompt_tokens": info["max_req_input_len"] - 1,
    }


def refuse_beyond(limits: Mapping[str, int], request: GenerateCall) -> None:
    """Refuses what this replica would cut short in silence.

    The gateway checks requests against the limits of one replica. Another one may have less: a pool
    of automatic size that came out smaller, or a restart with other engine settings.

    Args:
        limits: `engine_limits` of this replica.
        request: as it came.

    Raises:
        RequestRefused: prompt and output together are longer than this engine takes.
    """
    wanted = len(request.input_ids) + request.sampling.max_new_tokens
    if wanted > limits["context_tokens"]:
        raise RequestRefused(
            f"prompt and output may take {wanted} tokens, this replica has room for "
            f"{limits['context_tokens']} (engine.context_length and engine.max_total_tokens; what "
            "another replica took may be more). Lower max_tokens or give all replicas the same room"
        )
