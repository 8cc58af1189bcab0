"""The chooser of a rank on made-up batches: ranks alike, opt-outs, what is observed."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_world import COSTS, NUMBERS, OPTIONS, World, automatic_policy, table_of, tree_of
from random_trees import random_tree

from overstory.kernels.reference import tree_accept
from overstory.workers import tree_policy
from overstory.workers.policy import OPT_OUT, chooser
from overstory.workers.policy.beliefs import ONE, Beliefs
from overstory.workers.policy.choice import PROBE_RUN, Decision, places_of
from overstory.workers.policy.chooser import (
    OBSERVED,
    StepChooser,
    StepOutcome,
    Told,
    Walks,
    shape_of,
    spare_opted_out,
)
from overstory.workers.policy.cost_table import CostTable
from overstory.workers.policy.evidence import Walk
from overstory.workers.policy.launches import APART_NS, INTERRUPTED
from overstory.workers.policy.options import CHAIN, PLAIN
from overstory.workers.policy.steering import Steering
from overstory.workers.tree_policy import parse_policy


@pytest.fixture(autouse=True)
def _auto() -> Iterator[None]:
    with automatic_policy():
        yield


def req(top_k: int = 1, **custom: Any) -> Any:
    params = SimpleNamespace(top_k=top_k, custom_params=custom or None)
    return SimpleNamespace(sampling_params=params)


def batch(*reqs: Any, context: int = 200) -> Any:
    return SimpleNamespace(reqs=list(reqs), seq_lens_sum=context * len(reqs))


def observe(chooser: StepChooser, at_hand: Any, walk: Walk | None) -> None:
    """Rank 0 sees that each request of a batch walked so; None: nothing was drafted."""
    if walk is None:
        return
    assert chooser._auto is not None
    assert chooser._auto.steering is not None
    for r in at_hand.reqs:
        chooser._auto.steering.observe(int(r.sampling_params.top_k != 1), walk)


def what_comes(
    choosers: Sequence[StepChooser], dice: random.Random, steps: int, same: int
) -> Iterator[Any]:
    """Batches of so many steps. About every ``same`` / 4 something changes: the requests, fewer of
    them go on, the rule in force, or a prefill came between; texts grow and start anew."""
    reqs = [req(), req(40), req(**{OPT_OUT: False}), *[req() for _ in range(20)]]
    at_hand, length = reqs[:1], 100
    for _ in range(steps):
        what = dice.choice(["reqs", "ends", "prefill", "rule", *["same"] * same])
        # From one end of a grain to the other, then to a place that no choice made here stands at.
        length = {499: 1600, 2041: 100}.get(length, length + 7)
        if what == "reqs":
            some = reqs[: dice.choice((3, 4, len(reqs)))] if dice.random() < 0.5 else reqs[3:]
            at_hand = dice.sample(some, dice.randint(1, min(len(some), 16)))
        elif what == "ends" and len(at_hand) > 1:
            gone = dice.choice(at_hand)
            at_hand = [one for one in at_hand if one is not gone]
        elif what == "prefill":
            for one in choosers:
                one.interrupted()
        elif what == "rule":
            name = dice.choice(["auto", "auto", "auto<=8", "tree-15"])
            tree_policy.HOLDER.set_current(parse_policy(name))
        yield batch(*at_hand, context=length)


def test_shape_counts_kinds_and_opt_outs() -> None:
    spared = {OPT_OUT: False}
    shape = shape_of(batch(req(), req(1 << 30), req(50), req(**spared), req(7, **spared)))
    assert shape.drafting == (1, 2)
    assert shape.plain == 2
    assert shape.batch == 5
    assert shape.context == 0
    assert [shape_of(batch(req(), context=n)).context for n in (1023, 2047, 10000, 70000)] == [
        0,
        1024,
        8192,
        65536,
    ], "rounded down by less than 1,024, or than a quarter"
    assert shape.sampled
    assert not shape_of(batch(req(), req(**{OPT_OUT: True}))).sampled
    assert shape_of(batch(req(), req(7, **spared))).sampled, "it goes through the sampler too"


def test_a_spared_request_accepts_nothing_and_others_all_the_same() -> None:
    dice = random.Random(3)
    for _ in range(50):
        tree = random_tree(dice, 4, dice.randint(1, 20), 6)
        spared = [dice.random() < 0.5 for _ in range(4)]
        reqs = [req(**{OPT_OUT: not gone}) for gone in spared]
        cut = spare_opted_out(tree, reqs)
        targets = torch.randint(6, tree.tokens.shape, generator=torch.Generator().manual_seed(1))
        before, after = tree_accept(tree, targets, 21), tree_accept(cut, targets, 21)
        for b, gone in enumerate(spared):
            if gone:
                assert after.lengths[b] == 0
                assert after.bonus[b] == targets[b, 0]
                assert cut.sizes[b] == 1
                assert cut.depths[b].max() == 0, "counters would take it for offered"
                assert cut.parents[b].max() == cut.ranks[b].max() == -1
            else:
                assert after.tokens[b].equal(before.tokens[b])


class FakeRanks:
    """Two ranks' groups: what rank 0 gives, rank 1 gets, in order."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def of(self, rank: int) -> Any:
        return SimpleNamespace(decides=rank == 0, host_ints=self._give if rank == 0 else self._take)

    def _give(self, values: list[int]) -> list[int]:
        self.sent.append(values)
        return values

    def _take(self, values: list[int]) -> list[int]:
        given = self.sent.pop(0)
        assert len(given) == len(values), "all ranks must give as many"
        return given


