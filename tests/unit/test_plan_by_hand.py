"""Sums of plan and capacity model worked out again by hand, where no measurement pins them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overstory.orchestrator.attention_cost import attention_seconds, walks
from overstory.orchestrator.capacity import (
    DENSE_LAYER_S,
    DRAFT_LAYER_S,
    EXPERT_LAYER_S,
    EXPERT_RATE_PER_SM,
    Draft,
    Replica,
    all_reduce,
    estimate,
    step_time,
)
from overstory.orchestrator.capacity_grid import make_grid
from overstory.orchestrator.experts import held_experts
from overstory.orchestrator.gpu_memory import (
    CAPTURE_BYTES,
    GRAPH_LAYER_BYTES,
    capture_bytes,
    default_fraction,
    layer_bytes,
    workspace_bytes,
)
from overstory.orchestrator.gpus import H200, RTX_PRO_6000, Link
from overstory.orchestrator.known_models import known_model
from overstory.orchestrator.memory import GIB, estimate_rank
from overstory.orchestrator.model_facts import (
    DrafterFacts,
    TargetFacts,
    drafter_from_config,
    target_from_config,
)
from overstory.orchestrator.spec import parse_spec


def target(name: str = "Kimi-K2.6") -> TargetFacts:
    model = known_model(name)
    assert model is not None
    return target_from_config(name, model.config)


def drafter() -> DrafterFacts:
    model = known_model("Kimi-K2.6-DFlash")
    assert model is not None
    return drafter_from_config("drafter", model.config)


def kimi(**changed: Any) -> Replica:
    return replace(Replica(target(), drafter(), RTX_PRO_6000, 8), **changed)


# --------------------------------------------------------------------------------------- memory


def test_buffers_of_a_layer() -> None:
    """Experts of the top 8 where they take most; queries by heads where those do."""
    experts = 8 * (7168 + 3 * 256)
    assert layer_bytes(target(), 100, 8) == 2 * 100 * (6 * 7168 + experts)
    many_heads = replace(target("DeepSeek-V3"), experts_per_token=1)
    queries = 128 * (128 + 2 * 64 + 2 * 512)
    assert layer_bytes(many_heads, 100, 1) == 2 * 100 * (6 * 7168 + queries)
    dense = replace(target(), experts_per_token=0, num_heads=8)
    assert layer_bytes(dense, 100, 8) == 2 * 100 * (6 * 7168 + 3 * 18432 / 8)


def test_buffers_of_a_prefill_chunk() -> None:
    flags = {"tp_size": 8, "chunked_prefill_size": 4096, "context_length": 200_000}
    layer = layer_bytes(target(), 4096, 8)
    features = 2 * 4096 * 6 * 7168  # of six of the target's layers, for the drafter
    prefix = 2 * 131_072 * 8 * (128 + 64 + 128)  # of 8 heads: keys, rotary part, values
    found = workspace_bytes(target(), drafter(), flags, RTX_PRO_6000.memory)
    assert found == layer + features + prefix
    assert workspace_bytes(target(), None, flags, RTX_PRO_6000.memory) == layer + prefix
    short = {**flags, "context_length": 10_000}
    assert workspace_bytes(target(), None, short, 0) == layer + prefix * 10_000 / 131_072


def test_captured_graphs() -> None:
    """Two batches, two numbers of rows, and the drafter's block of 8 for the largest batch."""

    def one_set(tokens: int) -> float:
        logits = tokens * 163840 * (2 / 8 + 4)
        return CAPTURE_BYTES + layer_bytes(target(), tokens, 8) + logits

    nodes = GRAPH_LAYER_BYTES * (2 * 2 * 61 + 2 * 6)
    wanted = one_set(4 * 1) + one_set(4 * 16) + one_set(4 * 8) + nodes
    assert capture_bytes(target(), drafter(), [1, 4], (1, 16), 8, draws=0) == pytest.approx(wanted)
    alone = one_set(4) + GRAPH_LAYER_BYTES * 2 * 61
    assert capture_bytes(target(), None, [1, 4], (1,), 8, draws=0) == pytest.approx(alone)


def test_table_of_requests() -> None:
    """A slot number of 4 bytes for each position of each request."""
    flags = {"tp_size": 8, "max_running_requests": 32, "context_length": 200_000}
    memory = estimate_rank(target(), None, flags, "cuda", RTX_PRO_6000.memory)
    assert memory.request_table == 4 * 32 * 200_000


@pytest.mark.parametrize(
    ("gib", "reserved_mib"),
    [
        (40, 512 + 4096 * 1.5 + 1024 + 160 * 2 + 1536),
        (94, 512 + 8192 * 1.5 + 1024 + 512 * 2 + 1536),
        (94.0, 10 * 1024),
    ],
)
def test_fraction_that_sglang_takes_by_itself(gib: float, reserved_mib: float) -> None:
    """For its activations, ranks and graphs; never less than 10 GiB of a large GPU."""
    flags: dict[str, Any] = {"tp_size": 8}
    if reserved_mib == 10 * 1024:
        flags |= {"chunked_prefill_size": 2048, "cuda_graph_max_bs_decode": 8}
    whole = gib * 1024
    text = replace(target(), vision_layers=0)
    fraction = default_fraction(text, flags, gib * GIB)
    assert fraction == round((whole - reserved_mib) / whole, 3)
    tower = 0.95 * (1 - 0.1 * (27 * 1152**2 / (24 * 1024**2) - 1))
    assert default_fraction(target(), flags, gib * GIB) == pytest.approx(fraction * tower)


