"""From a deployment to what SGLang is started with: server arguments and the first tree policy.

Reads `config.json` files, imports nothing heavy. The one place where a deployment's own `engine:`
values, Overstory's and the device's defaults are laid over each other.
"""

from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.model_facts import (
    DrafterFacts,
    TargetFacts,
    read_drafter,
    read_target,
)
from overstory.orchestrator.spec import DeploymentSpec
from overstory.workers.ddtree import server_fields
from overstory.workers.environment import cpu_engine_defaults
from overstory.workers.tiny.paths import resolve_model
from overstory.workers.tree_policy import TreePolicy, policy_from_budget


@dataclass(frozen=True)
class EngineSettings:
    """What a replica's engine is started with.

    Attributes:
        target, drafter: the models; `drafter` is None for plain decoding only.
        server_args: `ServerArgs` fields, all that differ from SGLang's defaults.
        policy: tree policy that ranks start with, also the largest that they have room for
            (room for a chain is always kept where there is a drafter).
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    server_args: dict[str, Any]
    policy: TreePolicy


def resolve_engine(spec: DeploymentSpec) -> EngineSettings:
    """Settings of one replica's engine.

    Raises:
        PlanError: the model or drafter is not there or not of the wanted kind.
    """
    target = read_target(resolve_model(spec.model))
    drafter = read_drafter(resolve_model(spec.drafter)) if spec.drafter else None
    policy = TreePolicy("plain")
    fields: dict[str, Any] = cpu_engine_defaults() if spec.resources.device == "cpu" else {}
    fields |= {"page_size": 1, "tp_size": 1} | spec.engine
    fields |= {
        "device": spec.resources.device,
        "model_path": target.path,
        "served_model_name": spec.served_model_name,
        "skip_tokenizer_init": True,
    }
    if drafter is not None:
        policy = policy_from_budget(spec.tree.budget, drafter.block_size, spec.tree.spine_first)
        fields |= server_fields(policy, drafter.block_size, drafter.path)
    return EngineSettings(target, drafter, fields, policy)
