"""Everything that can be known before a start is told before it, with the setting to change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.inventory import NodeInventory, local_inventory
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.plan import Plan, make_plan
from overstory.orchestrator.plan_text import render_plan
from overstory.orchestrator.spec import DeploymentSpec, parse_spec
from overstory.workers.tiny.config import DrafterConfig, TargetConfig

GIB = 2**30
NODE = NodeInventory(name="h1", cpus=8, gpus=0, memory=64 * GIB)
GPU_NODE = NodeInventory(name="g1", cpus=64, gpus=8, memory=512 * GIB, gpu_memory=96 * GIB)

Pair = Callable[..., DeploymentSpec]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Writes the configs of a pair, with changes, and gives a deployment of it."""

    def write(
        target: dict[str, Any] | None = None,
        drafter: dict[str, Any] | None = None,
        **settings: Any,
    ) -> DeploymentSpec:
        configs = {
            "target": {**TargetConfig().to_hf(), **(target or {})},
            "drafter": {**DrafterConfig().to_hf(), **(drafter or {})},
        }
        for name, config in configs.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        paths = {name: str(tmp_path / name) for name in configs}
        return parse_spec({"model": paths["target"], "drafter": paths["drafter"], **settings})

    return write


def faults(spec: DeploymentSpec, *nodes: NodeInventory) -> list[str]:
    with pytest.raises(PlanError) as caught:
        make_plan(spec, nodes or [NODE])
    return caught.value.problems


# ---------------------------------------------------------------------------------- what is planned


def test_two_ranks_on_one_node(pair: Pair) -> None:
    plan = make_plan(pair(engine={"tp_size": 2}), [NODE])
    (replica,) = plan.replicas
    assert [(s.node, s.ranks) for s in replica.shares] == [("h1", (0, 1))]
    assert replica.bundles == ({"CPU": 2.0},)
    assert replica.strategy == "STRICT_PACK"


def test_a_replica_larger_than_a_node_is_cut_in_equal_parts(pair: Pair) -> None:
    nodes = [NodeInventory(f"h{i}", cpus=3, gpus=0, memory=64 * GIB) for i in range(3)]
    (replica,) = make_plan(pair(engine={"tp_size": 4}), nodes).replicas
    assert [s.ranks for s in replica.shares] == [(0, 1), (2, 3)]
    assert replica.strategy == "STRICT_SPREAD"
    assert replica.bundles == ({"CPU": 2.0}, {"CPU": 2.0})


def test_replicas_fill_the_tightest_node_first(pair: Pair) -> None:
    nodes = [
        NodeInventory("big", cpus=4, gpus=0, memory=64 * GIB),
        NodeInventory("small", cpus=2, gpus=0, memory=64 * GIB),
    ]
    plan = make_plan(pair(engine={"tp_size": 2}, replicas=3), nodes)
    assert [r.shares[0].node for r in plan.replicas] == ["small", "big", "big"]


def test_half_a_gpu_each(pair: Pair) -> None:
    node = NodeInventory("g", cpus=16, gpus=1, memory=64 * GIB, gpu_memory=80 * GIB)
    cuda = {"device": "cuda", "gpus_per_rank": 0.5}
    plan = make_plan(pair(resources=cuda, replicas=2), [node])
    assert [r.bundles for r in plan.replicas] == [({"CPU": 1.0, "GPU": 0.5},)] * 2


@pytest.mark.parametrize(
    ("budget", "spine", "policy", "rows"),
    [
        (0, False, "plain", 8),
        (7, True, "chain", 8),
        (4, False, "tree-4", 8),
        (31, True, "spine-31", 32),
    ],
)
def test_budget_becomes_a_policy(
    pair: Pair, budget: int, spine: bool, policy: str, rows: int
) -> None:
    settings = resolve_engine(pair(tree={"budget": budget, "spine_first": spine}))
    assert str(settings.policy) == policy
    assert settings.server_args["speculative_num_draft_tokens"] == rows
    assert settings.server_args["speculative_algorithm"] == "DDTREE"


def test_engine_values_go_over_the_device_defaults(pair: Pair) -> None:
    args = resolve_engine(pair(engine={"max_total_tokens": 999})).server_args
    assert args["max_total_tokens"] == 999
    assert (args["device"], args["skip_tokenizer_init"], args["page_size"]) == ("cpu", True, 1)


