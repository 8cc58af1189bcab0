"""Defragmentation as data: how scattered KV rows lie, and which of them to move. Pure, no Ray.

```
rank 0     --picture--> controller   who holds which slots, at a boundary
controller  plan_moves               a few moves, as many as one pass may make
controller --plan-----> all ranks    at a later boundary; the same plan, checked, on every rank
ranks       permutation              every slot number anywhere is looked up in one table
```

A plan names moves `source -> target`. What remains is closed to a permutation of all slots, so
nothing can be overwritten: whatever lies at a target that is no source moves to a slot that a
source has left. Thus a plan may be carried out some steps after its picture was taken. What was
freed meanwhile need not be copied, what was taken meanwhile moves out of the way; only the gain may
be another than expected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Slots: TypeAlias = NDArray[np.int64]

ROWS_PER_PASS = 1024
"""Rows that a pass may copy if nothing else is said."""

MOST_ROWS = 4096
"""Rows that any plan may name. With what makes way for them at most twice as many are copied, which
is what the kernel moves in one launch."""

LONG_RUN = 64
"""Rows worth moving to remove one break. Reckoned, not measured: to read and write so many rows of
70 KB, as large models have, takes a GPU as long as one more copy call, some microseconds."""

TRIES = 4
"""Sequences that are looked at for each move, worst first: bounds the time of planning."""

MIN_WINDOW = 16
"""Rows of the smallest window that is looked at for sorting."""


class PlanRefused(ValueError):
    """A plan that ranks do not carry out; nothing has moved."""


class StalePlan(PlanRefused):
    """A plan of another controller epoch."""


@dataclass(frozen=True, eq=False)
class SlotSequence:
    """Rows that are read one after the other.

    Attributes:
        name: a request's id, or a node of the prefix cache.
        slots: int64 slot of each position, in order. A request's rows include the prefix that it
            shares and the rows reserved for its next step; those of a node of the prefix cache
            begin with the last row of its parent.
        running: a request that runs, not only cached.
    """

    name: str
    slots: Slots
    running: bool = True

    @property
    def breaks(self) -> int:
        """Neighbours in the sequence that are none in the pool."""
        return int(np.count_nonzero(np.diff(self.slots) != 1))


@dataclass(frozen=True, eq=False)
class SlotPicture:
    """Who holds which slots at one boundary.

    Attributes:
        size: slots are numbered 1..size; slot 0 takes the writes of padded rows and never moves.
        sequences: all that is held, each slot in one of them at least.
        free: int64 slots that nobody holds, ascending.
        row_bytes: bytes of one row over all layers, target and drafter.
    """

    size: int
    sequences: tuple[SlotSequence, ...]
    free: Slots
    row_bytes: int = 0

    def renumbered(self, table: Slots) -> SlotPicture:
        """The picture after each slot `s` has become `table[s]`."""
        sequences = tuple(SlotSequence(s.name, table[s.slots], s.running) for s in self.sequences)
        return SlotPicture(self.size, sequences, np.sort(table[self.free]), self.row_bytes)


@dataclass(frozen=True)
class Fragmentation:
    """How scattered a pool is.

    Attributes:
        requests: running ones.
        rows: of running requests; a shared row counts for each that shares it.
        runs: of running requests: stretches of rows that lie side by side.
        worst_runs: of the request with the most.
        contiguous_share: neighbours in a running request that are neighbours in the pool, 0..1;
            1.0 without any pair.
        cached_breaks: as breaks in the prefix cache.
        free: free slots.
        free_runs: stretches of free slots.
        largest_free_run: slots of the longest stretch.
    """

    requests: int
    rows: int
    runs: int
    worst_runs: int
    contiguous_share: float
    cached_breaks: int
    free: int
    free_runs: int
    largest_free_run: int

    @property
    def runs_per_request(self) -> float:
        """Mean; 0.0 if nothing runs."""
        return self.runs / self.requests if self.requests else 0.0


@dataclass(frozen=True)
class Plan:
    """Moves of one pass.

    Attributes:
        epoch: of the controller that made it, at the replica that it is for.
        size: of the pool that it is for.
        sources: slots whose rows move.
        targets: where to, one for each source.
        before: of the picture that it was made from.
        after: expected.
    """

    epoch: int
    size: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    before: Fragmentation
    after: Fragmentation

    @property
    def rows(self) -> int:
        """Rows that move, had nothing changed since the picture."""
        return len(self.sources)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over epoch, size and moves: what every rank must report alike."""
        hashed = hashlib.blake2b(digest_size=8)
        hashed.update(np.array([self.epoch, self.size], dtype=np.int64).tobytes())
        hashed.update(np.array([self.sources, self.targets], dtype=np.int64).tobytes())
        return hashed.hexdigest()


