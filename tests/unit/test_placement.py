"""What a placed replica takes is gone for the next one; what does not fit is told in numbers."""

import pytest

from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.memory import RankMemory
from overstory.orchestrator.memory_faults import _weights_fault, gpu_warnings
from overstory.orchestrator.model_facts import PlanError
from overstory.orchestrator.placement import RankNeeds, place
from overstory.orchestrator.spec import parse_spec

GIB = 2**30
NEEDS = RankNeeds(cpus=2.0, gpus=1.0, memory=3.0 * GIB)


def node(name: str, cpus: float = 8, gpus: float = 4, memory_gib: float = 12) -> NodeInventory:
    """Room for two replicas of two ranks, no more."""
    return NodeInventory(name, cpus, gpus, memory_gib * GIB)


def test_two_replicas_fill_a_node() -> None:
    placed = place([node("a"), node("b")], NEEDS, 3, 2)
    assert [[share.node for share in shares] for shares in placed] == [["a"], ["a"], ["b"]]


@pytest.mark.parametrize("less", [{"cpus": 7}, {"gpus": 3}, {"memory_gib": 11}])
def test_what_the_first_took_the_second_cannot_have(less: dict[str, float]) -> None:
    assert len(place([node("a", **less)], NEEDS, 1, 2)) == 1
    placed = place([node("a", **less), node("b")], NEEDS, 3, 2)
    assert sorted(shares[0].node for shares in placed) == ["a", "b", "b"]
    with pytest.raises(PlanError):
        place([node("a", **less)], NEEDS, 2, 2)


def test_pieces_that_are_too_small_are_told_in_numbers() -> None:
    small = [node(name, cpus=4, gpus=2, memory_gib=1.5) for name in "ab"]
    with pytest.raises(PlanError) as refused:
        place(small, NEEDS, 1, 4)
    assert "a rank needs 2 CPUs, 1 GPUs and 3.0 GiB of memory" in str(refused.value)
    assert "free are a: 4 CPUs, 2 GPUs, 1.5 GiB, b: 4 CPUs, 2 GPUs, 1.5 GiB" in str(refused.value)


def memory(spare_gib: float = 0.0) -> RankMemory:
    """40 GiB of weights and CUDA's own, 3 GiB beside the pool."""
    return RankMemory(
        target_weights=30 * GIB,
        drafter_weights=8 * GIB,
        kv_bytes_per_token=1000.0,
        kv_tokens=1000,
        request_table=0.5 * GIB,
        process=2 * GIB,
        graphs=1.5 * GIB,
        workspace=1 * GIB,
        spare=spare_gib * GIB,
    )


def test_weights_are_the_target_s_the_drafter_s_and_cuda_s_own() -> None:
    spec = parse_spec({"model": "m", "tree": {"budget": 0}})
    assert _weights_fault(spec, memory(), 40 * GIB) is None
    said = _weights_fault(spec, memory(), 39.5 * GIB)
    assert said is not None
    assert "take 40.0 GiB, its GPU share has 39.5 GiB; raise engine.tp_size (now 1)" in said


def test_what_lies_beside_the_pool_is_warned_of_where_it_has_no_room() -> None:
    assert gpu_warnings(memory(spare_gib=0.0)) == [], "the GPU's size is unknown"
    assert gpu_warnings(memory(spare_gib=3.0)) == []
    (said,) = gpu_warnings(memory(spare_gib=2.5))
    assert "are estimated at 3.0 GiB, it leaves 2.5 GiB; lower it" in said