def test_without_drafter_no_speculation(pair: Pair) -> None:
    settings = resolve_engine(pair(tree={"budget": 0}).model_copy(update={"drafter": None}))
    assert str(settings.policy) == "plain"
    assert "speculative_algorithm" not in settings.server_args


def test_plan_as_text_and_as_data(pair: Pair) -> None:
    plan = make_plan(pair(engine={"tp_size": 2}, gateway={"host": "0.0.0.0"}), [NODE])
    text = render_plan(plan)
    for part in (
        "rank 0, 1 + front half (2 CPU)",
        "tree-31",
        "tp_size: 2",
        "warning: gateway.host",
    ):
        assert part in text
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["policy"] == "tree-31"
    assert data["memory_per_rank"]["total"] > 0


def test_a_budget_below_the_chain_is_warned_about(pair: Pair) -> None:
    plan = make_plan(pair(tree={"budget": 3}), [NODE])
    assert any("fewer than a chain" in warning for warning in plan.warnings)


def test_this_machine_has_an_inventory() -> None:
    here = local_inventory()
    assert here.cpus >= 1
    assert here.memory > GIB / 2


# ---------------------------------------------------------------------------------- what is refused


def test_wrong_model_path(pair: Pair) -> None:
    spec = pair().model_copy(update={"model": "/nowhere/kimi"})
    assert faults(spec) == [
        "model: no folder '/nowhere/kimi'; give a built-in name or a folder in Hugging Face format "
        "(download a hub model first, on every node)"
    ]


def test_missing_drafter_folder(pair: Pair) -> None:
    assert faults(pair().model_copy(update={"drafter": "/nowhere/d"}))[0].startswith(
        "drafter: no folder '/nowhere/d'"
    )


def test_folder_without_config(pair: Pair, tmp_path: Path) -> None:
    spec = pair()
    (tmp_path / "target" / "config.json").unlink()
    assert "cannot be read (No such file" in faults(spec)[0]
    (tmp_path / "target" / "config.json").write_text("{")
    assert "is not valid JSON" in faults(spec)[0]


def test_model_and_drafter_mixed_up(pair: Pair) -> None:
    spec = pair()
    assert (
        "name it under `drafter`"
        in faults(spec.model_copy(update={"model": spec.drafter, "drafter": spec.model}))[0]
    )
    assert "wanted DFlashDraftModel" in faults(spec.model_copy(update={"drafter": spec.model}))[0]


def test_model_that_is_not_mla(pair: Pair) -> None:
    assert "Overstory serves MLA models" in faults(pair(target={"kv_lora_rank": None}))[0]


def test_config_with_a_broken_number(pair: Pair) -> None:
    assert "vocab_size is 'x', wanted a whole number" in faults(pair(target={"vocab_size": "x"}))[0]


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        ({"vocab_size": 8192}, "its vocabulary is 8192, the model's is 4096"),
        ({"hidden_size": 512}, "its hidden size is 512, the model's is 256"),
        ({"num_target_layers": 9}, "its number of target layers is 9, the model's is 4"),
        (
            {"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 2}},
            "target_layer_ids [0, 3] name layer 3, wanted ids from 0 to 2",
        ),
        (
            {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 5000}},
            "mask_token_id is 5000, wanted an id below the model's vocabulary of 4096",
        ),
        ({"block_size": 1}, "block_size is 1, wanted at least 2"),
    ],
)
def test_drafter_of_another_model(pair: Pair, drafter: dict[str, Any], said: str) -> None:
    assert said in "\n".join(faults(pair(drafter=drafter)))


@pytest.mark.parametrize(
    ("engine", "target", "drafter", "said"),
    [
        ({"tp_size": 3}, {}, {}, "3 does not divide the attention heads 8; use one of 1, 2, 4, 8"),
        ({"tp_size": 2}, {"vocab_size": 4097}, {"vocab_size": 4097}, "the vocabulary 4097"),
        ({"tp_size": 2}, {"moe_intermediate_size": 127}, {}, "the expert width 127"),
        ({"tp_size": 4}, {"n_routed_experts": 2}, {}, "4 is more than the 2 experts"),
        ({"tp_size": 8}, {}, {}, "8 does not divide the drafter's attention heads 4"),
        ({"tp_size": 2, "ep_size": 3}, {}, {}, "engine.ep_size: 3 must divide tp_size 2"),
    ],
)
def test_tp_that_does_not_divide(
    pair: Pair,
    engine: dict[str, Any],
    target: dict[str, Any],
    drafter: dict[str, Any],
    said: str,
) -> None:
    assert said in "\n".join(faults(pair(target, drafter, engine=engine)))