def runs_of(slots: Slots) -> int:
    """Stretches in which each slot is the one before plus 1; 0 of nothing."""
    return 1 + int(np.count_nonzero(np.diff(slots) != 1)) if len(slots) else 0


def measure(picture: SlotPicture) -> Fragmentation:
    """How scattered the pool is."""
    running = [s for s in picture.sequences if s.running and len(s.slots)]
    runs = [1 + s.breaks for s in running]
    rows = sum(len(s.slots) for s in running)
    pairs = rows - len(running)
    cached = sum(s.breaks for s in picture.sequences if not s.running)
    edges = np.flatnonzero(np.diff(picture.free) != 1)
    bounds = np.concatenate(([0], edges + 1, [len(picture.free)]))
    return Fragmentation(
        requests=len(running),
        rows=rows,
        runs=sum(runs),
        worst_runs=max(runs, default=0),
        contiguous_share=1 - (sum(runs) - len(running)) / pairs if pairs else 1.0,
        cached_breaks=cached,
        free=len(picture.free),
        free_runs=runs_of(picture.free),
        largest_free_run=int(np.diff(bounds).max()),
    )


def plan_moves(
    picture: SlotPicture, epoch: int, row_limit: int = ROWS_PER_PASS, long_run: int = LONG_RUN
) -> Plan:
    """The moves of one pass, chosen greedily by breaks removed per row moved.

    A move sorts a window of slots by sequence and position, or brings a piece of a sequence
    together: into the free stretch that fits best, or around its longest run, in exchange with what
    lies there. It is taken only if, over all sequences, it removes more breaks than it makes, and
    one at least for each `long_run` rows that it moves. So a pass never makes the pool worse.

    Args:
        picture: the replica's, rank 0's.
        epoch: of the controller at that replica.
        row_limit: rows that may move.
        long_run: see above.

    Raises:
        ValueError: a limit below 1.
    """
    if row_limit < 1 or long_run < 1:
        raise ValueError(f"row_limit {row_limit} and long_run {long_run}: wanted at least 1")
    table = _Planner(picture, row_limit, long_run).table()
    held = np.ones(picture.size + 1, dtype=bool)
    held[picture.free] = held[0] = False
    sources, targets = rows_to_copy(table, held)
    return Plan(
        epoch,
        picture.size,
        tuple(sources.tolist()),
        tuple(targets.tolist()),
        measure(picture),
        measure(picture.renumbered(table)),
    )


def no_moves(picture: SlotPicture, epoch: int) -> Plan:
    """The plan that leaves everything where it is."""
    seen = measure(picture)
    return Plan(epoch, picture.size, (), (), seen, seen)


def check_plan(plan: Plan, epoch: int, size: int, row_limit: int) -> None:
    """Refuses a plan that does not fit.

    Args:
        plan: as it came.
        epoch: of the controller that steers the replica now.
        size: of the replica's pool.
        row_limit: rows that a pass may name.

    Raises:
        StalePlan: of another epoch.
        PlanRefused: any other fault, named.
    """
    if plan.epoch != epoch:
        raise StalePlan(f"the plan is of controller epoch {plan.epoch}, the replica is at {epoch}")
    if plan.size != size:
        raise PlanRefused(f"the plan is for {plan.size} slots, the replica has {size}")
    if len(plan.sources) != len(plan.targets):
        raise PlanRefused(f"{len(plan.sources)} sources but {len(plan.targets)} targets")
    if plan.rows > row_limit:
        raise PlanRefused(f"the plan moves {plan.rows} rows, a pass at most {row_limit}")
    for word, slots in (("source", plan.sources), ("target", plan.targets)):
        values, counts = np.unique(np.array(slots, dtype=np.int64), return_counts=True)
        if len(values) and (values[0] < 1 or values[-1] > size):
            wrong = values[0] if values[0] < 1 else values[-1]
            raise PlanRefused(f"{word} slot {wrong} is out of range: slots are 1..{size}")
        if np.any(counts > 1):
            raise PlanRefused(f"slot {values[counts > 1][0]} is used twice as a {word}")


