"""What the automatic budget takes at each measured point, and what the best fixed one is. Pure.

Costs are measured; how many tokens a step yields is not (the drafter's weights are made up): it
comes from published means of this drafter and from the assumed gains of trees
(`overstory.orchestrator.capacity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from slice_points import CHAIN_ROWS, POLICIES

from overstory.orchestrator.capacity import TREE_GAIN
from overstory.workers.policy.beliefs import KINDS, ONE, Beliefs
from overstory.workers.policy.choice import Shape, choose, places_of
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.options import PLAIN

ROWS = tuple(sorted(POLICIES))
"""Rows by option number: plain, chain, then trees, as `overstory.workers.policy.options` has it."""
CHAIN_MEANS = (2.0, 3.7, 4.5, 5.5)
"""Tokens a chain's step yields: a drafter that fits badly, then published for this one on MT-Bench,
MBPP and Math500."""


def tokens_of(chain_tokens: float) -> dict[int, float]:
    """Tokens that a step is expected to yield, by rows.

    A tree's gain over the chain is linear in its nodes between the assumed ones.
    """
    knots = [(CHAIN_ROWS - 1, 1.0), *sorted(TREE_GAIN.items())]
    return {
        rows: 1.0
        if rows == 1
        else chain_tokens
        if rows == CHAIN_ROWS
        else chain_tokens * _on_line(knots, rows - 1)
        for rows in ROWS
    }


def _on_line(knots: list[tuple[int, float]], at: int) -> float:
    """Value at ``at`` on the line through the knots around it, or through the last two."""
    lines = list(pairwise(knots))
    (x0, y0), (x1, y1) = next((line for line in lines if at <= line[1][0]), lines[-1])
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True)
class Verdict:
    """One point. ``best`` is the fixed policy with most tokens per second, ``chosen`` what the
    automatic one takes; ``ratio`` is its tokens per second over those of the best."""

    batch: int
    context: int
    chain_tokens: float
    best: str
    chosen: str
    ratio: float
    in_table: bool


def judge(
    points: Iterable[Mapping[str, Any]], chain_tokens: float, without: frozenset[int] = frozenset()
) -> list[Verdict]:
    """The choice at every point of which all rows were measured with our backend.

    Args:
        points: as `rank_slice.py` writes them.
        chain_tokens: what a chain's step yields.
        without: contexts that the cost table does not hold, so that it has to interpolate there.
    """
    cost = costs_of(points)
    cells = sorted({cell for cell in cost if all(row in cost[cell] for row in ROWS)})
    batches = sorted({b for b, _ in cells})
    contexts = sorted(
        {c for _, c in cells if c not in without and all((b, c) in cells for b in batches)}
    )
    table = CostTable.measured(
        [POLICIES[rows] for rows in ROWS],
        batches,
        contexts,
        {
            (o, i, j): round(cost[b, c][rows])
            for o, rows in enumerate(ROWS)
            for i, b in enumerate(batches)
            for j, c in enumerate(contexts)
        },
    )
    tokens = tokens_of(chain_tokens)
    return [
        _verdict(table, cost[cell], tokens, chain_tokens, cell, cell[1] in contexts)
        for cell in cells
    ]


def costs_of(points: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], dict[int, float]]:
    """Microseconds of a step by (batch, context) and rows, of our backend."""
    cost: dict[tuple[int, int], dict[int, float]] = {}
    for point in points:
        if point["backend"] == "overstory":
            at = cost.setdefault((point["batch"], point["context"]), {})
            at[point["rows"]] = float(point["step_us"])
    return cost


def _verdict(
    table: CostTable,
    cost: Mapping[int, float],
    tokens: Mapping[int, float],
    chain_tokens: float,
    cell: tuple[int, int],
    in_table: bool,
) -> Verdict:
    batch, context = cell
    given = tuple(round(ONE * tokens[rows]) for rows in ROWS)
    blank = Beliefs.none(len(ROWS), places_of(table))
    beliefs = Beliefs(1, (given,) * KINDS, (1,) * KINDS, blank.overhead_us, blank.factors)
    shape = Shape(drafting=(batch, 0), plain=0, context=context)
    chosen = choose(table, beliefs, shape, tuple(range(len(ROWS))), PLAIN)
    rate = {rows: tokens[rows] / cost[rows] for rows in ROWS}
    best = max(ROWS, key=lambda rows: rate[rows])
    ratio = rate[ROWS[chosen]] / rate[best]
    return Verdict(
        batch, context, chain_tokens, POLICIES[best], POLICIES[ROWS[chosen]], ratio, in_table
    )