def test_more_ranks_than_cpus(pair: Pair) -> None:
    two = NodeInventory("h1", cpus=2, gpus=0, memory=64 * GIB)
    assert faults(pair(engine={"tp_size": 4}), two) == [
        "engine.tp_size: 4 ranks (replicas 1 x tp_size 4) need 4 CPUs (resources.cpus_per_rank 1), "
        "the nodes have 2 free (h1 2); lower engine.tp_size, replicas or resources.cpus_per_rank, "
        "or add nodes"
    ]
    half = pair(engine={"tp_size": 4}, resources={"cpus_per_rank": 0.5})
    assert len(make_plan(half, [two]).replicas) == 1


def test_more_ranks_than_gpus(pair: Pair) -> None:
    cuda = pair(resources={"device": "cuda"}, engine={"tp_size": 2})
    said = "need 2 GPUs (resources.gpus_per_rank 1), the nodes have 0 free (h1 0)"
    assert said in faults(cuda)[0]


def test_enough_cpus_in_pieces_too_small(pair: Pair) -> None:
    nodes = [NodeInventory(f"h{i}", cpus=1.5, gpus=0, memory=64 * GIB) for i in range(4)]
    spec = pair(engine={"tp_size": 2}, resources={"cpus_per_rank": 2})
    assert "no way to place replicas 1 x tp_size 2 in equal parts" in faults(spec, *nodes)[0]


def test_memory_that_does_not_fit(pair: Pair) -> None:
    tight = NodeInventory("h1", cpus=8, gpus=0, memory=2 * GIB)
    assert "of memory; free are h1" in faults(pair(engine={"tp_size": 2}), tight)[0]


def test_weights_that_do_not_fit_the_gpu(pair: Pair) -> None:
    small = NodeInventory("g", cpus=8, gpus=1, memory=64 * GIB, gpu_memory=1 * GIB)
    spec = pair(resources={"device": "cuda"})
    assert "its GPU share has 1.0 GiB; raise engine.tp_size (now 1)" in faults(spec, small)[0]


def test_no_room_for_a_kv_pool(pair: Pair) -> None:
    small = NodeInventory("g", cpus=8, gpus=1, memory=64 * GIB, gpu_memory=2 * GIB)
    found = faults(pair(resources={"device": "cuda"}), small)[0]
    assert found.startswith("engine.context_length: one request of 1 tokens and 64 rows")
    assert "it holds no request at all, raise engine.mem_fraction_static" in found


def test_pages_that_hold_no_request(pair: Pair) -> None:
    """Of a pool of 300 slots, 256 are in whole pages; a step's 2 x 64 rows go off."""
    gpu = NodeInventory("g", cpus=8, gpus=1, memory=64 * GIB, gpu_memory=80 * GIB)
    engine = {"max_total_tokens": 300, "page_size": 64}
    cuda = {"device": "cuda"}
    fits = pair(resources=cuda, engine=engine | {"context_length": 128})
    assert make_plan(fits, [gpu]).replicas
    found = faults(pair(resources=cuda, engine=engine | {"context_length": 129}), gpu)[0]
    assert "lower engine.context_length to 128" in found
    single = pair(resources=cuda, engine=engine | {"context_length": 129, "page_size": 1})
    assert make_plan(single, [gpu]).replicas


def test_context_beyond_the_model(pair: Pair) -> None:
    assert faults(pair(engine={"context_length": 8193})) == [
        "engine.context_length: got 8193, the model was made for at most 8192 positions; "
        "lower it or remove it"
    ]
    assert "wanted at least 1" in faults(pair(engine={"context_length": 0}))[0]


def test_all_model_faults_come_at_once(pair: Pair) -> None:
    spec = pair(drafter={"vocab_size": 1, "hidden_size": 1}, engine={"context_length": 10**6})
    assert [line.split(":")[0] for line in faults(spec)] == [
        "drafter",
        "drafter",
        "engine.context_length",
    ]


def test_plan_is_frozen(pair: Pair) -> None:
    plan: Plan = make_plan(pair(), [NODE])
    with pytest.raises(AttributeError):
        plan.memory = None  # type: ignore[misc, assignment]
