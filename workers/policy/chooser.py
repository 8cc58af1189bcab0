"""The policy of each step of one rank: a fixed one, or the automatic choice.

Under the automatic rule all ranks hold the same table, the same beliefs and the same option before,
and see the same batch, so they choose alike without a word. Every `SYNC_STEPS` decode steps, or a
few times as many where nothing is to be found out, rank 0 sends new beliefs; its clock and its
counts of acceptance go no other way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from overstory.kernels.reference import Accepted, Tree
from overstory.workers import tree_policy
from overstory.workers.policy import OPT_OUT
from overstory.workers.policy.beliefs import GREEDY, KINDS, NO_PROBE, SAMPLED, Beliefs
from overstory.workers.policy.choice import (
    Decision,
    Shape,
    costs_of,
    decide,
    place_of,
    places_of,
)
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.evidence import Walk
from overstory.workers.policy.launches import INTERRUPTED, WORKED, Run
from overstory.workers.policy.options import PLAIN, Options
from overstory.workers.policy.steering import Steering
from overstory.workers.tree_policy import AutoPolicy, TreePolicy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from overstory.workers.ddtree.decisions import DecisionGroup

SYNC_STEPS = 16
"""Decode steps between two broadcasts of beliefs, at least (`Beliefs.holds`)."""

HOLDS_ELSEWHERE = 16
"""Periods that beliefs are in force at most where the batch is of another place than they were made
for."""

OBSERVED = 2
"""Most requests of a step whose walks are counted, others each time."""

OBSERVED_STEPS = 4
"""The walks of one step of so many are counted. All steps are, until it is known what a kind of
requests accepts."""

OBSERVED_EVERY_NS = 32_000_000
"""Least time between two counted steps where much is known already (`Steering.settled`): one takes
the host some 0.04 ms (two walks in Python; 0.1 to 0.2 ms where steps run in parts and their trees
are copied), and that is time of a step."""

LEAVING = 4
"""A choice stands until more than one in so many of its requests have left: where a batch ends they
leave one by one, and where it lasts others take their places; a look at each would cost more than
it could gain."""

_KIND = "overstory_kind"
_CONTEXT_GRAIN = 1024
"""Contexts are rounded down to a multiple of at least so many, so that choices can be kept."""


def speculates(req: Req) -> bool:
    """Whether a request may be drafted for."""
    return kind_of(req)[0]


def kind_of(req: Req) -> tuple[bool, int]:
    """Whether a request may be drafted for, and `GREEDY` or `SAMPLED`; kept with the request, since
    it is asked for at every step."""
    known: tuple[bool, int] | None = req.__dict__.get(_KIND)
    if known is None:
        params = req.sampling_params
        wanted = (params.custom_params or {}).get(OPT_OUT, True) is not False
        known = wanted, GREEDY if params.top_k == 1 else SAMPLED
        req.__dict__[_KIND] = known
    return known


def shape_of(batch: ScheduleBatch, parts: bool = False) -> Shape:
    """What all ranks know of ``batch``: kinds of its requests, mean committed length. ``parts``: it
    asks for what no captured step gives."""
    kinds = list(map(kind_of, batch.reqs))
    counts = tuple(kinds.count((True, kind)) for kind in range(KINDS))
    sampled = counts[SAMPLED] > 0 or (False, SAMPLED) in kinds
    return Shape(counts, len(kinds) - sum(counts), context_of(batch), sampled, parts)


def committed_of(batch: ScheduleBatch) -> int:
    """Committed tokens of all requests of ``batch``. On a GPU with overlap SGLang forgets its own
    sum of lengths; that of our draft input stands in."""
    known = batch.seq_lens_sum
    return int(batch.spec_info.committed if known is None else known)


def context_of(batch: ScheduleBatch) -> int:
    """Mean committed length of ``batch``, rounded down: by less than 1,024, or than a quarter."""
    mean = committed_of(batch) // len(batch.reqs)
    return mean // _grain(mean) * _grain(mean)


def _grain(context: int) -> int:
    return max(_CONTEXT_GRAIN, 1 << max(0, context.bit_length() - 3))


def spare_opted_out(tree: Tree, reqs: Sequence[Req]) -> Tree:
    """``tree`` with nothing but the root in use for requests that want nothing drafted."""
    spared = [not speculates(req) for req in reqs]
    if tree.rows == 1 or not any(spared):
        return tree
    gone = torch.tensor(spared, device=tree.tokens.device).unsqueeze(1)
    row = torch.arange(tree.rows, device=tree.tokens.device).unsqueeze(0)
    padding = gone & (row > 0)
    return Tree(
        torch.where(padding, tree.tokens[:, :1], tree.tokens),
        tree.parents.masked_fill(padding, -1),
        tree.depths.masked_fill(padding, 0),
        tree.ranks.masked_fill(padding, -1),
        tree.sizes.masked_fill(gone.squeeze(1), 1),
    )


class Walks(NamedTuple):
    """Of a step's trees, on the host: ``parents`` and ``ranks`` [bs, rows], ``sizes`` [bs] as in
    `Tree`, and ``accepted`` rows [bs, width]; int64. Arrays, whose parts are read at a third of a
    tensor's price."""

    parents: NDArray[np.int64]
    ranks: NDArray[np.int64]
    sizes: NDArray[np.int64]
    accepted: NDArray[np.int64]

    @classmethod
    def viewed(cls, *parts: torch.Tensor) -> Walks:
        """Of tensors on the host, which may still be on their way there."""
        return cls(*(part.numpy() for part in parts))

    @classmethod
    def copied(cls, tree: Tree, accepted: Accepted) -> Walks:
        """On their way to the host, by the step's stream."""
        columns = (tree.parents, tree.ranks, tree.sizes.unsqueeze(1), accepted.rows)
        # One tensor: each copy to the host is a launch.
        told = torch.cat(columns, dim=1).to("cpu", non_blocking=True)
        parents, ranks, sizes, rows = told.split([part.shape[1] for part in columns], dim=1)
        return cls.viewed(parents, ranks, sizes.squeeze(1), rows)

    def of(self, request: int, chain: bool) -> Walk | None:
        """That of one request; None if nothing was drafted for it."""
        size = int(self.sizes[request])
        if size <= 1:
            return None
        parents, ranks = self.parents[request].tolist(), self.ranks[request].tolist()
        path = [row for row in self.accepted[request].tolist()[1:] if row >= 0]
        return Walk(parents, ranks, path, size, chain)