def test_two_ranks_choose_alike_whatever_their_clocks_say() -> None:
    ranks, world, dice = FakeRanks(), World(0.9, random.Random(1)), random.Random(2)
    first, second = (StepChooser(OPTIONS, ranks.of(rank), True) for rank in (0, 1))
    for one in (first, second):
        one.start(table_of(), 0.05)
    chosen = set()
    for _ in range(400):
        at_hand = batch(*[req(dice.choice([1, 40])) for _ in range(dice.choice([1, 1, 3, 8]))])
        policy, told = first.next(at_hand)
        assert second.next(at_hand) == (policy, told)
        chosen.add(str(policy))
        walk = world.walk(OPTIONS.policies.index(policy))
        observe(first, at_hand, walk)
        for one in (first, second):
            one.ended(at_hand)
        if dice.random() < 0.1:
            first.interrupted()
    assert not ranks.sent
    assert len(chosen) >= 2
    first_word, *_, table, beliefs = told.split()
    shown = first.report()
    assert shown is not None
    assert first_word == str(policy) == shown["choice"]
    assert [int(table), int(beliefs)] == [shown["table"], shown["beliefs"]]
    assert first._auto is not None
    assert int(beliefs) == first._auto.beliefs.version > 1, "digests of other beliefs differ"
    assert second._auto is not None
    assert second._auto.steering is None
    theirs = second.report()
    assert theirs is not None
    assert {k: shown[k] for k in theirs} == theirs


def test_two_ranks_whose_hosts_run_ahead_choose_alike() -> None:
    """Batches that last: beliefs come and are asked for at the same steps, and each is the same."""
    ranks, world, dice = FakeRanks(), World(0.9, random.Random(1)), random.Random(2)
    first, second = (StepChooser(OPTIONS, ranks.of(rank), False) for rank in (0, 1))
    for one in (first, second):
        one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    whys, unseen, shrank = set(), 0, 0
    for step, now in enumerate(what_comes((first, second), dice, 6000, 300)):
        policy, told = first.next(now)
        assert second.next(now) == (policy, told), step
        assert not ranks.sent, "both asked"
        whys.update(told.split()[1:2])
        assert (first._held is None) == (second._held is None), "or one looked alone"
        unseen += first._held is not None
        shrank += first._held is not None and len(first._held.reqs) < first._held.count[1]
        walk = world.walk(OPTIONS.policies.index(policy))
        observe(first, now, walk)
    assert {"best", "probe"} <= whys
    assert unseen > 3000
    assert shrank > 100


