"""Experts that a step touches: closed forms against drawing them."""

import random

import pytest

from overstory.orchestrator.experts import (
    busiest_group,
    distinct_experts,
    expert_load,
    placement,
    plan_experts,
)
from overstory.orchestrator.known_models import known_model
from overstory.orchestrator.model_facts import TargetFacts, target_from_config

EXPERTS, CHOSEN = 384, 8


@pytest.fixture(scope="module")
def kimi() -> TargetFacts:
    model = known_model("Kimi-K2.6")
    assert model is not None
    return target_from_config("Kimi-K2.6", model.config)


def draw(rows: int, groups: int, times: int = 100) -> tuple[float, float]:
    """Mean number of distinct experts, and of those in the group with most, by drawing."""
    source, size = random.Random(7), EXPERTS // groups
    total = most = 0
    for _ in range(times):
        touched = {e for _ in range(rows) for e in source.sample(range(EXPERTS), CHOSEN)}
        total += len(touched)
        most += max(sum(e // size == g for e in touched) for g in range(groups))
    return total / times, most / times


@pytest.mark.parametrize(("redundant", "groups"), [(0, 1), (0, 8), (16, 8), (16, 16), (800, 4)])
def test_each_slot_holds_what_sglang_puts_there(redundant: int, groups: int) -> None:
    """Slot i holds expert i, and those beyond begin again at the first one."""
    slots = [i % EXPERTS for i in range(EXPERTS + redundant)]
    held = placement(EXPERTS, redundant, groups, 2)
    lying = [e for g in held for first, last in g.experts for e in range(first, last + 1)]
    assert lying == slots
    assert {sum(b - a + 1 for a, b in g.experts) for g in held} == {len(slots) // groups}
    assert [g.ranks for g in held] == [(2 * g, 2 * g + 1) for g in range(groups)]


@pytest.mark.parametrize("rows", [1, 9, 33, 128])
def test_distinct_experts_as_drawn(rows: int) -> None:
    drawn, _ = draw(rows, 1)
    assert distinct_experts(EXPERTS, CHOSEN, rows) == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize(("rows", "groups"), [(9, 8), (33, 8), (128, 8), (33, 16)])
def test_busiest_group_as_drawn(rows: int, groups: int) -> None:
    _, drawn = draw(rows, groups)
    assert busiest_group(EXPERTS, CHOSEN, rows, groups) == pytest.approx(drawn, rel=0.05)


def draw_copies(rows: int, groups: int, copies: int, times: int = 100) -> float:
    """Mean of the held experts that the group with most of them reads. The first experts have a
    copy, as SGLang lays them out to begin with; a row goes to either."""
    source, held = random.Random(7), EXPERTS + copies
    most = 0
    for _ in range(times):
        read = set()
        for _ in range(rows):
            for expert in source.sample(range(EXPERTS), CHOSEN):
                twice = expert < copies and source.random() < 0.5
                read.add(expert + EXPERTS if twice else expert)
        most += max(sum(e * groups // held == g for e in read) for g in range(groups))
    return most / times


@pytest.mark.parametrize("rows", [9, 33, 128, 512])
def test_copies_of_experts_are_read_too(rows: int, kimi: TargetFacts) -> None:
    load = expert_load(kimi, rows, 1, ep_size=8, redundant=16)
    assert load.touched_by_busiest == pytest.approx(draw_copies(rows, 8, 16), rel=0.05)
    assert load.touched == pytest.approx(distinct_experts(EXPERTS, CHOSEN, rows))
    assert load.balance <= 1.0


def test_with_many_rows_a_rank_reads_all_that_it_holds(kimi: TargetFacts) -> None:
    plan = plan_experts(kimi, 8, 8, 32, redundant=16)
    assert plan is not None
    assert plan.experts_per_rank == 50
    assert plan.loads[-1].touched_by_busiest == pytest.approx(50, rel=1e-6)


def test_one_row_touches_what_it_chooses() -> None:
    assert distinct_experts(EXPERTS, CHOSEN, 1) == pytest.approx(CHOSEN)


def test_slices_of_all_experts_are_always_in_balance(kimi: TargetFacts) -> None:
    assert expert_load(kimi, 8, 32).balance == 1.0


def test_whole_experts_balance_better_with_more_rows(kimi: TargetFacts) -> None:
    balances = [expert_load(kimi, batch, 9, ep_size=8).balance for batch in (1, 8, 64)]
    assert balances == sorted(balances)
    assert balances[0] < 0.7 < 0.95 < balances[-1] <= 1.0


def test_placement_of_experts(kimi: TargetFacts) -> None:
    sliced = plan_experts(kimi, 8, 1, 32)
    assert sliced is not None
    assert (sliced.experts_per_rank, sliced.width_per_rank) == (384, 256)
    whole = plan_experts(kimi, 8, 8, 32)
    assert whole is not None
    assert (whole.experts_per_rank, whole.width_per_rank) == (48, 2048)


def test_rows_are_shared_out(kimi: TargetFacts) -> None:
    load = expert_load(kimi, 4, 9)
    assert load.rows == 36
    assert load.touched * load.rows_per_expert == pytest.approx(36 * CHOSEN)
