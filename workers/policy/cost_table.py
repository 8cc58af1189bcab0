"""What a step costs, by option, batch and context: integers that all ranks share. Pure."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from overstory.workers.policy.options import PLAIN

_KEPT = 4096
"""Shapes whose costs are kept."""

WHOLE = 0
DRAFTS_IN_PARTS = 1
IN_PARTS = 2
LAUNCHES = 3
"""How an engine that captures whole steps runs those of a batch: each option's in one graph, plain
ones so and those that draft in parts, or all in parts. Where nothing else is there, all are
`WHOLE`."""

_MOST_US = 10**9
"""A cell of more than a quarter of an hour is no measurement."""


class BadTable(ValueError):
    """Data that is no cost table; says what is wrong with it."""


@dataclass(frozen=True)
class CostTable:
    """Microseconds of one decode step.

    Attributes:
        options: policy names.
        batches: requests per step, ascending.
        contexts: committed tokens per request (mean of the batch), ascending.
        cost_us: [option][batch][context], at least 1, never falling with batch or context.
        sampled_us: [option][batch], what drawing adds where any request of the batch samples.
        parts_us: [option][batch], what a step in parts takes more than in one graph; 0 where there
            are no such graphs.
    """

    options: tuple[str, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    cost_us: tuple[tuple[tuple[int, ...], ...], ...]
    sampled_us: tuple[tuple[int, ...], ...]
    parts_us: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for name, axis in (("batches", self.batches), ("contexts", self.contexts)):
            rising = all(a < b for a, b in pairwise(axis))
            if not axis or axis[0] < 1 or not rising:
                raise BadTable(f"{name} of a cost table must rise from at least 1, got {axis}")
        shape = [[len(row) for row in option] for option in self.cost_us]
        if not self.options or shape != [[len(self.contexts)] * len(self.batches)] * len(
            self.options
        ):
            raise BadTable(
                f"cost table of {len(self.options)} options, {len(self.batches)} batches and "
                f"{len(self.contexts)} contexts holds rows of {shape}"
            )
        for name, more in (("sampling costs", self.sampled_us), ("costs of parts", self.parts_us)):
            if [len(row) for row in more] != [len(self.batches)] * len(self.options):
                raise BadTable(f"{name} of a cost table are {more}")
            if not all(0 <= cell <= _MOST_US for row in more for cell in row):
                raise BadTable(f"{name} must be 0 to {_MOST_US} us, got {more}")
        for option in self.cost_us:
            for row in option:
                if not all(1 <= cell <= _MOST_US for cell in row):
                    raise BadTable(f"costs must be 1 to {_MOST_US} microseconds, got {row}")

    @classmethod
    def measured(
        cls,
        options: Sequence[str],
        batches: Sequence[int],
        contexts: Sequence[int],
        cost_us: Mapping[tuple[int, int, int], int],
        rising: Sequence[Sequence[int]] = (),
        sampled_us: Mapping[tuple[int, int], int] = MappingProxyType({}),
        parts_us: Mapping[tuple[int, int], int] = MappingProxyType({}),
    ) -> CostTable:
        """Table of measured cells (option, batch index, context index), and of what drawing and
        running in parts add (option, batch index; none is 0).

        More requests, more context and more rows never cost less. Where cells say so, the dearer
        one was disturbed (noise only adds time), so a cell costs at most what larger ones do.

        Args:
            rising: options (numbers) in an order in which a step cannot become cheaper.
        """
        cells = dict(cost_us)
        for o, b, c in sorted(cells, reverse=True):
            for larger in ((o, b + 1, c), (o, b, c + 1)):
                cells[o, b, c] = min(cells[o, b, c], cells.get(larger, _MOST_US))
        for order in rising:
            for more, less in pairwise(reversed(order)):
                for _, b, c in [cell for cell in cells if cell[0] == less]:
                    cells[less, b, c] = min(cells[less, b, c], cells[more, b, c])
        grid = tuple(
            tuple(tuple(cells[o, b, c] for c in range(len(contexts))) for b in range(len(batches)))
            for o in range(len(options))
        )
        draws, parts = (
            tuple(
                tuple(more.get((o, b), 0) for b in range(len(batches))) for o in range(len(options))
            )
            for more in (sampled_us, parts_us)
        )
        return cls(tuple(options), tuple(batches), tuple(contexts), grid, draws, parts)

    def cost(
        self, option: int, batch: int, context: int, sampled: bool = False, launch: int = WHOLE
    ) -> int:
        """Microseconds of a step of ``batch`` requests with ``context`` tokens each, at least 1.

        ``sampled``: not all of them are greedy. ``launch``: how their steps run, of `LAUNCHES`.

        Linear between the cells and beyond the last; below the first it is that of the first.
        Integers only, so that all ranks get the same.
        """
        return self.costs(batch, context, sampled, launch)[option]

    def costs(
        self, batch: int, context: int, sampled: bool = False, launch: int = WHOLE
    ) -> tuple[int, ...]:
        """`cost` of every option."""
        key = batch, context, sampled, launch
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            options = range(len(self.options))
            known = tuple(self._cost(option, *key) for option in options)
            self._known[key] = known
        return known

    @cached_property
    def _known(self) -> dict[tuple[int, int, bool, int], tuple[int, ...]]:
        """Costs are asked for at every step, of few shapes."""
        return {}

    @cached_property
    def launches(self) -> int:
        """How many of `LAUNCHES` differ here: all, or 1 where steps in parts cost no more."""
        return LAUNCHES if any(map(any, self.parts_us)) else 1

    def nearest(self, batch: int) -> int:
        """Index of the batch of the table that is nearest."""
        index = self._nearest.get(batch)
        if index is None:
            index = min(range(len(self.batches)), key=lambda b: abs(self.batches[b] - batch))
            self._nearest[batch] = index
        return index

    @cached_property
    def _nearest(self) -> dict[int, int]:
        """As `_known`."""
        return {}

    def _cost(self, option: int, batch: int, context: int, sampled: bool, launch: int) -> int:
        low = max(0, min(bisect.bisect_left(self.batches, batch), len(self.batches) - 1) - 1)
        near = slice(low, low + 2)
        along = [_line(self.contexts, row, context) for row in self.cost_us[option][near]]
        more = [self.sampled_us[option]] if sampled else []
        if launch == IN_PARTS or (launch == DRAFTS_IN_PARTS and option != PLAIN):
            more.append(self.parts_us[option])
        added = sum(max(0, _line(self.batches, row, batch)) for row in more)
        return max(1, _line(self.batches[near], along, batch)) + added

    @cached_property
    def version(self) -> int:
        """Names the contents: 31 bits of their hash, so that ranks can compare."""
        digest = hashlib.blake2b(self.to_json().encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 33

    def to_json(self) -> str:
        """As JSON text; `from_json` reads it."""
        return json.dumps(
            {
                "options": self.options,
                "batches": self.batches,
                "contexts": self.contexts,
                "cost_us": self.cost_us,
                "sampled_us": self.sampled_us,
                "parts_us": self.parts_us,
            }
        )

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """Table from parsed JSON.

        Raises:
            BadTable: it is none.
        """
        try:
            return cls(
                tuple(str(name) for name in data["options"]),
                _integers(data["batches"]),
                _integers(data["contexts"]),
                tuple(tuple(_integers(row) for row in option) for option in data["cost_us"]),
                tuple(_integers(row) for row in data["sampled_us"]),
                tuple(_integers(row) for row in data["parts_us"]),
            )
        except (KeyError, TypeError) as error:
            raise BadTable(f"no cost table: {type(error).__name__}: {error}") from error


def _integers(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise BadTable(f"whole numbers wanted, got {values!r}")
    return tuple(values)


def _line(axis: Sequence[int], values: Sequence[int], at: int) -> int:
    """Value at ``at`` on the line through the two neighbours, rounded down."""
    if len(axis) == 1 or at <= axis[0]:
        return values[0]
    high = min(bisect.bisect_left(axis, at), len(axis) - 1)
    low = high - 1
    rise = values[high] - values[low]
    return values[low] + rise * (at - axis[low]) // (axis[high] - axis[low])