def test_a_choice_stands_until_a_quarter_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one kind that end one by one: few of the steps are looked at, on all ranks the
    same; where kinds are mixed each that ends may change what is best."""
    ranks = FakeRanks()
    pair = [StepChooser(OPTIONS, ranks.of(rank), False) for rank in (0, 1)]
    looks: list[list[int]] = [[], []]
    for number, one in enumerate(pair):
        one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
        assert one._auto is not None
        one._auto.beliefs = replace(one._auto.beliefs, known=(1, 1), holds=100)
        one._auto.since, one._auto.place = 0, 0
        given = one._looked_at

        def looked_at(auto: Any, rule: Any, now: Any, given: Any = given, at: int = number) -> Any:
            looks[at].append(len(now.reqs))
            return given(auto, rule, now)

        monkeypatch.setattr(one, "_looked_at", looked_at)

    def ends(reqs: list[Any]) -> list[int]:
        for seen in looks:
            seen.clear()
        for one in pair:
            one.interrupted()
        while reqs:
            for _ in range(2):
                assert pair[0].next(batch(*reqs)) == pair[1].next(batch(*reqs))
            reqs = reqs[1:]
        assert looks[0] == looks[1]
        return looks[0]

    assert ends([req() for _ in range(16)]) == [16, 11, 8, 5, 3, 2, 1]
    mixed = ends([req(1 if number % 2 else 40) for number in range(8)])
    assert mixed == [8, 7, 6, 5, 4, 3, 2, 1]
    alone = req()
    pair[0].interrupted(), pair[1].interrupted()
    first, others = (alone, req(), req(), req()), (alone, req(), req())
    for one in pair:
        one.next(batch(*first))
        one.next(batch(*others))
    assert looks[0][-1:] == looks[1][-1:] == [4], "others of the same kind"


def test_requests_that_join_are_looked_at_where_they_may_change_what_is_best() -> None:
    """One ends, another is prefilled and takes its place: with many requests every few steps."""
    asks: list[Any] = []
    one = holding(parts=lambda at_hand: any(request in asks for request in at_hand.reqs))
    looks, reqs = looks_of(one), [req() for _ in range(8)]

    def joined_by(*joining: Any, left: int = 1) -> bool:
        """Whether the step is looked at."""
        looks.clear()
        one.next(batch(*reqs))
        reqs[:left] = []
        one.next(batch(*reqs))
        one.interrupted()
        before = len(looks)
        reqs.extend(joining)
        one.next(batch(*reqs))
        return len(looks) > before

    one.next(batch(*reqs))
    for _ in range(5):
        assert not joined_by(req())
        assert not looks
        assert one._run is not None, "timed again"
        assert one._run.marks[-2] == INTERRUPTED < one._run.marks[-1], "its first step is not timed"
        assert one._run.visited is False, "and it goes on"
    assert not joined_by(req(), req(), left=2)
    assert joined_by(req(), req()), "one more than the choice was for"
    assert joined_by(req(40)), "of another kind"
    reqs[-1:] = [req()]
    asks.append(req())
    assert joined_by(asks[0]), "in parts"


def test_a_fixed_policy_is_taken_as_it_is() -> None:
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    assert one.report() is None
    tree_policy.HOLDER.set_current(parse_policy("tree-15"))
    assert one.next(batch(req())) == (parse_policy("tree-15"), "tree-15")
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    with pytest.raises(AssertionError, match="without a cost table"):
        one.next(batch(req()))


def test_some_requests_of_a_large_batch_are_observed() -> None:
    steering = Steering(OPTIONS, table_of(), 0.05)
    bs = 3 * OBSERVED
    kinds: list[int | None] = [0] * bs
    kinds[0] = None
    parents, ranks, size, path = [-1, 0, 1], [-1, 0, 0], 3, [0, 1, -1]
    every = (torch.tensor([part] * bs) for part in (parents, ranks, size, path))
    work: list[int] = []
    outcome = StepOutcome(
        steering, lambda: work.append(1), kinds, False, Told(Walks.viewed(*every), None)
    )
    outcome.judge([True] * bs)
    assert steering.report()["greedy"]["seen"] == OBSERVED
    assert work, "the step at hand is not timed"
    outcome.judge([i < 2 for i in range(bs)])  # one of the two wants no draft
    assert steering.report()["greedy"]["seen"] == OBSERVED + 1
    assert steering.report()["greedy"]["spine"] == [1.0, 0.0]


def test_an_outcome_tells_the_walks_of_its_step() -> None:
    """Trees of other sizes in one batch, as the step had them."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of(), 0.0)
    at_hand = batch(req(), req())
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    policy, _ = one.next(at_hand)
    tree = random_tree(random.Random(4), 2, 9, 6)
    accepted = tree_accept(tree, tree.tokens, 8)
    outcome = one.outcome(at_hand, policy, tree, accepted)
    assert outcome is not None
    assert one._auto is not None
    assert one._auto.steering is not None
    seen: list[Walk] = []
    one._auto.steering.observe = lambda _kind, walk: seen.append(walk)  # type: ignore[method-assign]
    outcome.judge([True, True])
    for b, walk in enumerate(seen):
        assert walk.parents == tree.parents[b].tolist()
        assert walk.ranks == tree.ranks[b].tolist()
        assert walk.size == int(tree.sizes[b])
        assert walk.path == [row for row in accepted.rows[b, 1:].tolist() if row >= 0]
    assert len(seen) == 2


