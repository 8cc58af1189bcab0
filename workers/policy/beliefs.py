"""What all ranks believe of drafts: integers that rank 0 sends to the others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

GREEDY = 0
SAMPLED = 1
KINDS = 2
"""Kinds of requests whose acceptance differs much: greedy ones and sampled ones."""

ON = 0
OFF = 1
TRIAL = 2
"""Standing of the drafter: in use, switched off (plain only), or off and being tried again."""

NO_PROBE = 0
"""`Beliefs.probe` of steps that try nothing; else the number of the option, and one."""

ONE = 1000
"""One token, in the unit of `Beliefs.tokens`."""


@dataclass(frozen=True)
class Beliefs:
    """Calibration at one moment: what drafts give, and how far the cost table is off.

    Attributes:
        version: counts the moments; 0 is before the first.
        tokens: [kind][option], thousandths of a token that a step is expected to give a request.
        known: [kind], 1 where enough steps were seen; else `tokens` says nothing.
        overhead_us: [place][option], microseconds of a step that the table does not hold: the
            engine's own work. Less than none where that work hides some of a step. Places are the
            batches of the cost table where all are greedy, then those where any request samples;
            both again for each further way in which steps run (`cost_table.LAUNCHES`).
        drafter: `ON`, `OFF` or `TRIAL`.
        probe: 1 + the option that the next steps are to try, whatever is best; or `NO_PROBE`.
        factors: by option, thousandths of the table's cost that steps have taken lately.
        holds: for how many times `chooser.SYNC_STEPS` steps they are in force.
        probe_steps: so many of the first of them try it.
    """

    version: int
    tokens: tuple[tuple[int, ...], ...]
    known: tuple[int, ...]
    overhead_us: tuple[tuple[int, ...], ...]
    factors: tuple[int, ...]
    drafter: int = ON
    probe: int = NO_PROBE
    holds: int = 1
    probe_steps: int = 0

    @classmethod
    def none(cls, options: int, places: int) -> Beliefs:
        """Before anything was seen."""
        nothing = ((0,) * options,) * places
        return cls(0, ((ONE,) * options,) * KINDS, (0,) * KINDS, nothing, (ONE,) * options)

    def to_ints(self) -> list[int]:
        """For a broadcast; `from_ints` reads it. The length depends on the numbers of options and
        places alone."""
        numbers = (self.version, self.drafter, self.probe, self.holds, self.probe_steps)
        return list(chain(numbers, self.known, self.factors, *self.tokens, *self.overhead_us))

    @classmethod
    def from_ints(cls, values: Sequence[int], options: int) -> Beliefs:
        """Beliefs from what `to_ints` gave."""
        version, drafter, probe, holds, probe_steps, *rest = values
        known, rest = rest[:KINDS], rest[KINDS:]
        factors, rest = rest[:options], rest[options:]
        tokens = tuple(tuple(rest[k * options : (k + 1) * options]) for k in range(KINDS))
        rest = rest[KINDS * options :]
        overhead = tuple(tuple(rest[b : b + options]) for b in range(0, len(rest), options))
        return cls(
            version,
            tokens,
            tuple(known),
            overhead,
            tuple(factors),
            drafter,
            probe,
            holds,
            probe_steps,
        )
