"""A made-up target and drafter with known costs, to run the whole policy against."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from overstory.kernels.reference import Tree, chain_tree, tree_build
from overstory.workers import tree_policy
from overstory.workers.policy.choice import Decision, Shape, decide
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.evidence import Walk
from overstory.workers.policy.options import CHAIN, PLAIN, Options
from overstory.workers.policy.steering import Steering
from overstory.workers.tree_policy import parse_policy

DEPTH, WIDTH = 7, 8
OPTIONS = Options.of(DEPTH + 1, 31)
NUMBERS = tuple(range(len(OPTIONS)))
SYNC = 16
#        plain chain  4     8     15    31
COSTS = (10000, 22000, 21000, 22500, 25000, 32000)
MOODS = (0.35, 0.6, 0.9)
"""How sure the drafter is of its best candidate, step by step."""


@contextmanager
def automatic_policy(nodes: int = 31) -> Iterator[None]:
    """The process chooses its policy by itself, with trees of at most so many nodes."""
    before = tree_policy.HOLDER
    tree_policy.HOLDER = tree_policy.PolicyHolder()
    tree_policy.HOLDER.start(parse_policy("auto"), DEPTH + 1, nodes, automatic=True)
    yield
    tree_policy.HOLDER = before


def table_of(costs: tuple[int, ...] = COSTS) -> CostTable:
    """Costs that depend on the option and hardly on the batch."""
    batches, contexts = (1, 16), (256,)
    cells = {(o, b, 0): cost + 100 * b for o, cost in enumerate(costs) for b in range(2)}
    return CostTable.measured(OPTIONS.names, batches, contexts, cells)


def chances(mood: float) -> list[float]:
    """Probability of each rank being the target's token, as the drafter sees it."""
    return [mood] + [(1 - mood) * 0.6**rank * 0.4 / 0.97 for rank in range(WIDTH - 1)]


@functools.cache
def tree_of(option: int, mood: float) -> Tree:
    """The tree that the drafter makes under an option; its tokens are (depth, rank) in one."""
    root = torch.zeros(1, dtype=torch.int64)
    tokens = torch.arange(1, 1 + DEPTH * WIDTH).view(1, DEPTH, WIDTH)
    if option == CHAIN:
        return chain_tree(root, tokens[:, :, 0])
    logprobs = torch.tensor(chances(mood)).log().expand(1, DEPTH, WIDTH).contiguous()
    return tree_build(root, logprobs, tokens, OPTIONS.nodes[option])


@dataclass
class World:
    """Steps of one request at a time.

    Attributes:
        quality: share of the drafter's chances that are true; 0 is a drafter of another model.
        truth: by option, what a step takes, in times of what the table says.
        beside: of a host that works beside the device, what a step takes where the table says so
            much; the policy then sees periods.
    """

    quality: float
    dice: random.Random
    microseconds: int = 0
    tokens: int = 0
    truth: tuple[float, ...] = (1.0,) * len(OPTIONS)
    beside: Callable[[int], int] | None = None
    used: dict[str, int] = field(default_factory=dict)

    def walk(self, option: int) -> Walk | None:
        """One step under ``option``; counts its tokens. None for plain."""
        if option == PLAIN:
            self.tokens += 1
            return None
        mood = self.dice.choice(MOODS)
        tree = tree_of(option, mood)
        parents, ranks = tree.parents[0].tolist(), tree.ranks[0].tolist()
        path, at = [], 0
        for _ in range(DEPTH):
            rank = self._true_rank(mood)
            child = next(
                (r for r in range(1, tree.rows) if parents[r] == at and ranks[r] == rank), None
            )
            if child is None:
                break
            path.append(child)
            at = child
        self.tokens += len(path) + 1
        return Walk(parents, ranks, path, int(tree.sizes[0]), option == CHAIN)

    def _true_rank(self, mood: float) -> int:
        if self.dice.random() >= self.quality:
            return WIDTH
        return self.dice.choices(range(WIDTH), chances(mood))[0]


def run(
    steering: Steering, world: World, table: CostTable, steps: int, kind: int, before: int = PLAIN
) -> list[Decision]:
    """The policy's decisions over ``steps`` steps of one request, as `StepChooser` makes them."""
    shape = Shape(tuple(int(k == kind) for k in range(2)), 0, 256, bool(kind))
    decisions: list[Decision] = []
    beliefs, since = None, SYNC
    for _ in range(steps):
        since += 1
        if beliefs is None or since >= SYNC * beliefs.holds:
            beliefs, since = steering.next_beliefs(since, shape, NUMBERS, before, SYNC), 0
        decision = decide(table, beliefs, shape, NUMBERS, before, since)
        if decision.why == "best":
            before = decision.option
        decisions.append(decision)
        expected = table.cost(decision.option, 1, 256)
        took = round(expected * world.truth[decision.option])
        if world.beside is None:
            steering.observe_step(decision.option, expected, took)
        else:
            took = world.beside(expected)
            if [d.option for d in decisions[-2:]] == [decision.option] * 2:
                steering.observe_periods(decision.option, shape, [took])
        world.microseconds += took
        walk = world.walk(decision.option)
        if walk is not None:
            steering.observe(kind, walk)
        name = OPTIONS.names[decision.option]
        world.used[name] = world.used.get(name, 0) + 1
    return decisions


def fixed_rate(
    option: int,
    quality: float,
    table: CostTable,
    seed: int,
    steps: int,
    beside: Callable[[int], int] = lambda cost: cost,
) -> float:
    """Tokens per microsecond of one option all the time."""
    world = World(quality, random.Random(seed))
    for _ in range(steps):
        world.walk(option)
    return world.tokens / (steps * beside(table.cost(option, 1, 256)))