def test_probes_last_as_long_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beliefs that order a probe of plain decoding: its first steps are that, the rest the best."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.start(table_of(), 0.0)
    assert one._auto is not None
    assert one._auto.steering is not None
    world = World(0.95, random.Random(1))
    for _ in range(64):
        walk = world.walk(NUMBERS[-1])
        assert walk is not None
        one._auto.steering.observe(0, walk)
    monkeypatch.setattr(one._auto.steering, "_probe", lambda *_: (1 + PLAIN, PROBE_RUN))
    names = [str(one.next(batch(req()))[0]) for _ in range(chooser.SYNC_STEPS)]
    assert names[:5] == ["plain"] * 5
    assert "plain" not in names[5:]


def timed(
    monkeypatch: pytest.MonkeyPatch, decisions: Sequence[int], beliefs: Any
) -> tuple[StepChooser, list[int], list[tuple[int, int, int, int]]]:
    """A chooser whose looks decide so, what its clock shows, and what it tells of steps."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of(), 0.0)
    auto = one._auto
    assert auto is not None
    assert auto.steering is not None
    seen: list[tuple[int, int, int, int]] = []
    monkeypatch.setattr(
        auto.steering,
        "observe_periods",
        lambda option, shape, took: seen.extend(
            (option, shape.batch, table_of().cost(option, shape.batch, shape.context), us)
            for us in took
        ),
    )
    coming, now = iter(decisions), [1_000_000]
    monkeypatch.setattr(chooser.time, "perf_counter_ns", lambda: now[0])

    def decide(held: Any, _rule: Any, shape: Any) -> Decision:
        held.since, held.beliefs = 0, beliefs
        one._place = chooser.place_of(held.table, shape)
        return Decision(next(coming), "best")

    monkeypatch.setattr(one, "_decide", decide)
    return one, now, seen


def test_steps_around_a_visit_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device runs beside the host: from launch to launch, of steps that the rule did not look at
    and whose like came before. Each step takes as many microseconds as its number says."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [CHAIN, PLAIN, CHAIN, CHAIN, CHAIN], beliefs)
    alone = req()
    assert one._auto is not None
    assert one._auto.steering is not None
    for number in range(1, 65):
        if number in (17, 33, 49):
            one._held = None
        if number == 53:
            one.interrupted()  # a prefill: the look after it is the fourth
        one.next(batch(alone))
        now[0] += number * 1000
    chain, plain = (table_of().cost(option, 1, 0) for option in (CHAIN, PLAIN))
    before = [(CHAIN, 1, chain, took) for took in range(2, 17)]
    tried = [(PLAIN, 1, plain, took) for took in range(18, 33)]
    after = [(CHAIN, 1, chain, took) for took in range(34, 49)]
    assert seen == before + tried + after, "after what did not run before, or with the rule's work"


def test_what_runs_of_steps_tell_ends_with_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of another place is compared to nothing before it, and one whose requests leave tells
    of the steps before that alone: those who stay are fewer with each step."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [CHAIN, PLAIN, PLAIN], beliefs)
    reqs = [req() for _ in range(16)]
    for number, left in enumerate([[req()]] * 6 + [reqs] * 3 + [reqs[1:]] * 5 + [reqs[9:]]):
        if number in (6, 14):
            one._held = None
        one.next(batch(*left))
        now[0] += 1_000_000
    assert [size for _, size, _, _ in seen] == [1] * 4 + [16]


def test_a_step_in_which_requests_ended_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host puts away what they held before it launches the next one: not the option's time."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, CHAIN, CHAIN], beliefs)
    reqs = [req() for _ in range(16)]
    for number in range(7):
        if number in (1, 6):
            one._held = None
        one.next(batch(*(reqs[2:] if number == 6 else reqs)))
        now[0] += 1_000_000 * (1 + number)
    assert [us for *_, us in seen] == [3000, 4000, 5000], "2 is looked at, 6 is when they ended"


def test_steps_of_a_smaller_batch_among_others_are_no_step_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One has left and another joins a step later: no look comes between."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, CHAIN, CHAIN], beliefs)
    reqs = [req() for _ in range(16)]
    for number in range(12):
        if number in (1, 11):
            one._held = None
        one.next(batch(*(reqs[1:] if number == 6 else reqs)))
        now[0] += 1_000_000 * (1 + number)
    assert [us for *_, us in seen] == [1000 * (1 + n) for n in (2, 3, 4, 8, 9, 10)]


@pytest.mark.parametrize("ended", [5, 10])
def test_a_visit_tells_what_it_can_before_requests_end(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look tells of it, though the batch is a smaller one by then."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, CHAIN, PLAIN], beliefs)
    reqs = [req() for _ in range(16)]
    assert one._auto is not None
    assert one._auto.steering is not None
    for number in range(18):
        if number == 1:
            one._held = None
        one.next(batch(*(reqs[1:] if number > ended else reqs)))
        now[0] += 1_000_000 * (1 + number)
    told = [1000 * (1 + number) for number in range(2, ended)]
    assert [us for *_, us in seen] == told, "not that they ended in, nor those after"


def test_what_is_told_of_steps_is_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests come while an option goes on: of the same place, or of another, where nothing
    was visited."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, *[CHAIN] * 5], beliefs)
    reqs = [req() for _ in range(16)]
    for number in range(16):
        if number in (1, 15):
            one._held = None
        if number in (5, 10):
            one.interrupted()
        count = 1 if number >= 10 else 12 if number < 5 else 16
        one.next(batch(*reqs[:count]))
        now[0] += 1_000_000 * (1 + number)
    assert [(size, us) for _, size, _, us in seen] == [
        (12, 3000),
        (12, 4000),
        (16, 7000),
        (16, 8000),
        (16, 9000),
        *((1, us) for us in (12_000, 13_000, 14_000, 15_000)),
    ]


def looks_of(one: StepChooser) -> list[Any]:
    """Batches that a chooser looks at from now on."""
    looks: list[Any] = []
    given = one._looked_at
    one._looked_at = lambda auto, rule, now: looks.append(now) or given(auto, rule, now)  # type: ignore
    return looks


def holding(beside: bool = True, parts: Callable[[Any], bool] = lambda _: False) -> StepChooser:
    """A chooser whose beliefs hold for long, made for one request; of a host beside the device."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), not beside, parts)
    one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    assert one._auto is not None
    one._auto.beliefs = replace(one._auto.beliefs, known=(1, 1), holds=100)
    one._auto.since, one._auto.place = 0, 0
    return one


