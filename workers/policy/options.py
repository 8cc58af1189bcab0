"""What the automatic policy chooses from. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from overstory.workers.tree_policy import TreePolicy

TIERS = (4, 8, 15, 31, 63)
"""Tree budgets in the choice set, as far as the engine has room; its full room is one too."""


@dataclass(frozen=True)
class Options:
    """Plain, the chain and some tree budgets, in this order.

    Trees are best-first, so a smaller one is the beginning of a larger one: the rows up to its own
    number of nodes. All sums over trees here depend on that.

    Attributes:
        policies: by option number.
        nodes: drafted nodes of each.
    """

    policies: tuple[TreePolicy, ...]
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, block_size: int, max_nodes: int) -> Options:
        """Options of an engine with room for ``max_nodes`` and a drafter of ``block_size``."""
        return cls._with(block_size, {*(n for n in TIERS if n < max_nodes), max_nodes})

    @classmethod
    def _with(cls, block_size: int, budgets: set[int]) -> Options:
        policies = (
            TreePolicy("plain"),
            TreePolicy("chain"),
            *(TreePolicy("tree", nodes) for nodes in sorted(budgets)),
        )
        return cls(policies, tuple(policy.drafted_nodes(block_size) for policy in policies))

    def grown(self, rows_run: Callable[[int], int]) -> Options:
        """These options where trees are grown until they fill the rows that a step has anyway.

        Args:
            rows_run: rows that a step has, root included, by the rows that are wanted.
        """
        block_size = 1 + self.nodes[CHAIN]
        return Options._with(block_size, {rows_run(1 + n) - 1 for n in self.nodes[FIRST_TREE:]})

    def __len__(self) -> int:
        return len(self.policies)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the policies, by option number."""
        return tuple(map(str, self.policies))

    @cached_property
    def bands(self) -> tuple[tuple[int, int], ...]:
        """(first, last) row that each tree has beyond the next smaller one, in order."""
        return tuple((low + 1, high) for low, high in pairwise((0, *self.nodes[FIRST_TREE:])))

    @property
    def rising(self) -> tuple[tuple[int, ...], ...]:
        """Orders of options in which a step cannot become cheaper."""
        return (PLAIN, CHAIN), (PLAIN, *range(FIRST_TREE, len(self)))

    def allowed(self, most: int | None) -> tuple[int, ...]:
        """Option numbers of at most ``most`` nodes; all of them without a bound."""
        return tuple(i for i, nodes in enumerate(self.nodes) if most is None or nodes <= most)


PLAIN = 0
CHAIN = 1
FIRST_TREE = 2
