"""Where ranks go: a pure function of what they need and what nodes offer."""

from collections.abc import Sequence
from dataclasses import dataclass

from overstory.orchestrator.inventory import NodeInventory
from overstory.orchestrator.model_facts import PlanError


class NoRoom(PlanError):
    """The nodes have not what the ranks need."""


@dataclass(frozen=True)
class RankNeeds:
    """What one rank reserves. Memory in bytes of the node, not of its GPU."""

    cpus: float
    gpus: float
    memory: float = 0.0


@dataclass(frozen=True)
class NodeShare:
    """Ranks of one replica on one node; each share is one placement group bundle."""

    node: str
    ranks: tuple[int, ...]


@dataclass
class _Free:
    node: NodeInventory
    cpus: float
    gpus: float
    memory: float

    def fits(self, needs: RankNeeds) -> int:
        """How many such ranks still fit here."""
        rooms = [10**9]
        pairs = ((self.cpus, needs.cpus), (self.gpus, needs.gpus), (self.memory, needs.memory))
        for free, need in pairs:
            if need > 0:
                rooms.append(int(free / need + 1e-9))
        return min(rooms)

    def take(self, needs: RankNeeds, count: int) -> None:
        self.cpus -= needs.cpus * count
        self.gpus -= needs.gpus * count
        self.memory -= needs.memory * count


def _place_replica(
    free: Sequence[_Free], needs: RankNeeds, tp_size: int, parts: int
) -> list[NodeShare] | None:
    """One replica on `parts` nodes, the tightest that fit; None if there are not so many."""
    count = tp_size // parts
    fitting = sorted(
        (room for room in free if room.fits(needs) >= count), key=lambda room: room.fits(needs)
    )
    if len(fitting) < parts:
        return None
    shares = []
    for number, room in enumerate(fitting[:parts]):
        room.take(needs, count)
        first = number * count
        shares.append(NodeShare(room.node.name, tuple(range(first, first + count))))
    return shares


def _place_all(
    nodes: Sequence[NodeInventory], needs: RankNeeds, replicas: int, tp_size: int, parts: int
) -> list[list[NodeShare]] | None:
    free = [_Free(n, n.cpus, n.gpus, n.memory) for n in nodes]
    placed = []
    for _ in range(replicas):
        shares = _place_replica(free, needs, tp_size, parts)
        if shares is None:
            return None
        placed.append(shares)
    return placed


def _shortage(nodes: Sequence[NodeInventory], needs: RankNeeds, replicas: int, tp_size: int) -> str:
    ranks = replicas * tp_size
    rows = (
        ("CPUs", needs.cpus, [n.cpus for n in nodes], "resources.cpus_per_rank"),
        ("GPUs", needs.gpus, [n.gpus for n in nodes], "resources.gpus_per_rank"),
    )
    for what, need, offers, key in rows:
        if need * ranks > sum(offers) + 1e-9:
            listed = ", ".join(f"{n.name} {o:g}" for n, o in zip(nodes, offers, strict=True))
            return (
                f"engine.tp_size: {ranks} ranks (replicas {replicas} x tp_size {tp_size}) need "
                f"{need * ranks:g} {what} ({key} {need:g}), the nodes have {sum(offers):g} free "
                f"({listed}); lower engine.tp_size, replicas or {key}, or add nodes"
            )
    free = ", ".join(
        f"{n.name}: {n.cpus:g} CPUs, {n.gpus:g} GPUs, {n.memory / 2**30:.1f} GiB" for n in nodes
    )
    return (
        f"engine.tp_size: no way to place replicas {replicas} x tp_size {tp_size} in equal parts: "
        f"a rank needs {needs.cpus:g} CPUs, {needs.gpus:g} GPUs and {needs.memory / 2**30:.1f} GiB "
        f"of memory; free are {free}; lower engine.tp_size or replicas, or add nodes"
    )


def place(
    nodes: Sequence[NodeInventory], needs: RankNeeds, replicas: int, tp_size: int
) -> list[list[NodeShare]]:
    """For each replica its shares, rank 0's first; ranks are numbered along the shares.

    Replicas stay on one node each where all of them can; else each is cut into the same number of
    equal parts (Serve gives all replicas placement groups of one shape), as few as possible.

    Raises:
        NoRoom: not enough CPUs, GPUs or memory, with every number in it.
    """
    for parts in (p for p in range(1, len(nodes) + 1) if tp_size % p == 0):
        placed = _place_all(nodes, needs, replicas, tp_size, parts)
        if placed is not None:
            return placed
    raise NoRoom(_shortage(nodes, needs, replicas, tp_size))