@pytest.mark.parametrize("rows", [1, 9, 48, 400])
def test_experts_that_are_all_held_twice(rows: int) -> None:
    """As if there were twice as many, of which a row takes as many."""
    wanted = 768 * (1 - (1 - 8 / 768) ** rows)
    assert held_experts(384, 8, rows, redundant=384) == pytest.approx(wanted)
    half = 192 * (1 - (1 - 8 / 384) ** rows) + 384 * (1 - (1 - 8 / 768) ** rows)
    assert held_experts(384, 8, rows, redundant=192) == pytest.approx(half)


# ------------------------------------------------------------------------------------- capacity


def test_a_reduction_over_two_nodes() -> None:
    """Within a node of 8, then each rank its eighth with the other node."""
    gpu = replace(RTX_PRO_6000, inside=Link(1e-5, 40e9, ""), between=Link(5e-5, 5e9, ""))
    size = 8e6
    inside = 1e-5 + 2 * 7 / 8 * size / 40e9
    between = 5e-5 + 2 * 1 / 2 * (size / 8) / 5e9
    assert all_reduce(kimi(gpu=gpu), size) == pytest.approx(inside)
    two = kimi(gpu=gpu, tp_size=16, nodes=2)
    assert all_reduce(two, size) == pytest.approx(inside + between)


def test_attention_is_bound_by_operations_where_they_are_slow() -> None:
    start = next(line.start for line in walks() if line.shared == 72)
    slow = attention_seconds(2, 9, 8, 10_000, 132, 1.0, 1e13, 1e12)
    assert slow == pytest.approx(start + 2 * 10_000 * 72 * 2 * (576 + 512) / 1e12)
    memory = attention_seconds(2, 9, 8, 10_000, 132, 1.0, 1e10, 1e18)
    assert memory == pytest.approx(start + 2 * 10_000 * 1152 / 1e10)


def test_attention_of_more_rows_than_were_measured_grows_with_them() -> None:
    last = walks()[-1]
    twice = attention_seconds(1, 2 * last.shared, 1, 65_536, 132, 1.0, 1e18, 1e18)
    walked = 65_536 / 16 / 132 * last.granule * 2
    assert twice == pytest.approx(last.start + walked)


def test_experts_of_an_even_router() -> None:
    """All of them read, at the rate of the SMs where memory is faster; then a row's operations."""
    gpu = replace(H200, dram=1e15, clock=H200.clock / 2)
    step = step_time(kimi(gpu=gpu), 128, 32, 1000)
    one = 3 * 7168 * 2048 / 8
    read = 384 * one * 0.5625 / (EXPERT_RATE_PER_SM * gpu.sms / 2)
    worked = 2 * one * 128 * 32 * 8 / (gpu.flops / 2)
    assert step.experts == pytest.approx(60 * (2 * EXPERT_LAYER_S + read + worked), rel=1e-6)
    whole = step_time(kimi(gpu=gpu, ep_size=8), 128, 32, 1000)
    assert whole.experts == pytest.approx(step.experts, rel=1e-6), "an eighth of them, eight wide"


def test_starts_go_by_the_clock() -> None:
    fast, slow = (replace(H200, clock=H200.clock * times) for times in (1.0, 0.5))
    draft = [step_time(kimi(gpu=gpu), 1, 8, 1000).draft for gpu in (fast, slow)]
    assert draft[1] - draft[0] == pytest.approx(6 * DRAFT_LAYER_S)
    dense = [step_time(kimi(gpu=gpu), 1, 8, 1000).dense for gpu in (fast, slow)]
    assert dense[1] - dense[0] == pytest.approx(61 * DENSE_LAYER_S)


def test_requests_are_spread_over_replicas() -> None:
    """Five on two replicas: the fuller one has three, and all five go at its pace."""
    ways = [Draft("plain", 1, 1.0)]
    found = estimate(kimi(), 2, 5, 1000, ways, 10**6)
    step = step_time(kimi(), 3, 1, 1000)
    assert found.step == step
    assert found.tokens_per_s == pytest.approx(5 / step.total)


def test_rows_of_trees_take_room_in_the_pool() -> None:
    """Twice a step's rows for each request, as the plan reckons."""
    ways = [Draft("tree-15", 16, 5.0)]
    assert estimate(kimi(), 1, 4, 1000, ways, 4 * (1000 + 32)).draft is not None
    assert estimate(kimi(), 1, 4, 1000, ways, 4 * (1000 + 32) - 1).draft is None


def test_expert_parallelism_of_a_deployment_reaches_the_model() -> None:
    document: dict[str, Any] = {
        "model": "/m/Kimi-K2.6",
        "tree": {"budget": 0},
        "resources": {"device": "cuda"},
        "engine": {"tp_size": 8, "mem_fraction_static": 0.94, "ep_size": 8},
    }
    for more in (0, 16):
        document["engine"]["ep_num_redundant_experts"] = more
        grid = make_grid(parse_spec(document), RTX_PRO_6000, (1,), (8,), (1000,))
        (row,) = grid.estimates
        wanted = step_time(kimi(drafter=None, ep_size=8, redundant=more), 8, 1, 1000)
        assert row.step == wanted
    assert wanted.experts > step_time(kimi(drafter=None, ep_size=8), 8, 1, 1000).experts
