"""Plans of published models, against what is known of their size."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from overstory.orchestrator import gpu_memory
from overstory.orchestrator.cli import app
from overstory.orchestrator.gpus import H200, RTX_PRO_6000, UnknownGpu, gpu_named, recognise
from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.known_models import FOLDER, known_model, known_models
from overstory.orchestrator.memory import (
    GIB,
    checkpoint_bytes,
    drafter_elements,
    expert_elements,
    other_elements,
    weight_bytes,
)
from overstory.orchestrator.model_facts import (
    PlanError,
    TargetFacts,
    drafter_from_config,
    target_from_config,
)
from overstory.orchestrator.plan import (
    KERNEL_HEADS,
    KERNEL_KEY,
    Plan,
    check_models,
    kernel_faults,
    make_plan,
)
from overstory.orchestrator.plan_text import render_plan
from overstory.orchestrator.quantization import weight_widths
from overstory.orchestrator.spec import load_spec, parse_spec

KIMI, THINKING, DEEPSEEK = "Kimi-K2.6", "Kimi-K2-Thinking", "DeepSeek-V3"
DRAFTER = "Kimi-K2.6-DFlash"


def facts(name: str) -> TargetFacts:
    model = known_model(name)
    assert model is not None
    return target_from_config(name, model.config)


def node(number: int = 0, gpu_bytes: float = RTX_PRO_6000.memory) -> NodeInventory:
    return NodeInventory(f"n{number}", cpus=64, gpus=8, memory=512 * GIB, gpu_memory=gpu_bytes)


def document(model: str = KIMI, tp: int = 8, **engine: Any) -> dict[str, Any]:
    drafter = {"drafter": f"/m/{DRAFTER}"} if model.startswith("Kimi") else {}
    return {
        "model": f"/m/{model}",
        **drafter,
        "tree": {"budget": 31 if drafter else 0},
        "resources": {"device": "cuda", "cpus_per_rank": 4},
        "engine": {
            "tp_size": tp,
            "mem_fraction_static": 0.94,
            "max_running_requests": 32,
            "cuda_graph_max_bs_decode": 32,
            "chunked_prefill_size": 4096,
            **engine,
        },
    }


def planned(nodes: int = 1, **settings: Any) -> Plan:
    return make_plan(
        parse_spec(document(**settings)), [node(i) for i in range(nodes)], published=True
    )


def refused(nodes: int = 1, **settings: Any) -> str:
    with pytest.raises(PlanError) as caught:
        planned(nodes, **settings)
    return str(caught.value)


# ---------------------------------------------------------------------------------- known models


def test_every_known_model_says_where_each_field_comes_from() -> None:
    files = sorted(FOLDER.glob("*.json"))
    assert len(files) == len(known_models()) >= 4
    for file in files:
        row = json.loads(file.read_text())
        assert row["sources"], file
        assert all(source["fields"] and source["source"] for source in row["sources"]), file


def test_kimi_weighs_what_its_files_weigh() -> None:
    model = known_model(KIMI)
    assert model is not None
    assert checkpoint_bytes(facts(KIMI)) == pytest.approx(model.weight_bytes, rel=5e-4)


def test_kimi_has_a_trillion_parameters() -> None:
    total = expert_elements(facts(KIMI)) + other_elements(facts(KIMI))
    assert total.on_rank(1) == pytest.approx(1.026e12, rel=1e-3)


def test_drafter_weighs_what_its_file_weighs() -> None:
    model = known_model(DRAFTER)
    assert model is not None
    drafter = drafter_from_config(DRAFTER, model.config)
    size = 2 * drafter_elements(drafter, 7168).on_rank(1)
    assert size == pytest.approx(model.weight_bytes, rel=2e-3)


def test_both_kimis_are_of_one_shape_but_for_the_vision_tower() -> None:
    one, other = facts(KIMI), facts(THINKING)
    assert expert_elements(one) == expert_elements(other)
    assert other_elements(one) == other_elements(other)
    assert (one.vision_elements > 4e8, other.vision_elements) == (True, 0)


def test_r1_is_planned_as_v3() -> None:
    assert known_model("/models/deepseek-r1/") == known_model("DeepSeek-V3")
    assert known_model("/models/other") is None


def test_a_published_shape_never_starts_anything() -> None:
    with pytest.raises(PlanError, match=r"no folder '/m/Kimi-K2\.6'"):
        check_models(parse_spec(document()))


def test_a_folder_goes_before_the_published_shape(tmp_path: Path) -> None:
    folder = tmp_path / KIMI
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    spec = parse_spec({**document(), "model": str(folder)})
    with pytest.raises(PlanError, match="has no kv_lora_rank"):
        make_plan(spec, [node()], published=True)


# ---------------------------------------------------------------------------------- one node, two


def test_kimi_on_one_node() -> None:
    plan = planned(context_length=200_000)
    assert 70 * GIB < plan.memory.target_weights < 74 * GIB
    # 61 layers of 576 and the drafter's 6 layers with one head of 128 for key and for value.
    assert plan.memory.kv_bytes_per_token == 2 * (61 * 576 + 6 * 2 * 128)
    contexts = dict(plan.contexts)
    assert contexts[1] == 200_000
    assert contexts[8] * 8 + 8 * 64 <= plan.memory.kv_tokens
    assert 20_000 < contexts[8] < 30_000
    assert 5_000 < contexts[32] < 7_000
    assert plan.memory.total < RTX_PRO_6000.memory
    assert plan.memory.beside_pool < plan.memory.spare


def test_estimate_leaves_what_another_engine_used_on_the_same_gpus() -> None:
    """Published for 8 RTX PRO 6000, Kimi-K2.6, fp8 KV, 0.94 of the memory, no drafter: 437,264
    tokens of KV (local-inference-lab/rtx6kpro, models/kimi-k26.md)."""
    kv = 437_264 * 61 * 576
    rest = 0.94 * RTX_PRO_6000.memory - kv - planned().memory.target_weights
    assert 1 * GIB < rest < 6 * GIB, "context, graphs and buffers"


def test_kimi_over_two_nodes() -> None:
    plan = planned(nodes=2, tp=16, context_length=200_000)
    (replica,) = plan.replicas
    assert [len(share.ranks) for share in replica.shares] == [8, 8]
    assert replica.strategy == "STRICT_SPREAD"
    assert dict(plan.contexts)[8] > 80_000
    assert any(port.what.startswith("NCCL") for port in plan.ports)
    assert plan.memory.target_weights < 0.55 * planned().memory.target_weights


def by_hand(tp: int) -> float:
    """Bytes of Kimi's language part on a rank of `tp`, layer by layer, from its config.json."""
    hidden, layers, sparse, heads = 7168, 61, 60, 64 // tp
    attention = 2 * (
        hidden * (1536 + 512 + 64)  # into the latents: whole on every rank
        + (1536 + 512)  # their norms
        + 1536 * heads * (128 + 64)  # queries
        + 2 * 512 * heads * (128 + 128)  # keys and values; SGLang keeps them a second time, split
        + heads * 128 * hidden  # out
    )
    experts = 384 * 3 * hidden * (2048 // tp) * (4 / 8 + 2 / 32)  # INT4, a bfloat16 scale for 32
    shared = 2 * 3 * hidden * (2048 // tp)
    router = 2 * 384 * (hidden + 1)
    dense = 2 * 3 * hidden * (18432 // tp)  # the first layer
    ends = 2 * 2 * (163840 // tp) * hidden  # embedding and head
    norms = 2 * (2 * layers + 1) * hidden
    return layers * attention + sparse * (experts + shared + router) + dense + ends + norms


def deepseek_by_hand(tp: int) -> float:
    """The same of DeepSeek-V3: blocks of 128 x 128 in fp8, each with a scale of 4 bytes."""
    hidden, layers, sparse, heads, fp8 = 7168, 61, 58, 128 // tp, 1 + 4 / 128**2
    kept = 512 * heads * (128 + 128)
    attention = fp8 * (
        hidden * (1536 + 576) + 1536 + 512 + 1536 * heads * 192 + kept + heads * 128 * hidden
    )
    attention += 2 * kept  # split, in bfloat16
    experts = fp8 * (256 + 1) * 3 * hidden * (2048 // tp)
    router = 2 * 256 * (hidden + 1)
    dense = fp8 * 3 * 3 * hidden * (18432 // tp)
    ends = 2 * 2 * (129280 // tp) * hidden
    norms = 2 * (2 * layers + 1) * hidden
    return layers * attention + sparse * (experts + router) + dense + ends + norms


@pytest.mark.parametrize("tp", [8, 16])
def test_weights_of_a_rank_by_hand(tp: int) -> None:
    assert weight_bytes(facts(THINKING), "auto", tp) == pytest.approx(by_hand(tp), rel=1e-9)
    deepseek = weight_bytes(facts(DEEPSEEK), "auto", tp)
    assert deepseek == pytest.approx(deepseek_by_hand(tp), rel=1e-9)
    tower = 27 * (4 * 1152**2 // tp + 2 * 1152 * 4304)  # SGLang cuts its attention alone
    patches = 1152 * (3 * 14**2 + 64 * 64)
    projector = (4 * 1152) ** 2 + 4 * 1152 * 7168
    vision = weight_bytes(facts(KIMI), "auto", tp) - by_hand(tp)
    assert vision == pytest.approx(2 * (tower + patches + projector), rel=1e-6)


@pytest.mark.parametrize(("tp", "kv_heads"), [(8, 1), (16, 1)])
def test_drafter_of_a_rank_by_hand(tp: int, kv_heads: int) -> None:
    """At TP 16 two ranks hold the same of the 8 key/value heads."""
    layer = 7168 * 128 * (2 * 64 // tp + 2 * kv_heads) + 3 * 7168 * (18432 // tp)
    norms = 6 * (2 * 7168 + 2 * 128) + 2 * 7168
    table = 4 * 262144 * 128  # sines and cosines
    wanted = 2 * (6 * layer + 6 * 7168 * 7168 + norms) + table
    plan = planned(nodes=tp // 8, tp=tp)
    assert plan.memory.drafter_weights == pytest.approx(wanted, rel=1e-9)
    assert plan.memory.kv_bytes_per_token == 2 * (61 * 576 + 6 * 2 * kv_heads * 128)


def test_a_rank_weighs_what_it_took_of_an_h200() -> None:
    """SGLang's own words for one rank of eight without a vision tower
    (docs/benchmarks/rank_slice_h200.md)."""
    memory = planned(model=THINKING).memory
    assert memory.target_weights / GIB == pytest.approx(71.54, rel=1e-3)
    assert memory.drafter_weights / GIB == pytest.approx(1.45, rel=0.01)


def test_the_pool_is_sized_by_what_sglang_reckons() -> None:
    """A drafter's layer is reckoned as one of the target's; it takes a fifth of that."""
    memory = planned().memory
    assert memory.kv_reserved_per_token == 2 * 576 * (61 + 6)
    weights = memory.target_weights + memory.drafter_weights
    free = RTX_PRO_6000.memory - memory.process
    held = memory.kv_tokens * memory.kv_reserved_per_token
    assert held == pytest.approx(0.94 * free - weights, rel=1e-5)
    assert memory.spare == pytest.approx(free - weights - memory.kv_pool)


@pytest.mark.parametrize("asked", [50_000, 5_000_000])
def test_a_pool_given_by_hand(asked: int) -> None:
    if asked < 100_000:
        assert planned(max_total_tokens=asked, context_length=40_000).memory.kv_tokens == asked
        return
    said = refused(max_total_tokens=asked, context_length=40_000)
    room = planned(context_length=40_000).memory.kv_tokens
    assert f"engine.max_total_tokens: got {asked}" in said
    assert f"engine.mem_fraction_static (now 0.94) leaves room for {room} tokens" in said


@pytest.mark.parametrize(("model", "least"), [(THINKING, 200_000), (DEEPSEEK, 100_000)])
def test_others_on_one_node(model: str, least: int) -> None:
    assert dict(planned(model=model).contexts)[1] >= least


def test_deepseek_over_two_nodes() -> None:
    contexts = dict(planned(nodes=2, model=DEEPSEEK, tp=16).contexts)
    assert contexts[1] == facts(DEEPSEEK).max_positions
    assert contexts[8] > 70_000


@pytest.mark.parametrize("model", [KIMI, THINKING, DEEPSEEK, "DeepSeek-R1"])
def test_each_published_model_at_tp_8_and_16(model: str) -> None:
    one, two = planned(model=model), planned(nodes=2, model=model, tp=16)
    for plan in (one, two):
        assert [batch for batch, _ in plan.contexts] == [1, 8, 32]
        assert all(context > 0 for _, context in plan.contexts)
        assert plan.memory.total < RTX_PRO_6000.memory
    assert two.memory.kv_tokens > 2 * one.memory.kv_tokens


def test_expert_parallelism_and_its_balancing_are_passed_on_and_planned() -> None:
    asked = {
        "ep_size": 8,
        "enable_eplb": True,
        "ep_num_redundant_experts": 16,
        "eplb_rebalance_num_iterations": 500,
        "moe_runner_backend": "triton",
        "disable_shared_experts_fusion": True,
    }
    plan, plain = planned(context_length=100_000, **asked), planned(context_length=100_000)
    assert asked.items() <= plan.settings.server_args.items()
    assert plan.experts is not None
    assert (plan.experts.groups, plan.experts.experts_per_rank, plan.experts.redundant) == (
        8,
        50,
        16,
    )
    assert [load.batch for load in plan.experts.loads] == [1, 4, 8, 16, 32, 64, 128]
    copies = plan.memory.target_weights - plain.memory.target_weights
    assert copies == pytest.approx(expert_elements(facts(KIMI)).on_rank(8) * 0.5625 * 16 / 384)
    text = render_plan(plan)
    assert "50 a layer on 8 groups of ranks (width 2048), 16 of all of them copies" in text
    assert "placed at the start: rank 0: 0-49; rank 1: 50-99;" in text
    assert "; rank 7: 350-383, 0-15\n" in text
    assert "placed at the start" not in render_plan(plain), "every rank holds a slice of each"


def test_balancing_that_the_engine_cannot_do_is_refused() -> None:
    assert "engine.enable_eplb: got true with engine.ep_size 1" in refused(enable_eplb=True)
    said = refused(ep_size=8, ep_num_redundant_experts=12)
    assert "engine.ep_num_redundant_experts: got 12" in said
    assert "take a multiple of 8" in said
    said = refused(moe_a2a_backend="deepep")
    assert "engine.moe_a2a_backend: deepep" in said
    assert "set engine.ep_size to 8 (now 1)" in said


@pytest.mark.parametrize("model", [KIMI, THINKING, DEEPSEEK])
def test_settings_that_would_run_experts_otherwise_than_they_say_are_refused(model: str) -> None:
    """INT4 experts run with Marlin or Triton on these GPUs, and their shared expert is bfloat16;
    DeepSeek's are all fp8."""
    ours = {"model": model, "context_length": 50_000}
    for runner in ("auto", "marlin", "triton"):
        assert planned(moe_runner_backend=runner, **ours)
    if model == DEEPSEEK:
        assert planned(enforce_shared_experts_fusion=True, **ours)
        return
    said = refused(moe_runner_backend="flashinfer_trtllm", **ours)
    assert "engine.moe_runner_backend: flashinfer_trtllm is for compute capability 10.0" in said
    assert "take triton" in said
    said = refused(moe_runner_backend="cutlass", **ours)
    assert "engine.moe_runner_backend: cutlass is ignored by SGLang" in said
    said = refused(enforce_shared_experts_fusion=True, **ours)
    assert "engine.enforce_shared_experts_fusion: got true" in said
    assert planned(enforce_shared_experts_fusion=False, **ours)


PRESETS = sorted((Path(__file__).parents[2] / "clusters").glob("*x*/deployment*.yaml"))
PRESETS += sorted((Path(__file__).parents[2] / "clusters").glob("h200/deployment*.yaml"))


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_preset_s_own_command_plans_its_whole_context(file: Path) -> None:
    """As its head says, typed where nothing of it is."""
    found = re.search(r"^#   overstory (plan \S+ .*)$", file.read_text(), re.MULTILINE)
    assert found is not None
    command = found[1].split()
    assert Path(__file__).parents[2] / command[1] == file
    done = CliRunner().invoke(app, ["plan", str(file), *command[2:], "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    context = load_spec(file).engine["context_length"]
    assert plan["longest_context"][0] == {"batch": 1, "tokens": context}
    assert [row["batch"] for row in plan["longest_context"]] == [1, 8, 32]
    told = re.findall(r"eaves a KV pool of ([\d,]+) tokens", file.read_text())
    assert all(
        int(number.replace(",", ""))
        == pytest.approx(plan["memory_per_rank"]["kv_tokens"], rel=0.01)
        for number in told
    )


def test_presets_are_there_for_each_of_the_models() -> None:
    models = {load_spec(file).model.rsplit("/", 1)[-1] for file in PRESETS}
    assert {KIMI, THINKING, "DeepSeek-R1"} == models
    assert {load_spec(file).tp_size for file in PRESETS} == {8, 16}


def test_ranks_that_exchange_tokens_hold_the_shared_experts_whole() -> None:
    shared = 60 * 2 * 3 * 7168 * 2048
    settings: dict[str, Any] = {"ep_size": 8, "context_length": 50_000}
    whole = planned(moe_a2a_backend="deepep", **settings).memory.target_weights
    assert whole - planned(**settings).memory.target_weights == pytest.approx(shared * 7 / 8)


def test_a_plan_shows_all_of_it() -> None:
    text = render_plan(planned(context_length=200_000))
    for part in (
        "Longest context  200,000 at batch 1",
        "CUDA graphs",
        "buffers of a prefill chunk",
        "distinct experts",
        "drawn  node of rank 0",
        "cuda_graph_max_bs_decode: 32",
        "planned with the published shape of moonshotai/Kimi-K2.6",
    ):
        assert part in text
    data = json.loads(json.dumps(planned().to_dict()))
    assert [row["batch"] for row in data["longest_context"]] == [1, 8, 32]
    assert data["experts"]["loads"][0]["rows"] == 32


# ---------------------------------------------------------------------------------- refused


def test_too_few_ranks_for_the_weights() -> None:
    said = refused(tp=4)
    assert "engine.tp_size: a rank's weights" in said
    assert "raise engine.tp_size (now 4)" in said


def test_context_that_the_pool_does_not_hold() -> None:
    said = refused(context_length=262_144)
    assert "engine.context_length: one request of 262144 tokens and 64 rows" in said
    lower = int(said.split("lower engine.context_length to ")[1].split(",")[0])
    assert dict(planned(context_length=lower).contexts)[1] == lower
    assert "set engine.kv_cache_dtype: fp8_e4m3" in said


def test_half_the_bytes_of_kv_hold_twice_the_context() -> None:
    half = planned(context_length=262_144, kv_cache_dtype="fp8_e4m3")
    assert half.memory.kv_tokens == pytest.approx(2 * planned().memory.kv_tokens, rel=1e-3)


def test_pool_larger_than_the_gpu() -> None:
    assert "engine.max_total_tokens: got 900000" in refused(max_total_tokens=900_000)


def test_a_fraction_that_leaves_no_room_for_buffers_is_warned_about() -> None:
    plan = planned(mem_fraction_static=0.99, chunked_prefill_size=16384)
    assert any(line.startswith("engine.mem_fraction_static:") for line in plan.warnings)


def test_each_number_of_rows_has_its_graphs() -> None:
    few, many = (planned(cuda_graph_bs_decode=sizes).memory.graphs for sizes in ([32], [1, 32]))
    # Plain, chain, 16 and 24 rows and the most, and the drafter's 6 layers of 61.
    assert many - few == pytest.approx((5 * 61 + 6) * gpu_memory.GRAPH_LAYER_BYTES)


def test_trees_on_a_gpu_without_our_attention_are_warned_about() -> None:
    assert any("trees on a GPU need overstory" in line for line in planned().warnings)
    for fine in (
        {"attention_backend": "overstory"},
        {"attention_backend": "triton", "disable_cuda_graph": True},
    ):
        assert not any("trees on a GPU" in line for line in planned(**fine).warnings)


def test_our_attention_takes_some_numbers_of_heads() -> None:
    ours = {"attention_backend": "overstory"}
    assert planned(**ours).spec.tp_size == 8
    said = refused(nodes=8, tp=64, **ours)
    assert "overstory takes 2, 4, 8, 16 heads a rank, tp_size 64 leaves 1 of 64" in said
    assert "use engine.tp_size 4 or 8 or 16 or 32, or triton" in said


def test_what_a_plan_knows_of_our_attention_is_what_the_kernels_say() -> None:
    from overstory.kernels.ops.attention_checks import HEADS, VALUES, WIDTH

    assert (KERNEL_HEADS, KERNEL_KEY) == (HEADS, (VALUES, WIDTH - VALUES))


def test_our_attention_takes_the_published_width_of_keys() -> None:
    target = replace(facts(KIMI), kv_lora_rank=256)
    args = {"attention_backend": "overstory"}
    assert "the model has 256 + 64; use triton" in kernel_faults(target, 8, args)[0]
    assert kernel_faults(target, 8, {}) == []


@pytest.mark.parametrize("setting", ["port", "token_port"])
@pytest.mark.parametrize("port", [6379, 8265, 12000])
def test_ports_that_ray_uses_are_warned_about(port: int, setting: str) -> None:
    spec = parse_spec({**document(), "gateway": {setting: port}})
    warnings = make_plan(spec, [node()], published=True).warnings
    named = [line.split(":")[0] for line in warnings if line.startswith("gateway.")]
    assert named == [f"gateway.{setting}"]


# ---------------------------------------------------------------------------------- pieces


def test_widths_follow_what_a_scheme_leaves_out() -> None:
    kimi = weight_widths(facts(KIMI).quantization, 2.0)
    assert (kimi.experts, kimi.attention, kimi.shared, kimi.dense) == (0.5625, 2.0, 2.0, 2.0)
    deepseek = weight_widths(facts(DEEPSEEK).quantization, 2.0)
    assert deepseek.attention == deepseek.experts == 1 + 4 / 128**2
    assert weight_widths({}, 4.0).experts == 4.0
    assert weight_widths({"quant_method": "awq"}, 2.0).experts == 0.5625
    eight = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8}}},
    }
    assert weight_widths({**eight, "ignore": ["re:.*self_attn.*"]}, 2.0).attention == 2.0
    assert weight_widths(eight, 2.0).dense == 1.0


def test_graphs_cost_nothing_where_there_are_none() -> None:
    flags = {"tp_size": 8, "disable_cuda_graph": True}
    assert gpu_memory.graph_bytes(facts(KIMI), None, flags, RTX_PRO_6000.memory) == 0
    tiers = gpu_memory.captured_batches(
        {"tp_size": 8, "cuda_graph_max_bs_decode": 9, "speculative_algorithm": "DDTREE"}, 0
    )
    assert tiers == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_gpus_by_name_and_by_what_the_driver_says() -> None:
    assert gpu_named("h200") is H200
    said = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert recognise(said) is RTX_PRO_6000
    assert recognise("NVIDIA A100-SXM4-80GB") is None
    with pytest.raises(UnknownGpu, match="known are h200, rtx-pro-6000"):
        gpu_named("h300")