def test_a_choice_stands_within_its_lengths_and_under_its_rule() -> None:
    one, alone = holding(), req()
    looks = looks_of(one)
    for context in (2047, 2559, 1024, 2500, 2560, 2100, 1536, 1535, 1024):
        one.next(batch(alone, context=context))
    assert [now.seq_lens_sum for now in looks] == [2047, 2560, 1535], "half a grain more either way"
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    one.next(batch(alone, context=1024))
    assert len(looks) == 3, "another lease of the same rule, which each rank reads for itself"
    tree_policy.HOLDER.set_current(parse_policy("auto<=8"))
    one.next(batch(alone, context=1024))
    assert len(looks) == 4


def test_each_that_ends_is_looked_at_where_it_may_change_what_is_best() -> None:
    """One among others wants nothing drafted, or asks for steps in parts; or is timed by itself."""
    for one, reqs in (
        (holding(), [req() for _ in range(7)] + [req(**{OPT_OUT: False})]),
        (holding(parts=lambda at_hand: len(at_hand.reqs) > 7), [req() for _ in range(8)]),
        (holding(beside=False), [req() for _ in range(8)]),
    ):
        looks = looks_of(one)
        one.next(batch(*reqs))
        one.next(batch(*reqs[:-1]))
        assert [len(now.reqs) for now in looks] == [8, 7]


def test_beliefs_made_for_another_place_hold_less_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one, reqs = holding(), [req() for _ in range(16)]
    assert one._auto is not None
    beliefs = (replace(one._auto.beliefs, version=version) for version in (7, 8))
    monkeypatch.setattr(one, "_agree", lambda *_: next(beliefs))
    until = chooser.SYNC_STEPS * chooser.HOLDS_ELSEWHERE
    versions = [int(one.next(batch(*reqs))[1].split()[-1]) for _ in range(until + 600)]
    assert versions == [0] * (until - 1) + [7] * 601, "then they are of this one"
    assert chooser.SYNC_STEPS * chooser.HOLDS_ELSEWHERE <= 256, "another batch, other costs"


def test_steps_of_a_fixed_policy_are_not_counted() -> None:
    one, at_hand = holding(), batch(req())
    tree = random_tree(random.Random(4), 1, 9, 6)
    accepted = tree_accept(tree, tree.tokens, 8)
    one.next(at_hand)
    tree_policy.HOLDER.set_current(parse_policy("tree-8"))
    policy, _ = one.next(at_hand)
    assert all(one.outcome(at_hand, policy, tree, accepted) is None for _ in range(8))
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    one.next(at_hand)
    told = [one.outcome(at_hand, policy, tree, accepted) is not None for _ in range(8)]
    assert any(told)


