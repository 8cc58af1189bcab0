"""From a deployment to what SGLang is started with: server arguments and the first tree policy.

Reads `config.json` files, imports nothing heavy. The one place where a deployment's own `engine:`
values, Overstory's and the device's defaults are laid over each other.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overstory.orchestrator.known_models import known_model
from overstory.orchestrator.model_facts import (
    DrafterFacts,
    TargetFacts,
    drafter_from_config,
    read_drafter,
    read_target,
    target_from_config,
)
from overstory.orchestrator.spec import DeploymentSpec
from overstory.workers.ddtree import server_fields
from overstory.workers.environment import cpu_engine_defaults
from overstory.workers.tiny.paths import resolve_model
from overstory.workers.tree_policy import AutoPolicy, Policy, TreePolicy, policy_from_budget


@dataclass(frozen=True)
class EngineSettings:
    """What a replica's engine is started with.

    Attributes:
        target, drafter: the models; `drafter` is None for plain decoding only.
        server_args: `ServerArgs` fields, all that differ from SGLang's defaults.
        policy: largest tree policy that ranks have room for (room for a chain is always kept where
            there is a drafter).
        stand_ins: models whose folders are not here and whose published shapes were taken, one
            line each.
        automatic: each step's policy is chosen.
    """

    target: TargetFacts
    drafter: DrafterFacts | None
    server_args: dict[str, Any]
    policy: TreePolicy
    stand_ins: tuple[str, ...] = ()
    automatic: bool = False

    @property
    def rule(self) -> Policy:
        """What ranks start with: `policy`, or the choice among all up to it."""
        if not self.automatic:
            return self.policy
        assert self.drafter is not None, "an automatic policy has a drafter"
        nodes = self.policy.drafted_nodes(self.drafter.block_size)
        return AutoPolicy(nodes if nodes < self.drafter.block_size - 1 else None)


def _read_models(
    spec: DeploymentSpec, published: bool
) -> tuple[TargetFacts, DrafterFacts | None, tuple[str, ...]]:
    """Target, drafter and what was taken from `known_models` instead of a folder."""
    stand_ins = []

    def stand_in(key: str, path: str) -> dict[str, Any] | None:
        known = known_model(path) if published and not Path(path).is_dir() else None
        if known is None:
            return None
        stand_ins.append(
            f"{key}: no folder {path!r} on this machine; planned with the published shape of "
            f"{known.repository}"
        )
        return known.config

    path = resolve_model(spec.model)
    config = stand_in("model", path)
    target = read_target(path) if config is None else target_from_config(path, config)
    drafter = None
    if spec.drafter:
        path = resolve_model(spec.drafter)
        config = stand_in("drafter", path)
        drafter = read_drafter(path) if config is None else drafter_from_config(path, config)
    return target, drafter, tuple(stand_ins)


def resolve_engine(spec: DeploymentSpec, published: bool = False) -> EngineSettings:
    """Settings of one replica's engine.

    Args:
        spec: the deployment.
        published: for a plan only: where a model's folder is not here but the model is a known
            one, take its published shape.

    Raises:
        PlanError: the model or drafter is not there or not of the wanted kind.
    """
    target, drafter, stand_ins = _read_models(spec, published)
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
    automatic = spec.tree.policy == "auto"
    return EngineSettings(target, drafter, fields, policy, stand_ins, automatic)
