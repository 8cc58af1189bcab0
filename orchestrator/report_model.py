"""How the verify stage of a running deployment splits, by the capacity model: for the report. Pure.

Counters time the stages of a step, and verify as a whole; what is attention, experts or exchange
in it no counter sees without slowing the step down. The model says what to expect of each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from overstory.orchestrator.capacity import Replica, StepTime, step_time
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.gpus import GpuFacts, recognise
from overstory.orchestrator.plan import PlanError
from overstory.orchestrator.spec import DeploymentSpec
from overstory.orchestrator.step_figures import policy_figures

MEANS = {
    "attention": "verify attention",
    "experts": "MoE experts",
    "dense": "projections, shared experts and dense layers",
    "head": "the head over the vocabulary",
    "draft": "the drafter",
    "tree": "building and walking trees",
    "exchange": "communication between ranks",
    "host": "the host and gaps between kernels",
}


def modelled_step(
    spec: Mapping[str, Any], rank: Mapping[str, Any], gpus: Sequence[str]
) -> tuple[StepTime, str] | None:
    """Seconds by stage that the model expects of the steps that a rank takes now, and the point
    that they are for; None where the GPU is none that the model knows, or nothing runs.

    Args:
        spec: of the deployment.
        rank: rank 0 in the controller's status.
        gpus: names that `nvidia-smi` reports on the machine that asks.
    """
    gpu = _gpu(spec, gpus)
    load = rank.get("load") or {}
    running = int(load.get("running", 0))
    figures = next(iter(policy_figures(rank.get("steps"))), None)
    if gpu is None or not running or figures is None or not figures.forwards:
        return None
    try:
        settings = resolve_engine(DeploymentSpec.model_validate(spec), published=True)
    except PlanError:
        return None
    used = load["max_slots"] - load["free_slots"] - load.get("cached_slots", 0)
    context = max(1, used // running)
    counted = rank["steps"]["verify"][figures.policy]
    rows = max(1, round(counted["rows"] / counted["requests"]))
    engine = spec["engine"]
    replica = Replica(
        settings.target,
        settings.drafter,
        gpu,
        engine.get("tp_size", 1),
        ep_size=engine.get("ep_size", 1),
    )
    point = f"{running} requests of {context} tokens, {rows} rows each, {gpu.name}"
    return step_time(replica, running, rows, context), point


def _gpu(spec: Mapping[str, Any], gpus: Sequence[str]) -> GpuFacts | None:
    if spec["resources"]["device"] != "cuda":
        return None
    return next((known for name in gpus if (known := recognise(name))), None)


def stage_milliseconds(step: StepTime) -> list[tuple[str, float]]:
    """Stage in words and its milliseconds, the longest first."""
    found = [(MEANS[field.name], 1000 * getattr(step, field.name)) for field in fields(step)]
    return sorted(found, key=lambda pair: -pair[1])