def steady_after(what: Callable[[StepChooser, list[Any]], list[Any]]) -> list[int]:
    """Steps that rank 0 says it has been steady for, when it asks for beliefs: ``what`` happens
    at the 10th of 16, and gives the requests of those after."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    assert one._auto is not None
    assert one._auto.steering is not None
    told = []
    given = one._auto.steering.next_beliefs
    one._auto.steering.next_beliefs = lambda *some: told.append(some[-1]) or given(*some)  # type: ignore
    reqs = [req() for _ in range(16)]
    for number in range(3 * chooser.SYNC_STEPS):
        if number == chooser.SYNC_STEPS + 10:
            reqs = what(one, reqs)
        one.next(batch(*reqs))
    return told


def test_nothing_is_visited_before_there_are_steps_to_compare_to() -> None:
    """Steps that were not timed do not count: a visit after them would be in vain."""

    def waits(one: StepChooser, reqs: list[Any]) -> list[Any]:
        one.interrupted()
        assert one._run is not None
        one._run.marks[:] = [mark - 2 * APART_NS if mark > 0 else mark for mark in one._run.marks]
        return reqs

    def prefills(one: StepChooser, reqs: list[Any]) -> list[Any]:
        one.interrupted()
        return reqs

    def runs_another(one: StepChooser, reqs: list[Any]) -> list[Any]:
        tree_policy.HOLDER.set_current(parse_policy("tree-15"))
        one.next(batch(*reqs))
        tree_policy.HOLDER.set_current(parse_policy("auto"))
        return reqs

    def ends(_one: StepChooser, reqs: list[Any]) -> list[Any]:
        return reqs[1:]

    assert steady_after(prefills) == [0, 16, 32]
    assert steady_after(waits) == [0, 16, 7], "no request for seconds"
    assert steady_after(runs_another) == [0, 16, 7]
    assert steady_after(ends) == [0, 16, 26], "fewer than at the look, so not timed until the next"


def test_prefills_alone_are_not_noted_for_ever() -> None:
    """Where answers are of one token no step comes for days."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of(), 0.05)
    one.next(batch(req()))
    for _ in range(1000):
        one.interrupted()
    assert one._run is not None
    assert len(one._run.marks) < 8


def test_the_rules_own_work_is_no_options_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The walks of a visit's first step are copied and counted within its first steps: on an H200
    those took 7% longer by it, and what was tried looked dearer than what ran."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, CHAIN, CHAIN, CHAIN], beliefs)
    counted = iter((False, False, True, False, False, False, False, False))
    monkeypatch.setattr(one, "_to_be_counted", lambda _: next(counted))
    tree = random_tree(random.Random(4), 1, 9, 6)
    accepted, outcome, alone = tree_accept(tree, tree.tokens, 8), None, req()
    one.next(batch(alone))
    for step in range(9):
        if step in (0, 8):
            one._held = None
        policy, _ = one.next(batch(alone))
        now[0] += 1_000_000 * (1 + step)  # the period that begins with this step
        if step == 8:
            break
        if outcome is not None:  # the step before is read after the next one's launch
            outcome.judge([True])
        outcome = one.outcome(batch(alone), policy, tree, accepted)
    took = [us for *_, us in seen]
    assert took == [2000, 5000, 6000, 7000, 8000], "1 is looked at, 3 is copied, counted in 4"


def test_each_step_is_chosen_by_the_beliefs_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are kept between two broadcasts, not beyond; a probe is no choice that stays."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.start(table_of(), 0.0)
    nothing = Beliefs.none(len(OPTIONS), places_of(table_of()))
    good, even = (ONE, 5200, 4200, 5600, 5700, 6000), (ONE, 2200, 2103, 2250, 2250, 2250)
    held = [
        replace(
            nothing,
            version=number,
            tokens=(tokens, tokens),
            known=(1, 1),
            probe=probe,
            probe_steps=PROBE_RUN,
        )
        for number, (tokens, probe) in enumerate(
            [(good, 0), (even, 0), (even, 1 + PLAIN), (even, 0), ((ONE,) * len(OPTIONS), 0)]
        )
    ]
    coming = iter(held)
    monkeypatch.setattr(one, "_agree", lambda *_: next(coming))
    at_hand, steps = batch(req()), chooser.SYNC_STEPS
    chosen = [[one.next(at_hand) for _ in range(steps)] for _ in range(len(held))]
    names = [[str(policy) for policy, _ in some] for some in chosen]
    versions = [[int(told.split()[-1]) for _, told in some] for some in chosen]
    assert versions == [[number] * steps for number in range(len(held))]
    assert names[0] == names[1] == names[3] == ["tree-8"] * steps
    assert names[2] == ["plain"] * PROBE_RUN + ["tree-8"] * (steps - PROBE_RUN)
    assert names[4] == ["plain"] * steps


