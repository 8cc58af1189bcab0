"""Compares the digest chains of a replica's ranks as their reports come in. Pure.

Reports of different ranks are never taken at the same moment, so links wait until every rank has
reported their number; links compared are dropped. A rank keeps its latest links only, so comparing
starts (or starts again, after a long silence) where all ranks still have theirs: what is skipped is
no difference, and a difference within it shows in the next link, which covers all before it.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from overstory.workers.digest import LinksKept

Link = tuple[int, str]


@dataclass(frozen=True)
class Difference:
    """The first link at which ranks differ.

    Attributes:
        forward: its number: that of the last forward it covers.
        rank: the rank to blame: alone against a majority, else the higher one.
        other: a rank that differs from it.
    """

    forward: int
    rank: int
    other: int


class DigestComparison:
    """Links of one replica's ranks that wait for comparison.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        assert ranks >= 1
        self._waiting: list[deque[Link]] = [deque() for _ in range(ranks)]
        self._heard = [0] * ranks
        self._compared = 0
        self._skipped = 0

    @property
    def compared(self) -> int:
        """Number of the last forward found equal on all ranks."""
        return self._compared

    def heard(self, rank: int) -> int:
        """Number of the last link that `rank` has reported."""
        return self._heard[rank]

    def add(self, rank: int, kept: LinksKept) -> None:
        """Takes in a rank's links, in its order; those known already are skipped."""
        if kept.forgotten > self._heard[rank]:  # Links of it may be missing up to there.
            self._skipped = max(self._skipped, kept.forgotten)
        for forward, link in kept.links:
            if forward > self._heard[rank]:
                self._waiting[rank].append((forward, link))
                self._heard[rank] = forward

    def compare(self) -> Difference | None:
        """Compares what all ranks have reported; the first difference, or None."""
        for waiting in self._waiting:
            while waiting and waiting[0][0] <= self._skipped:
                waiting.popleft()
        while all(self._waiting):
            heads = [waiting[0] for waiting in self._waiting]
            if len(set(heads)) > 1:
                return _blame(heads)
            for waiting in self._waiting:
                waiting.popleft()
            self._compared = heads[0][0]
        return None


def _blame(heads: list[Link]) -> Difference:
    """The odd one out; of two, the higher rank (rank 0 takes the decisions)."""
    (common, count), *_ = Counter(heads).most_common(1)
    if count == 1:
        common = heads[0]
    rank = max(index for index, head in enumerate(heads) if head != common)
    other = heads.index(common)
    return Difference(min(head[0] for head in heads), rank, other)
