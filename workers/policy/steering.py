"""Rank 0's side of the policy: evidence to beliefs, probes, the drafter switched off and tried
again. Pure; its clock is the count of decode steps."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from overstory.workers.policy.beliefs import (
    KINDS,
    NO_PROBE,
    OFF,
    ON,
    ONE,
    TRIAL,
    Beliefs,
)
from overstory.workers.policy.choice import (
    Rate,
    Shape,
    affordable,
    best_of,
    costs_of,
    place_of,
    places_of,
    rates,
)
from overstory.workers.policy.compared import BESIDE, NEAR, QUEUED
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.evidence import WANTED, KindEvidence, Share, Walk
from overstory.workers.policy.options import Options
from overstory.workers.policy.periods import Periods
from overstory.workers.policy.step_times import StepTimes
from overstory.workers.policy.visits import REST, Price, Visits, run_of

logger = logging.getLogger(__name__)

RETRY_STEPS = (256, 16384)
"""Steps until a drafter that was switched off is tried again: at first, then doubled, at most."""

HOLDS = 32
"""Periods that beliefs are in force at most."""

HOLDS_US = 400_000
"""Time that they are in force at most, if that is longer than a period: where steps are long, new
ones cost next to nothing, and so many steps under old ones may be many seconds."""

VISIT_WORK_US = 3000
"""What the host does for a visit with nothing of it in its caches: beliefs twice (0.9 ms each on an
H200's host), looks, and the first steps of other graphs."""

STEADY = NEAR + 2
"""Steps that a batch must have been of its place for before something is tried."""

SETTLED = 256
"""Observations of a kind of requests by which much is known of it."""

OVERHEADS_KEPT = 31
STANDINGS = ("on", "off", "trial")
OVERHEAD_KINDS = (
    "greedy",
    "sampled",
    "greedy, drafts in parts",
    "sampled, drafts in parts",
    "greedy, in parts",
    "sampled, in parts",
)
"""Of `Steering.report`, in the order of places."""


class Steering:
    """What rank 0 knows and decides; `next_beliefs` is sent to all ranks.

    The scheduler's thread calls, reports may come from others.

    Args:
        options: what there is to choose from.
        table: measured costs.
        floor: least share of first drafted tokens (the drafter's best guess at depth 1) that a
            drafter in use must get right, in [0, 1); 0 never switches off.
    """

    def __init__(self, options: Options, table: CostTable, floor: float) -> None:
        if not 0 <= floor < 1:
            raise ValueError(f"tree.acceptance_floor must be in [0, 1), got {floor}")
        self._options = options
        self._table = table
        self._floor = floor
        self._lock = threading.Lock()
        self._kinds = [KindEvidence(options) for _ in range(KINDS)]
        self._overheads: list[deque[int]] = [deque(maxlen=OVERHEADS_KEPT) for _ in table.batches]
        self._times = StepTimes(options.nodes)
        costs = [
            list(table.costs(batch, 0, sampled, launch))
            for launch in range(table.launches)
            for sampled in (False, True)
            for batch in table.batches
        ]
        assert len(costs) == places_of(table), "places are counted in this order"
        self._periods = Periods(costs, len(table.batches))
        self._visits = Visits(len(costs), len(options))
        self._drafter = ON
        self._first = Share()
        self._off_for = 0
        self._retry = RETRY_STEPS[0]
        self._switched_off = 0
        self._probes = 0
        self._quiet = 0.0  # steps until another option will have waited long enough
        self._judged: tuple[int, int, list[Rate]] | None = None  # batch and place of the last rates
        self._best_us = 1  # of a step of the best option, at the last batch
        self._version = 0

    def observe(self, kind: int, walk: Walk) -> None:
        """What became of one request's draft."""
        with self._lock:
            self._kinds[kind].add(walk)
            first = next((r for r in range(1, walk.size) if walk.ranks[r] == 0), None)
            if first is not None:
                self._first.add(float(bool(walk.path) and walk.path[0] == first))

    def observe_overhead(self, batch: int, microseconds: int) -> None:
        """Time between two decode steps of ``batch`` requests with nothing but them in between."""
        with self._lock:
            self._overheads[self._table.nearest(batch)].append(microseconds)

    def observe_periods(self, option: int, shape: Shape, took_us: Sequence[int]) -> None:
        """From one launch to the next, of one option and ``shape`` in a row, it took so long; at
        least one."""
        with self._lock:
            costs = costs_of(self._table, shape)
            self._periods.add(place_of(self._table, shape), option, costs, took_us)

    def observe_device(self, option: int, shape: Shape, took_us: int) -> None:
        """The work of a step took the device so long, whatever the host did meanwhile."""
        with self._lock:
            costs = costs_of(self._table, shape)
            self._periods.add_device(place_of(self._table, shape), option, costs, took_us)

    def observe_step(self, option: int, expected_us: int, took_us: int) -> None:
        """A step took so long where the table says `expected_us`."""
        with self._lock:
            self._times.add(option, expected_us, took_us)

    def next_beliefs(
        self,
        steps: int,
        shape: Shape,
        allowed: tuple[int, ...],
        before: int,
        period: int = REST,
        steady: int = STEADY,
    ) -> Beliefs:
        """Beliefs for the steps to come.

        Args:
            steps: decode steps since the last call.
            shape: the batch at hand, by which a probe's price is judged.
            allowed: options that the rule in force permits.
            before: the option that was the best until now, and may stay though another is believed
                to be better by a little: what runs is what others are compared to.
            period: steps that beliefs are in force at least, and several times it where nothing is
                to be tried or found out before: they cost the host more than steps under them.
            steady: steps that the batch has been of this size for.
        """
        with self._lock:
            for kind in self._kinds:
                kind.pass_steps(steps)
            self._judge_drafter(steps)
            self._version += 1
            believed = Beliefs(
                self._version,
                tuple(tuple(kind.tokens()) for kind in self._kinds),
                tuple(int(kind.known()) for kind in self._kinds),
                self._overhead_us(),
                self._times.factors(),
                self._drafter,
            )
            probe, probed = self._probe(steps, believed, shape, allowed, before, period, steady)
            holds, able = 1, self._drafter == ON and self._all_known(shape)
            if able and probe == NO_PROBE:
                most = min(HOLDS, HOLDS_US // (period * self._best_us))
                holds = max(1, min(most, math.ceil(self._quiet / period)))
            elif able:  # until as many of what runs have gone by as it is compared to
                holds = math.ceil((probed + QUEUED + min(max(NEAR, probed), BESIDE)) / period)
            return replace(believed, probe=probe, holds=holds, probe_steps=probed)

    def report(self) -> dict[str, Any]:
        """For status, JSON-able: `drafter` (on, off, trial), `first_accepted`, `floor`,
        `switched_off` (how often), `probes`, `factors` by option, `overhead_us` by kind
        (sampled: any of the batch; of steps in parts apart, where others are one graph), batch and
        option, `greedy` and `sampled` as `KindEvidence.report`, `believed` as `_told_beliefs`."""
        with self._lock:
            greedy, sampled = (kind.report() for kind in self._kinds)
            return {
                "drafter": STANDINGS[self._drafter],
                "first_accepted": round(self._first.mean, 4) if self._first.seen else None,
                "floor": self._floor,
                "switched_off": self._switched_off,
                "probes": self._probes,
                "factors": {
                    name: factor / ONE
                    for name, factor in zip(self._options.names, self._times.factors(), strict=True)
                },
                "overhead_us": self._told_overheads(),
                "greedy": greedy,
                "sampled": sampled,
                "believed": self._told_beliefs(),
            }

    def _probe(
        self,
        steps: int,
        beliefs: Beliefs,
        shape: Shape,
        allowed: tuple[int, ...],
        before: int,
        period: int,
        steady: int,
    ) -> tuple[int, int]:
        """What the next steps are to try, if something has waited long enough for its price, and
        how many of them.

        Where the batch has just changed, as at the end of texts, a visit waits: its steps could not
        be compared.
        """
        if self._drafter != ON or not any(shape.drafting) or not self._all_known(shape):
            return NO_PROBE, 0
        place = place_of(self._table, shape)
        self._visits.pass_steps(place, steps)
        every = rates(self._table, beliefs, shape)
        self._judged = shape.batch, place, every
        best = best_of(every, allowed, before)
        good = every[best]
        self._best_us = good.cost_us
        known = [self._periods.seen(place, option) for option in range(len(every))]
        options = affordable([rate.cost_us for rate in every], allowed)
        # One of the two known relative to the others tells more; where there is none the two become
        # what others are compared to, or nothing would ever be found out.
        told = [option for option in options if known[best] or known[option]]
        prices, runs = {}, {}
        for option in told if set(told) - {best} else options:
            slower = every[option].cost_us / good.cost_us
            share = every[option].tokens / good.tokens / slower
            work = VISIT_WORK_US / good.cost_us
            seen = known[best] and known[option]
            off = self._periods.off(place, option)
            apart = math.hypot(off, self._periods.off(place, best))
            longer = seen and self._periods.timed(place) and self._visits.some(place, option)
            runs[option] = run_of(work, slower * (max(0.0, 1 - share) + apart), longer)
            # What is smaller than what runs gives as many tokens as the walks of that say, and
            # takes as long as the clock says: a visit tells little.
            told_already = option < best and self._periods.clocked(place, option)
            prices[option] = Price(
                share, runs[option] * slower, seen, work, 0.0 if told_already else off
            )
        self._quiet = self._visits.look(place, best, prices)
        # A best option that is new has no steps yet that a visit could be compared to.
        ready = best == before and steady >= STEADY
        tried = self._visits.due(place) if ready else None
        if tried is None:
            return NO_PROBE, 0
        self._quiet = self._visits.look(place, best, prices)
        self._probes += 1
        return 1 + tried, runs[tried]

    def settled(self, shape: Shape) -> bool:
        """Whether much is known of the kinds of requests at hand, so that few of their walks need
        be counted."""
        with self._lock:
            seen = [kind.seen() for kind, n in zip(self._kinds, shape.drafting, strict=True) if n]
            return self._drafter == ON and all(number >= SETTLED for number in seen)

    def _all_known(self, shape: Shape) -> bool:
        """Whether enough is known of the kinds of requests at hand."""
        return all(kind.known() for kind, n in zip(self._kinds, shape.drafting, strict=True) if n)

    def _judge_drafter(self, steps: int) -> None:
        enough = self._first.seen >= WANTED
        if self._drafter == OFF:
            self._off_for += steps
            if self._off_for >= self._retry:
                self._first, self._drafter = Share(), TRIAL
                logger.info("the drafter is tried again after %d steps", self._off_for)
        elif enough and self._first.mean < self._floor:
            if self._drafter == TRIAL:
                self._retry = min(2 * self._retry, RETRY_STEPS[1])
            self._drafter, self._off_for = OFF, 0
            self._switched_off += 1
            logger.warning(
                "drafter switched off: %.1f%% of its first tokens are accepted, the floor is "
                "%.1f%% (tree.acceptance_floor); does it belong to this model? Decoding plainly, "
                "tried again after %d steps",
                100 * self._first.mean,
                100 * self._floor,
                self._retry,
            )
        elif enough and self._drafter == TRIAL:
            self._drafter, self._retry = ON, RETRY_STEPS[0]
            self._kinds = [KindEvidence(self._options) for _ in range(KINDS)]
            logger.warning(
                "drafter in use again: %.1f%% of its first tokens are accepted",
                100 * self._first.mean,
            )

    def _told_beliefs(self) -> dict[str, Any] | None:
        """Of the last batch that was judged: its size, by option the tokens of a step, the
        microseconds, those of its work on the device by its clock (None where it was not read), by
        which share a step's may well be off and how often they were compared; the
        share by which one comparison is off."""
        if self._judged is None:
            return None
        batch, place, every = self._judged
        counts, device = self._periods.compared(place), self._periods.device_us(place)
        return {
            "batch": batch,
            "noise": round(self._periods.noise(), 4),
            "options": {
                name: {
                    "tokens": round(rate.tokens / ONE, 3),
                    "us": rate.cost_us,
                    "device_us": round(device[option]) if option in device else None,
                    "off": round(self._periods.off(place, option), 4),
                    "compared": counts.get(option, 0),
                }
                for option, (name, rate) in enumerate(zip(self._options.names, every, strict=True))
            },
        }

    def _told_overheads(self) -> dict[str, dict[str, dict[str, int]]]:
        rows, count = self._overhead_us(), len(self._table.batches)
        return {
            kind: {
                str(batch): dict(zip(self._options.names, row, strict=True))
                for batch, row in zip(
                    self._table.batches, rows[at * count : (at + 1) * count], strict=True
                )
            }
            for at, kind in enumerate(OVERHEAD_KINDS[: 2 * self._table.launches])
        }

    def _overhead_us(self) -> tuple[tuple[int, ...], ...]:
        """[place][option]: by the periods of steps, else the median of the pauses between two;
        where none was seen, that of the nearest batch seen."""
        periods = self._periods.overheads()
        if periods is not None:
            return periods
        seen = {b: int(median(times)) for b, times in enumerate(self._overheads) if times}
        options, batches = len(self._options), range(len(self._overheads))
        if not seen:
            return ((0,) * options,) * places_of(self._table)
        row = tuple(
            (seen[min(seen, key=lambda known: (abs(known - b), known))],) * options for b in batches
        )
        return row * (places_of(self._table) // len(row))