def permutation(plan: Plan) -> Slots:
    """Where each slot's content goes: int64 [size + 1], a permutation that keeps slot 0.

    Targets that are no source exchange places, in ascending order, with sources that are no target.
    """
    sources = np.array(plan.sources, dtype=np.int64)
    targets = np.array(plan.targets, dtype=np.int64)
    table = np.arange(plan.size + 1, dtype=np.int64)
    table[sources] = targets
    table[np.setdiff1d(targets, sources)] = np.setdiff1d(sources, targets)
    return table


def rows_to_copy(table: Slots, held: NDArray[np.bool_]) -> tuple[Slots, Slots]:
    """Sources and targets of the rows that hold something and move.

    Args:
        table: as `permutation` gives it.
        held: bool [size + 1], by slot.
    """
    sources = np.flatnonzero(held & (table != np.arange(len(table))))
    return sources, table[sources]


Moves: TypeAlias = tuple[Slots, Slots]
"""Sources and targets: the same slots in two orders."""


def exchange(piece: Slots, start: int) -> Moves:
    """A piece of a sequence to the slots from `start` on, and what lies there to where it was."""
    window = np.arange(start, start + len(piece))
    sources = np.concatenate((piece, np.setdiff1d(window, piece)))
    targets = np.concatenate((window, np.setdiff1d(piece, window)))
    moving = sources != targets
    return sources[moving], targets[moving]


