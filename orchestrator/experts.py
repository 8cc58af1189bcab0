"""Where routed experts lie and how many of them a step touches. Pure.

The router is taken to choose evenly and each row by itself. Real rows of one tree resemble each
other and touch fewer; real experts are not equally popular, so real maxima are higher. Both are
measured, not planned.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from overstory.orchestrator.model_facts import TargetFacts

PLANNED_BATCHES = (1, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class ExpertLoad:
    """One step's experts in one layer.

    Attributes:
        batch: requests in the step.
        rows: target rows of all of them.
        touched: distinct routed experts that at least one row chose.
        rows_per_expert: rows that a touched expert works on.
        touched_by_busiest: held experts, copies among them, that the rank with most of them has
            to read (all of `touched` where every rank holds a slice of every expert).
        balance: mean over maximum of that, 1.0 where all ranks read the same.
    """

    batch: int
    rows: int
    touched: float
    rows_per_expert: float
    touched_by_busiest: float
    balance: float


@dataclass(frozen=True)
class HeldExperts:
    """What a group of ranks holds of each layer when it starts.

    Attributes:
        ranks: first and last rank.
        experts: numbers in order, as first and last of each stretch; copies come last.
    """

    ranks: tuple[int, int]
    experts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ExpertPlan:
    """Placement of one layer's routed experts over the ranks of a replica.

    Attributes:
        groups: `ep_size`: each group of ranks holds other experts.
        ranks_per_group: ranks among which each expert's width is cut.
        redundant: of a layer's experts, how many more are held for balance.
        experts_per_rank: whole or sliced experts that a rank holds, redundant ones among them.
        width_per_rank: intermediate width of an expert on a rank.
        held: by group.
    """

    groups: int
    ranks_per_group: int
    experts_per_rank: int
    width_per_rank: int
    redundant: int
    held: tuple[HeldExperts, ...]
    loads: tuple[ExpertLoad, ...]


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """Expected number of distinct experts out of `experts` if each row chooses `chosen` of them."""
    return experts * (1.0 - (1.0 - chosen / experts) ** rows)


def _highest_of(count: int) -> float:
    """Expected largest of `count` standard normal values (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def held_experts(experts: int, chosen: int, rows: int, redundant: int = 0) -> float:
    """Expected number of held experts, copies among them, that at least one row goes to.

    `redundant` experts have a second copy; each row that chooses one goes to either alike.
    """
    copied = min(redundant, experts)
    alone = distinct_experts(experts, chosen, rows) * (experts - copied) / experts
    return alone + 2 * copied * (1.0 - (1.0 - chosen / experts / 2) ** rows)


def busiest_group(experts: int, chosen: int, rows: int, groups: int, redundant: int = 0) -> float:
    """Expected held experts in the group of ranks that has most of them to read."""
    read = held_experts(experts, chosen, rows, redundant)
    if groups == 1:
        return read
    size = (experts + redundant) // groups
    share = read / (experts + redundant)
    deviation = math.sqrt(size * share * (1.0 - share))
    return min(float(size), size * share + _highest_of(groups) * deviation)


def expert_load(
    target: TargetFacts, batch: int, rows_per_request: int, ep_size: int = 1, redundant: int = 0
) -> ExpertLoad:
    """The load of a step of `batch` requests with `rows_per_request` rows each.

    `redundant` experts of a layer are held twice.
    """
    experts, chosen = target.routed_experts, target.experts_per_token
    rows = batch * rows_per_request
    touched = distinct_experts(experts, chosen, rows)
    busiest = busiest_group(experts, chosen, rows, ep_size, redundant)
    return ExpertLoad(
        batch=batch,
        rows=rows,
        touched=touched,
        rows_per_expert=rows * chosen / touched,
        touched_by_busiest=busiest,
        balance=held_experts(experts, chosen, rows, redundant) / ep_size / busiest,
    )


def placement(experts: int, redundant: int, groups: int, inner: int) -> tuple[HeldExperts, ...]:
    """Where experts lie before any balancing, as SGLang places them: in order, then copies of the
    first ones; ``inner`` neighbouring ranks share a group's."""
    size = (experts + redundant) // groups
    return tuple(
        HeldExperts(
            (group * inner, (group + 1) * inner - 1),
            tuple(_stretches(range(group * size, (group + 1) * size), experts)),
        )
        for group in range(groups)
    )


def _stretches(slots: range, experts: int) -> Iterator[tuple[int, int]]:
    """First and last expert of each stretch of slots that begins anew at expert 0."""
    first = slots.start
    while first < slots.stop:
        last = min(slots.stop, (first // experts + 1) * experts) - 1
        yield first % experts, last % experts
        first = last + 1


def plan_experts(
    target: TargetFacts, tp_size: int, ep_size: int, rows_per_request: int, redundant: int = 0
) -> ExpertPlan | None:
    """Placement and expected loads; None for a model without routed experts.

    Loads are those of an even router: there copies only add to what is read; what they are for,
    uneven popularity, is measured, not planned.
    """
    if not target.routed_experts or not target.experts_per_token:
        return None
    inner = tp_size // ep_size
    return ExpertPlan(
        groups=ep_size,
        ranks_per_group=inner,
        experts_per_rank=(target.routed_experts + redundant) // ep_size,
        width_per_rank=target.expert_width // inner,
        redundant=redundant,
        held=placement(target.routed_experts, redundant, ep_size, inner),
        loads=tuple(
            expert_load(target, batch, rows_per_request, ep_size, redundant)
            for batch in PLANNED_BATCHES
        ),
    )