class Told(NamedTuple):
    """What a captured step brings to the host anyway: ``walks``, and the device's clock at both of
    its ends, ``times`` [2] int64 in nanoseconds; None if it was not read."""

    walks: Walks
    times: NDArray[np.int64] | None


def drafted_kinds(reqs: Sequence[Req]) -> list[int | None]:
    """By request, its kind; None where nothing is drafted for it."""
    return [kind if drafting else None for drafting, kind in map(kind_of, reqs)]


def observed(
    walks: Walks, kinds: Sequence[int | None], running: Sequence[bool], chain: bool, turn: int
) -> Iterator[tuple[int, Walk]]:
    """Kind and walk of requests that were ``running``: `OBSERVED` at most, by ``turn`` others."""
    counted = [(b, kind) for b, kind in enumerate(kinds) if running[b] and kind is not None]
    if len(counted) > OBSERVED:
        from_here = counted[turn % len(counted) :] + counted
        counted = [from_here[i * len(counted) // OBSERVED] for i in range(OBSERVED)]
    for b, kind in counted:
        walk = walks.of(b, chain)
        if walk is not None:
            yield kind, walk


@dataclass
class StepOutcome:
    """A step's trees and walks on their way to the host, for rank 0's evidence.

    ``working`` is called before its walks are counted; ``timed`` with the microseconds of its work
    on the device, if ``told`` has them.
    """

    steering: Steering
    working: Callable[[], None]
    kinds: list[int | None]
    chain: bool
    told: Told
    turn: int = 0
    timed: Callable[[int], None] | None = None

    def judge(self, running: list[bool]) -> None:
        """Counts what became of the drafts of requests that were ``running``.

        It was copied behind the step on its stream: its results must have been read.
        """
        self.working()
        for kind, walk in observed(self.told.walks, self.kinds, running, self.chain, self.turn):
            self.steering.observe(kind, walk)
        if self.timed is not None and self.told.times is not None:
            begun, ended = self.told.times.tolist()
            if ended - begun >= 1000:  # a clock that stands still says nothing
                self.timed((ended - begun) // 1000)


class _Choice(NamedTuple):
    """A decision with what it was made by and what follows from it; ``told`` for digests."""

    decision: Decision
    shape: Shape
    beliefs: Beliefs
    policy: TreePolicy
    told: str
    cost_us: int


@dataclass
class _Held:
    """Until when a choice stands without another look, since what it was made by hardly changes.

    All ranks must hold alike: a look may choose something else once requests have left or joined.

    Attributes:
        rule: the policy in force.
        reqs: the newest batch that it stood for; what its requests ask for does not change.
        count: requests, at least and at most.
        kind: `kind_of` each of them; None where they differ or no captured step gives what they ask
            for: nobody joins those.
        context: committed tokens of a request, mean: at least, and less than.
        until: `_Auto.since` by which something is due.
    """

    rule: AutoPolicy
    reqs: list[Req]
    count: tuple[int, int]
    kind: tuple[bool, int] | None
    context: tuple[int, int]
    until: int

    def covers(
        self,
        rule: object,
        batch: ScheduleBatch,
        since: int,
        parts: Callable[[ScheduleBatch], bool],
    ) -> bool:
        """Whether a step of ``batch``, so many after the beliefs came, is one of these."""
        if since >= self.until or not (rule is self.rule or rule == self.rule):
            return False
        count = len(batch.reqs)
        if batch.reqs != self.reqs:
            if not self._takes(batch, parts):
                return False
            self.reqs = list(batch.reqs)
        low, high = self.context
        return low * count <= committed_of(batch) < high * count

    def _takes(self, batch: ScheduleBatch, parts: Callable[[ScheduleBatch], bool]) -> bool:
        """Whether requests that have left and others of the same kind are all that is new."""
        fewest, most = self.count
        if not fewest <= len(batch.reqs) <= most:
            return False
        known = set(map(id, self.reqs))
        joined = [req for req in batch.reqs if id(req) not in known]
        return not joined or (
            self.kind is not None
            and all(kind_of(req) == self.kind for req in joined)
            and not parts(batch)
        )


@dataclass
class _Auto:
    """What the automatic rule needs; made once the table is there."""

    table: CostTable
    steering: Steering | None
    beliefs: Beliefs
    before: int = PLAIN
    since: int = -1  # steps before the one at hand that were chosen by these beliefs
    place: int = -1  # of the batch that they were made for
    kept: dict[tuple[Shape, int, tuple[int, ...], bool], Decision] = field(default_factory=dict)

    def due(self, shape: Shape) -> int:
        """After how many steps the next beliefs come; what is to be tried and when was decided for
        another batch, if ``shape`` is of another place."""
        holds = self.beliefs.holds
        if place_of(self.table, shape) != self.place:
            holds = min(holds, HOLDS_ELSEWHERE)
        return SYNC_STEPS * holds


class StepChooser:
    """Gives each decode step its policy. The scheduler's thread only, but for `report`.

    Args:
        options: what the automatic rule chooses from.
        group: the tensor-parallel ranks.
        host_waits: a step has run when its launch returns, so that the time until the next launch
            is the engine's own. Else launches are timed from one to the next.
        parts: whether a batch asks for what no captured step gives.
    """

    def __init__(
        self,
        options: Options,
        group: DecisionGroup,
        host_waits: bool,
        parts: Callable[[ScheduleBatch], bool] = lambda _: False,
    ) -> None:
        self.options = options
        self.group = group
        self._parts = parts
        self._host_waits = host_waits
        self._auto: _Auto | None = None
        self._allowed: dict[int | None, tuple[int, ...]] = {}
        self._turn = 0
        self._last: _Choice | None = None
        self._shape: tuple[tuple[Req, ...], Shape] | None = None  # of the last step
        self._ruling = False  # whether the automatic rule chose the step at hand
        self._rows_run: Callable[[int], int] = lambda rows: rows
        self._held: _Held | None = None
        self._broken = False  # whether something else than a decode step came last
        self._settled = False
        self._counted_ns = 0  # when the last walks were counted
        self._begun: tuple[int, int, int] | None = None  # (ns, option, expected us) of this step
        self._ended: tuple[int, int] | None = None  # (ns, batch) of the last step
        self._run: Run | None = None  # steps that are timed from launch to launch
        self._steady = 0  # steps that the batch has been of one place for; of a run, those timed
        self._place = -1

    def start(self, table: CostTable, floor: float) -> None:
        """The table is there: the automatic rule can be in force from now on."""
        steering = Steering(self.options, table, floor) if self.group.decides else None
        none = Beliefs.none(len(self.options), places_of(table))
        self._auto = _Auto(table, steering, none)

    def captured(self, rows_run: Callable[[int], int]) -> None:
        """Steps run in graphs of so many rows as ``rows_run`` gives for the rows wanted, and trees
        are grown to fill them: there is an option for each graph, of what it really drafts. Before
        `start`."""
        assert self._auto is None, "the table and what is believed are of the options before"
        self.options, self._rows_run = self.options.grown(rows_run), rows_run

    def next(self, batch: ScheduleBatch) -> tuple[TreePolicy, str]:
        """Policy of the step that now begins, and a text of what it was decided by, for digests."""
        auto, rule, held, last = self._auto, tree_policy.current(), self._held, self._last
        if auto is None or held is None or last is None:
            return self._looked_at(auto, rule, batch)
        if held.covers(rule, batch, auto.since + 1, self._parts):
            auto.since += 1
            run, count = self._run, len(held.reqs)
            if run is not None and not self._broken and run.shape.batch == count:
                run.marks.append(time.perf_counter_ns())
                self._steady += 1
            elif auto.steering is not None:
                self._begin_again(auto.steering, last, count)
            return last.policy, last.told
        self._held = None
        return self._looked_at(auto, rule, batch)

    def _looked_at(
        self, auto: _Auto | None, rule: TreePolicy | AutoPolicy, batch: ScheduleBatch
    ) -> tuple[TreePolicy, str]:
        """As `next`, where something may have changed."""
        now = time.perf_counter_ns()
        if auto is not None and auto.steering is not None:
            self._note_pause(auto.steering, len(batch.reqs))
            self._note_run(auto.steering, now, len(batch.reqs))
        if isinstance(rule, TreePolicy):
            self._end_run()
            self._ruling = False
            return rule, str(rule)
        assert auto is not None, "an automatic policy is in force without a cost table"
        shape = self._shape_of(batch)
        chosen = self._following(auto, self._decide(auto, rule, shape), shape)
        self._last, self._ruling = chosen, True
        if self._host_waits:
            if auto.steering is not None:
                option = chosen.decision.option
                self._begun = (time.perf_counter_ns(), option, chosen.cost_us)
            return chosen.policy, chosen.told
        if auto.steering is not None:
            self._run = self._run_of(chosen.decision.option, shape, now)
        self._hold(auto, rule, batch, shape)
        return chosen.policy, chosen.told

    def _begin_again(self, steering: Steering, last: _Choice, count: int) -> None:
        """A step of ``count`` requests begins that is not looked at, where something came between,
        there are more or fewer than at the last look, or nothing is timed."""
        self._broken, now = False, time.perf_counter_ns()
        if self._run is not None and self._run.stands(now):
            self._end_run(steering)
        if count != last.shape.batch:
            # Not what steps of the batch take; what ended is put away within the last one's time.
            self._interrupt()
        elif self._run is not None:
            self._run.marks.append(now)
            self._steady += 1
        else:
            self._run = self._run_of(last.decision.option, last.shape, now)
            self._steady = 1

    def _run_of(self, option: int, shape: Shape, now: int) -> Run:
        """The run that a step launched ``now`` belongs to."""
        run, place = self._run, self._place
        if run is None or run.option != option or run.place != place:
            visited = run is not None and run.place == place
            return Run(option, place, shape, visited, [now, WORKED])
        run.shape = shape
        return run

    def _hold(self, auto: _Auto, rule: AutoPolicy, batch: ScheduleBatch, shape: Shape) -> None:
        """Sets until when the next steps need not be looked at."""
        until = auto.due(shape)
        if auto.beliefs.probe != NO_PROBE and auto.since < auto.beliefs.probe_steps:
            until = min(until, auto.beliefs.probe_steps)
        if auto.since + 1 >= until:
            return
        reqs = list(batch.reqs)
        kinds = sum(map(bool, (*shape.drafting, shape.plain)))
        kind = None if shape.parts or kinds > 1 else kind_of(reqs[0])
        may_leave = 0 if kind is None else len(reqs) // LEAVING
        count = (len(reqs) - may_leave, len(reqs))
        grain = _grain(shape.context)  # and a half more: a mean that hovers about a multiple of it
        context = (shape.context - grain // 2, shape.context + grain + grain // 2)
        self._held = _Held(rule, reqs, count, kind, context, until)

    def ended(self, batch: ScheduleBatch) -> None:
        """The step has been launched."""
        if not self._host_waits:
            return
        self._ended = (time.perf_counter_ns(), len(batch.reqs))
        begun, self._begun = self._begun, None
        if begun is not None and self._auto is not None and self._auto.steering is not None:
            took_us = (self._ended[0] - begun[0]) // 1000
            self._auto.steering.observe_step(begun[1], begun[2], took_us)

    def interrupted(self) -> None:
        """Something else than a decode step comes next: the time that passes is not a step's."""
        self._ended = self._begun = self._shape = None
        self._broken = True
        self._interrupt()

    def _interrupt(self) -> None:
        # Once: there may be no step for days, where answers are of one token.
        if self._run is not None and self._run.marks[-1] != INTERRUPTED:
            self._run.marks.append(INTERRUPTED)

    def outcome(
        self,
        batch: ScheduleBatch,
        policy: TreePolicy,
        tree: Tree,
        accepted: Accepted,
        told: Told | None = None,
    ) -> StepOutcome | None:
        """The step's trees for `PendingSteps`, where they are to be counted: of some steps that the
        automatic rule chose, and of all until it knows the requests' kind.

        Args:
            told: the same on the host, where the step has it copied anyway.
        """
        auto = self._auto
        if not self._ruling or auto is None or auto.steering is None or policy.mode == "plain":
            return None
        self._turn += 1
        if not self._to_be_counted(auto):
            return None
        kinds = drafted_kinds(batch.reqs)
        if told is None:
            self._note_work()
            told = Told(Walks.copied(tree, accepted), None)
        return StepOutcome(
            auto.steering,
            self._note_work,
            kinds,
            policy.mode == "chain",
            told,
            self._turn,
            self._timed(auto.steering, len(batch.reqs)),
        )

    def _timed(self, steering: Steering, count: int) -> Callable[[int], None] | None:
        """Takes what the step at hand, of ``count`` requests, takes on its device."""
        last = self._last
        if self._host_waits or last is None or last.shape.batch != count:
            return None
        return partial(steering.observe_device, last.decision.option, last.shape)

    def _to_be_counted(self, auto: _Auto) -> bool:
        why = self._last.decision.why if self._last is not None else ""
        if why in ("unknown", "trial"):
            return True
        if why == "probe":  # its first step is not timed, and the last one is counted after it
            return auto.since in (0, auto.beliefs.probe_steps - 1)
        if not self._settled:
            return self._turn % OBSERVED_STEPS == 0
        now = time.perf_counter_ns()
        # Where steps are as long as that, those between are to be timed.
        if self._turn % OBSERVED_STEPS or now - self._counted_ns < OBSERVED_EVERY_NS:
            return False
        self._counted_ns = now
        return True

    def report(self) -> dict[str, Any] | None:
        """For status, JSON-able; None without a table. `choice`, `why`, `table`, `beliefs`
        (versions), and on rank 0 what `Steering.report` holds."""
        auto = self._auto
        if auto is None:
            return None
        return {
            "choice": str(self._last.policy) if self._last else None,
            "why": self._last.decision.why if self._last else None,
            "table": auto.table.version,
            "beliefs": auto.beliefs.version,
            **(auto.steering.report() if auto.steering is not None else {}),
        }

    def _shape_of(self, batch: ScheduleBatch) -> Shape:
        """`shape_of`, which mostly is that of the step before."""
        reqs, parts, kept = tuple(batch.reqs), self._parts(batch), self._shape
        if kept is not None and kept[0] == reqs:
            shape = kept[1]
            if shape.context == context_of(batch) and shape.parts == parts:
                return shape
        shape = shape_of(batch, parts)
        self._shape = reqs, shape
        return shape

    def _decide(self, auto: _Auto, rule: AutoPolicy, shape: Shape) -> Decision:
        allowed = self._allowed.get(rule.most)
        if allowed is None:
            allowed = self._allowed[rule.most] = self._permitted(rule.most)
        auto.since += 1
        place = place_of(auto.table, shape)
        self._steady = self._steady + 1 if place == self._place else 0
        self._place = place
        if auto.since == 0 or auto.since >= auto.due(shape):
            auto.beliefs = self._agree(auto, shape, allowed)
            auto.since, auto.place = 0, place
            auto.kept.clear()
        since = auto.since
        # The decision of an earlier step under these beliefs, where it is the same one.
        key = (shape, auto.before, allowed, since < auto.beliefs.probe_steps)
        decision = auto.kept.get(key)
        if decision is None:
            decision = decide(auto.table, auto.beliefs, shape, allowed, auto.before, since)
            auto.kept[key] = decision
        if decision.why == "best":
            auto.before = decision.option
        return decision

    def _permitted(self, most: int | None) -> tuple[int, ...]:
        """Options that a rule of ``most`` nodes allows; the bound is grown as a tree of it is."""
        if most is not None and most < self.options.nodes[-1]:
            most = self._rows_run(1 + most) - 1
        return self.options.allowed(most)

    def _following(self, auto: _Auto, decision: Decision, shape: Shape) -> _Choice:
        """What follows from a decision: mostly what followed in the step before."""
        last, made_by = self._last, (decision, shape, auto.beliefs)
        if last is not None and all(map(is_, made_by, last)):
            return last
        policy = self.options.policies[decision.option]
        told = f"{policy} {decision.why} table {auto.table.version} {auto.beliefs.version}"
        cost_us = costs_of(auto.table, shape)[decision.option]
        return _Choice(decision, shape, auto.beliefs, policy, told, cost_us)

    def _agree(self, auto: _Auto, shape: Shape, allowed: tuple[int, ...]) -> Beliefs:
        if auto.steering is not None:
            believed = auto.steering.next_beliefs(
                auto.since, shape, allowed, auto.before, SYNC_STEPS, self._steady
            )
            self.group.host_ints(believed.to_ints())
            self._settled = auto.steering.settled(shape)
            return believed
        length = len(auto.beliefs.to_ints())
        return Beliefs.from_ints(self.group.host_ints([0] * length), len(self.options))

    def _note_work(self) -> None:
        if self._run is not None:
            self._run.marks.append(WORKED)

    def _note_pause(self, steering: Steering, batch: int) -> None:
        """The engine's own work between two steps."""
        ended, self._ended = self._ended, None
        if ended is not None and ended[1] == batch:
            steering.observe_overhead(batch, (time.perf_counter_ns() - ended[0]) // 1000)

    def _note_run(self, steering: Steering, now: int, count: int) -> None:
        """The times of the steps that were not looked at; one of ``count`` requests begins."""
        run = self._run
        if run is None:
            return
        if count != run.shape.batch:  # what ended is put away within the last one's time
            run.marks.append(INTERRUPTED)
        self._tell(steering, run, now)
        if run.stood:
            self._end_run()

    def _end_run(self, steering: Steering | None = None) -> None:
        """Steps to come are compared to none before: nothing is visited until there are enough. Of
        those before ``steering`` is told."""
        if self._run is not None and steering is not None:
            self._run.marks.append(INTERRUPTED)
            self._tell(steering, self._run, time.perf_counter_ns())
        self._run, self._steady = None, 0

    def _tell(self, steering: Steering, run: Run, now: int) -> None:
        """The times of a run's steps, as `Run.looked_at` gives them."""
        took = run.looked_at(now)
        if took:
            steering.observe_periods(run.option, run.shape, took)
