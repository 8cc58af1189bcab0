"""What can go wrong between the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Collection


class CollectiveError(RuntimeError):
    """A communicator that did not come up, or is of no more use. Close it."""


class CollectivesUnavailable(CollectiveError):
    """This kind of communicator cannot be had in this process. Says why and what would help."""


class RankMissing(CollectiveError):
    """Not all ranks came in time.

    Attributes:
        ranks: those that did not, in order.
    """

    def __init__(self, name: str, ranks: Collection[int], waited_s: float) -> None:
        self.ranks = tuple(sorted(ranks))
        listed = ", ".join(map(str, self.ranks))
        plural = "ranks" if len(self.ranks) > 1 else "rank"
        super().__init__(f"communicator {name}: {plural} {listed} did not come in {waited_s:g} s")


class PeerLost(CollectiveError):
    """A rank ended, closed its communicator or was cut off.

    Attributes:
        rank: which one.
    """

    def __init__(self, name: str, rank: int, how: str) -> None:
        self.rank = rank
        super().__init__(f"communicator {name}: rank {rank} {how}")


class TransferTimeout(CollectiveError):
    """A transfer did not end in time; the peer may be stopped or busy."""
