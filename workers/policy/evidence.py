"""What drafts were worth lately: rank 0's own, decaying counts. Pure.

Three views of the same walks, for greedy and sampled requests apart:

- *bands*: accepted rows by their place in the best-first order. A smaller tree is the beginning of
  a larger one, so the accepted rows up to place N are what a tree of N nodes would have given in
  that very step: exact, for all budgets at once, whatever the drafter believed of itself. The first
  band counts what it gave beyond the chain in that step: the luck of a step is in both, and trees
  that are tried now and then while the chain runs are compared to it without.
- *spine*: by depth, how often the drafter's first candidate is right once all before it were. The
  chain's expected length is the sum of the products of these.
- *candidates*: by depth and rank, below a spine node and below others apart, for reports.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from overstory.workers.policy.beliefs import ONE
from overstory.workers.policy.options import CHAIN, FIRST_TREE, Options

MEMORY = 256
"""Observations that a rate remembers: the weight of one falls to 1/e after that many newer ones."""

FADE_STEPS = 20_000
"""Steps after which an observation's weight falls to 1/e, newer ones or not: a probe that is old
says little about today's requests. Not sooner: where steps are short few are counted, and what a
few walks say of a tree is off by more than trees differ by."""

WANTED = 32
"""Observations before a rate counts as known."""


class Share:
    """A decaying mean of observations: sum and number of them fade alike."""

    def __init__(self) -> None:
        self.total = 0.0
        self.weight = 0.0
        self.seen = 0
        self._step = 0

    def add(self, value: float, step: int = 0) -> None:
        """One observation, made after so many steps in all."""
        kept = 1.0 - 1.0 / MEMORY
        if step != self._step:
            kept *= math.exp((self._step - step) / FADE_STEPS)
            self._step = step
        self.total = self.total * kept + value
        self.weight = self.weight * kept + 1.0
        self.seen += 1

    @property
    def mean(self) -> float:
        """Mean of the observations, 0 before the first."""
        return self.total / self.weight if self.weight > 0 else 0.0


@dataclass(frozen=True)
class Walk:
    """One request's tree in one step, and how far the target went along it.

    Attributes:
        parents, ranks: of the rows, as in `Tree`, root and padding included.
        path: rows of the accepted path without the root.
        size: rows in use, root included.
        chain: whether the tree is the chain and its rows have no place in a best-first order.
    """

    parents: Sequence[int]
    ranks: Sequence[int]
    path: Sequence[int]
    size: int
    chain: bool


@dataclass
class KindEvidence:
    """Counts of one kind of requests."""

    options: Options
    bands: list[Share] = field(init=False)
    spine: list[Share] = field(default_factory=list)
    candidates: dict[tuple[bool, int, int], Share] = field(default_factory=dict)

    _step: int = 0

    def __post_init__(self) -> None:
        self.bands = [Share() for _ in self.options.bands]
        self._lasts = [last for _, last in self.options.bands]

    def add(self, walk: Walk) -> None:
        """One request's step."""
        depth_of = {0: 0} | {row: depth + 1 for depth, row in enumerate(walk.path)}
        spine_until = self._spine_length(walk)
        refused = False
        for row, parent in enumerate(walk.parents[: walk.size]):
            above = depth_of.get(parent)
            if above is None:  # its parent was not reached: nothing is known of it
                continue
            on_spine, rank = above <= spine_until, walk.ranks[row]
            key = (on_spine, above + 1, rank)
            accepted = float(row in depth_of)
            share = self.candidates.get(key)
            if share is None:
                share = self.candidates[key] = Share()
            share.add(accepted, self._step)
            if on_spine and rank == 0:
                while len(self.spine) <= above:
                    self.spine.append(Share())
                self.spine[above].add(accepted, self._step)
                refused |= not accepted
        if not walk.chain:
            beyond = 0.0 if refused else self._chain_length(len(self.spine), spine_until)
            self._add_places(walk, spine_until + beyond)

    def tokens(self) -> list[int]:
        """Thousandths of a token expected per step under each option, the bonus included."""
        chain = self._chain_length(len(self.spine))
        expected = [ONE, ONE + round(ONE * chain)]
        gained = chain
        for band, (_, last) in zip(self.bands, self.options.bands, strict=True):
            if band.seen:
                gained = max(0.0, gained + band.mean)
            else:  # a tree that was never tried gives at least about what its spine would
                spine = self._chain_length(last)
                gained = spine if len(expected) == FIRST_TREE else max(gained, spine)
            expected.append(ONE + round(ONE * gained))
        assert len(expected) == len(self.options)
        return expected

    def known(self) -> bool:
        """Whether there were enough observations to choose by."""
        return self.seen() >= WANTED

    def seen(self) -> int:
        """Drafts observed, of any size."""
        return self.spine[0].seen if self.spine else 0

    def pass_steps(self, steps: int) -> None:
        """So many steps went by."""
        self._step += steps

    def _add_places(self, walk: Walk, chain: float) -> None:
        """``chain``: rows that the chain has accepted in this step, as far as is known or to be
        expected."""
        accepted = [0.0] * len(self.bands)
        accepted[0] = -chain
        for row in walk.path:
            accepted[bisect_left(self._lasts, row)] += 1
        for (first, _), share, rows in zip(self.options.bands, self.bands, accepted, strict=True):
            if walk.size - 1 < first:
                break
            share.add(rows, self._step)

    def _chain_length(self, nodes: int, after: int = 0) -> float:
        """Expected accepted nodes of a chain of ``nodes`` beyond the first ``after``, which are
        accepted."""
        length, reached = 0.0, 1.0
        for share in self.spine[after:nodes]:
            reached *= share.mean
            length += reached
        return length

    @staticmethod
    def _spine_length(walk: Walk) -> int:
        for depth, row in enumerate(walk.path):
            if walk.ranks[row] != 0:
                return depth
        return len(walk.path)

    def report(self) -> dict[str, Any]:
        """For status: accepted shares by depth and by candidate, JSON-able.

        `spine`: by depth; `candidates`: ``spine`` (parent on it) and ``off_spine``, each
        {depth: {rank: share}}; `tokens`: by option name.
        """
        candidates: dict[str, dict[int, dict[int, float]]] = {"spine": {}, "off_spine": {}}
        for (on_spine, depth, rank), share in sorted(self.candidates.items(), key=_by_place):
            place = candidates["spine" if on_spine else "off_spine"].setdefault(depth, {})
            place[rank] = round(share.mean, 4)
        return {
            "seen": self.seen(),
            "spine": [round(share.mean, 4) for share in self.spine],
            "candidates": candidates,
            "tokens": {
                name: value / ONE
                for name, value in zip(self.options.names, self.tokens(), strict=True)
            },
        }


def _by_place(item: tuple[tuple[bool, int, int], Share]) -> tuple[bool, int, int]:
    return item[0]


assert CHAIN + 1 == FIRST_TREE, "KindEvidence.tokens lists plain, the chain, then the trees"