class _Planner:
    """Greedy search. Works on slot numbers as they would be after the moves chosen so far."""

    def __init__(self, picture: SlotPicture, row_limit: int, long_run: int) -> None:
        self._size = picture.size
        self._left = row_limit
        self._long_run = long_run
        self._table = np.arange(picture.size + 1, dtype=np.int64)
        self._scratch = self._table.copy()
        self._touched = np.zeros(picture.size + 1, dtype=bool)
        self._free = np.zeros(picture.size + 2, dtype=bool)
        self._free[picture.free] = True
        ranked = sorted(picture.sequences, key=lambda s: (not s.running, -s.breaks, s.name))
        self._rows = [s.slots for s in ranked]
        pairs = [(slots[:-1], slots[1:]) for slots in self._rows if len(slots) > 1]
        self._first = np.concatenate([a for a, _ in pairs]) if pairs else np.zeros(0, np.int64)
        self._second = np.concatenate([b for _, b in pairs]) if pairs else np.zeros(0, np.int64)
        # Rank of each slot's sequence and position in it; of the first one if several share it.
        self._place = np.full((2, picture.size + 1), len(ranked), dtype=np.int64)
        for rank in reversed(range(len(ranked))):
            self._place[0, self._rows[rank]] = rank
            self._place[1, self._rows[rank]] = np.arange(len(self._rows[rank]))

    def table(self) -> Slots:
        """Where each slot's content goes."""
        while self._left > 0:
            best: tuple[float, Moves] | None = None
            for moves in self._candidates():
                cost = int(np.count_nonzero(~self._free[moves[0]]))
                if 0 < cost <= self._left:
                    worth = self._gain(moves) / cost
                    if worth * self._long_run >= 1 and (best is None or worth > best[0]):
                        best = (worth, moves)
            if best is None:
                break
            self._take(best[1])
        return self._table

    def _candidates(self) -> Iterator[Moves]:
        """Windows with most breaks, sorted; the most scattered sequences, brought together."""
        rows = self._left
        while rows >= MIN_WINDOW:
            yield self._sorted_window(*self._worst_window(min(rows, self._size)))
            rows //= 2
        breaks = [int(np.count_nonzero(np.diff(slots) != 1)) for slots in self._rows]
        worst = sorted((i for i, n in enumerate(breaks) if n), key=lambda i: (-breaks[i], i))
        for number in worst[:TRIES]:
            yield from self._gathered(self._rows[number])

    def _worst_window(self, rows: int) -> tuple[int, int]:
        """First slot and length of the window in which most rows have their next one elsewhere."""
        broken = self._second != self._first + 1
        breaks = np.bincount(self._first[broken], minlength=self._size + 1)
        sums = np.concatenate(([0], np.cumsum(breaks)))
        return 1 + int(np.argmax(sums[rows + 1 :] - sums[1 : len(sums) - rows])), rows

    def _sorted_window(self, start: int, rows: int) -> Moves:
        """Everything in a window ordered by sequence and position, free slots last.

        The sequence that goes on from the slot before the window comes first.
        """
        window = np.arange(start, start + rows)
        rank, position = self._place[:, window]
        rank = np.where(rank == self._place[0, start - 1], -1, rank)
        order = np.lexsort((position, rank))
        moving = order != np.arange(rows)
        return window[order][moving], window[moving]

    def _gathered(self, slots: Slots) -> Iterator[Moves]:
        """Pieces of a sequence to a free stretch, or around the sequence's longest run."""
        edges = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1, [len(slots)]))
        longest = int(np.argmax(np.diff(edges)))
        begin, end = int(edges[longest]), int(edges[longest + 1])
        after = self._reach(edges, end, 1)
        before = self._reach(edges, begin, -1)
        spans = sorted({(0, len(slots)), (begin, after), (before, end), (0, after)})
        for first, last in spans:
            piece, start = slots[first:last], int(slots[begin]) - (begin - first)
            if start >= 1 and start + len(piece) - 1 <= self._size:
                yield exchange(piece, start)
            if len(piece) <= self._left and (fit := self._best_fit(len(piece))):
                yield exchange(piece, fit)

    def _reach(self, edges: Slots, start: int, way: int) -> int:
        """The farthest edge within what may still move (half of it, as others make way)."""
        reach = max(1, self._left // 2)
        if way > 0:
            within = edges[(edges > start) & (edges <= start + reach)]
            return int(within[-1]) if len(within) else min(start + reach, int(edges[-1]))
        within = edges[(edges < start) & (edges >= start - reach)]
        return int(within[0]) if len(within) else max(start - reach, 0)

    def _best_fit(self, rows: int) -> int:
        """First slot of the shortest free stretch with so many; 0 if there is none."""
        steps = np.flatnonzero(np.diff(self._free.astype(np.int8)))
        begins, ends = steps[::2] + 1, steps[1::2] + 1
        lengths = ends - begins
        fitting = np.flatnonzero(lengths >= rows)
        return int(begins[fitting[np.argmin(lengths[fitting])]]) if len(fitting) else 0

    def _gain(self, moves: Moves) -> int:
        """Breaks removed, over all sequences."""
        with self._swapped(moves) as table:
            touched = self._touched[self._first] | self._touched[self._second]
            first, second = self._first[touched], self._second[touched]
            now = np.count_nonzero(second != first + 1)
            return int(now - np.count_nonzero(table[second] != table[first] + 1))

    def _take(self, moves: Moves) -> None:
        sources, targets = moves
        self._left -= int(np.count_nonzero(~self._free[sources]))
        self._free[targets] = self._free[sources]
        self._place[:, targets] = self._place[:, sources]
        with self._swapped(moves) as table:
            self._table = table[self._table]
            self._first, self._second = table[self._first], table[self._second]
            self._rows = [table[slots] for slots in self._rows]

    @contextmanager
    def _swapped(self, moves: Moves) -> Iterator[Slots]:
        """The identity with these moves in it: one array for all, as a pool is large."""
        sources, targets = moves
        self._scratch[sources] = targets
        self._touched[sources] = True
        yield self._scratch
        self._scratch[sources] = sources
        self._touched[sources] = False