def test_beliefs_are_in_force_as_long_as_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.start(table_of(), 0.0)
    nothing = Beliefs.none(len(OPTIONS), places_of(table_of()))
    coming = (
        replace(nothing, version=number, holds=holds) for number, holds in enumerate((1, 3, 1))
    )
    monkeypatch.setattr(one, "_agree", lambda *_: next(coming))
    steps = chooser.SYNC_STEPS
    versions = [int(one.next(batch(req()))[1].split()[-1]) for _ in range(5 * steps)]
    assert versions == [0] * steps + [1] * 3 * steps + [2] * steps


def test_what_is_kept_of_a_batch_is_kept_for_that_batch_alone() -> None:
    """Step after step of batches that differ in one thing or in none."""
    dice = random.Random(4)
    one = StepChooser(OPTIONS, FakeRanks().of(0), True, lambda at_hand: at_hand.ruled)  # type: ignore
    reqs = [req(), req(50), req(**{OPT_OUT: False}), req(), req(7)]
    at_hand, length, ruled = reqs[:2], 200, False
    seen = set()
    for _ in range(300):
        what = dice.choice(["same", "reqs", "length", "ruled", "prefill"])
        if what == "reqs":
            at_hand = dice.sample(reqs, dice.randint(1, 3))
        elif what == "length":
            length = dice.choice([200, 600, 2000])
        elif what == "ruled":
            ruled = not ruled
        elif what == "prefill":
            one.interrupted()
        now = batch(*at_hand, context=length)
        now.ruled = ruled
        assert one._shape_of(now) == shape_of(now, ruled), what
        seen.add(shape_of(now, ruled))
    assert len(seen) > 20


@pytest.mark.parametrize("decides", [True, False])
def test_a_step_that_is_not_looked_at_is_what_a_look_would_give(
    decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a chooser that looks at every step, where the host runs ahead of the device: batches,
    lengths, rules and beliefs that change now and then."""
    dice, nothing = random.Random(5), Beliefs.none(len(OPTIONS), places_of(table_of()))

    def beliefs() -> Beliefs:
        good = tuple(dice.randint(ONE, 6 * ONE) for _ in OPTIONS.nodes)
        return replace(
            nothing,
            version=dice.randint(1, 9999),
            tokens=(good, good[::-1]),
            known=(1, 1),
            probe=dice.choice([0, 0, 1 + dice.choice(NUMBERS)]),
            probe_steps=dice.choice([5, 15, 16, 40]),
            holds=dice.choice([1, 2, 8]),
        )

    coming = [beliefs() for _ in range(400)]
    # What is best depends on the context: a choice that stood beyond its lengths would be seen.
    cells = {
        (o, b, c): cost + (2000 * o * c if o > 1 else 0)
        for o, cost in enumerate(COSTS)
        for b in range(2)
        for c in range(3)
    }
    table = CostTable.measured(OPTIONS.names, (1, 16), (256, 1024, 4096), cells)
    pair = []
    for looks in (False, True):
        group = SimpleNamespace(decides=decides, host_ints=None)
        one = StepChooser(OPTIONS, group, False)  # type: ignore[arg-type]
        one.start(table, 0.0)
        some = iter(coming)
        monkeypatch.setattr(one, "_agree", lambda *_, some=some: next(some))
        if looks:
            monkeypatch.setattr(one, "_hold", lambda *_: None)
        pair.append(one)
    held = 0
    for step, now in enumerate(what_comes(pair, dice, 4000, 200)):
        first, second = (one.next(now) for one in pair)
        assert first == second, step
        held += pair[0]._held is not None
    assert held > 1000, "steps that are not looked at were among them"


def test_the_rule_hardly_costs_the_host_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of a step, of which its time is made where a small model runs on a GPU. Steps of a
    millisecond, one request after the other, a host that runs ahead, acceptance known."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), False)
    one.start(table_of((700, 800, 810, 820, 840, 880)), 0.05)
    tree_policy.HOLDER.set_current(parse_policy("auto"))
    now, calls = itertools.count(0, 1_000_000 // 2), itertools.count()
    monkeypatch.setattr(chooser.time, "perf_counter_ns", lambda: next(now))
    drafts = {}
    for option in NUMBERS[1:]:
        tree = tree_of(option, 0.9)
        accepted = tree_accept(tree, (1 + tree.depths * 8).clamp(max=56), 8)
        drafts[OPTIONS.policies[option]] = tree, accepted

    def steps(count: int) -> None:
        alone = req()
        for number in range(count):
            if number % 200 == 0:
                one.interrupted()
                alone = req()
            at_hand = batch(alone, context=100 + number % 200 * 7)
            policy, _ = one.next(at_hand)
            outcome = one.outcome(at_hand, policy, *drafts[policy]) if policy in drafts else None
            one.ended(at_hand)
            if outcome is not None:
                outcome.judge([True])

    steps(4000)
    sys.setprofile(lambda _frame, event, _what: event.endswith("call") and next(calls) and None)
    try:
        steps(2000)
    finally:
        sys.setprofile(None)
    a_step = next(calls) / 2000
    assert a_step < 40, a_step


def test_an_option_is_what_its_graph_drafts() -> None:
    """Trees are grown until they fill their graph: of 4 nodes to 7, of 8 to 15."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.captured(lambda rows: next(tier for tier in (1, 8, 16, 32) if tier >= rows))
    assert one.options.names == ("plain", "chain", "tree-7", "tree-15", "tree-31")
    assert one.options.nodes == (0, 7, 7, 15, 31)
    assert one.options.bands == ((1, 7), (8, 15), (16, 31))


def test_a_bound_is_grown_as_a_tree_of_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed tree of 4 nodes runs in the graph of 8 rows too, so a bound of 4 does not leave plain
    decoding alone."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.captured(lambda rows: next(tier for tier in (1, 8, 16, 32) if tier >= rows))
    costs = {(o, 0, 0): 1000 + o for o in range(len(one.options))}
    table = CostTable.measured(one.options.names, (1,), (256,), costs)
    one.start(table, 0.0)
    asked: list[tuple[int, ...]] = []
    none = Beliefs.none(len(one.options), places_of(table))
    monkeypatch.setattr(one, "_agree", lambda _auto, _shape, some: asked.append(some) or none)
    for rule in ("auto<=4", "auto<=7", "auto<=8", "auto<=31", "auto"):
        tree_policy.HOLDER.set_current(parse_policy(rule))
        for _ in range(chooser.SYNC_STEPS):
            one.next(batch(req()))
    every = ["plain", "chain", "tree-7", "tree-15", "tree-31"]
    names = [[one.options.names[option] for option in some] for some in asked]
    assert names == [every[:3], every[:3], every[:4], every, every]


def test_a_bound_holds_from_the_next_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`overstory policy` in the middle of what beliefs are in force for."""
    one = StepChooser(OPTIONS, FakeRanks().of(0), True)
    one.start(table_of(), 0.0)
    nothing = Beliefs.none(len(OPTIONS), places_of(table_of()))
    good = (ONE, 5200, 4200, 5600, 5700, 6000)
    believed = replace(nothing, tokens=(good, good), known=(1, 1), holds=100)
    monkeypatch.setattr(one, "_agree", lambda *_: believed)
    at_hand = batch(req())
    names = []
    for rule in ("auto", "auto", "auto<=4", "auto<=4", "auto<=7", "tree-31", "auto<=3", "auto"):
        tree_policy.HOLDER.set_current(parse_policy(rule))
        policy, told = one.next(at_hand)
        assert told.split()[0] == str(policy)
        names.append(str(policy))
    wanted = ["tree-8", "tree-8", "tree-4", "tree-4", "chain", "tree-31", "plain", "tree-8"]
    assert names == wanted


def test_steps_of_a_batch_are_timed_on_both_sides_of_one_that_is_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One ends, and another is prefilled two steps later: a visit of many steps meets that where
    there are many requests, and what it told was lost."""
    beliefs = Beliefs.none(len(OPTIONS), places_of(table_of()))
    one, now, seen = timed(monkeypatch, [PLAIN, CHAIN, PLAIN], beliefs)
    reqs = [req() for _ in range(16)]
    for number in range(14):
        if number in (1, 13):
            one._held = None
        if number == 7:
            one.interrupted()
        one.next(batch(*(reqs[1:] if number in (5, 6) else reqs)))
        now[0] += 1_000_000 * (1 + number)
    told = [3000, 4000, 9000, 10_000, 11_000, 12_000, 13_000]
    assert [(size, us) for _, size, _, us in seen] == [(16, us) for us in told]
