"""Plans of defragmentation passes, as data: what they may do, what is refused, what they gain."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overstory.orchestrator.defrag_plan import (
    Plan,
    PlanRefused,
    SlotPicture,
    SlotSequence,
    StalePlan,
    check_plan,
    measure,
    permutation,
    plan_moves,
    rows_to_copy,
)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def picture(size: int, *sequences: tuple[int, ...]) -> SlotPicture:
    held = {slot for sequence in sequences for slot in sequence}
    return SlotPicture(
        size,
        tuple(SlotSequence(f"r{i}", slots(*s)) for i, s in enumerate(sequences)),
        slots(*sorted(set(range(1, size + 1)) - held)),
    )


def breaks(seen: SlotPicture) -> int:
    return sum(sequence.breaks for sequence in seen.sequences)


def plan_of(sources: Any, targets: Any, epoch: int = 3, size: int = 8) -> Plan:
    nothing = measure(picture(size))
    return Plan(epoch, size, tuple(sources), tuple(targets), nothing, nothing)


@st.composite
def pictures(draw: st.DrawFn) -> SlotPicture:
    """Requests and cached texts over random slots; some begin with a prefix of an earlier one."""
    size = draw(st.integers(1, 60))
    left = draw(st.permutations(range(1, size + 1)))
    sequences: list[SlotSequence] = []
    for i in range(draw(st.integers(0, 6))):
        taken = draw(st.integers(0, len(left)))
        own, left = left[:taken], left[taken:]
        prefix: list[int] = []
        if sequences and draw(st.booleans()):
            other = draw(st.sampled_from(sequences)).slots
            prefix = other[: draw(st.integers(0, len(other)))].tolist()
        sequences.append(SlotSequence(f"s{i}", slots(*prefix, *own), draw(st.booleans())))
    return SlotPicture(size, tuple(sequences), slots(*sorted(left)))


def test_measure_counts_runs_and_free_stretches() -> None:
    seen = measure(picture(12, (1, 2, 3, 7, 8), (5, 4)))
    assert (seen.requests, seen.rows, seen.runs, seen.worst_runs) == (2, 7, 4, 2)
    assert seen.runs_per_request == 2.0
    assert seen.contiguous_share == pytest.approx(3 / 5)
    assert (seen.free, seen.free_runs, seen.largest_free_run) == (5, 2, 4)


def test_an_empty_pool_and_a_full_one() -> None:
    empty = measure(picture(9))
    assert (empty.runs_per_request, empty.contiguous_share, empty.largest_free_run) == (0.0, 1.0, 9)
    full = measure(picture(3, (3, 2, 1)))
    assert (full.free, full.free_runs, full.largest_free_run) == (0, 0, 0)
    assert plan_moves(picture(9), 1).rows == 0


def test_only_requests_count_as_running() -> None:
    cached = SlotSequence("node", slots(5, 1, 3), running=False)
    seen = measure(SlotPicture(5, (cached,), slots(2, 4)))
    assert (seen.requests, seen.runs, seen.cached_breaks) == (0, 0, 2)


def test_interleaved_requests_are_taken_apart() -> None:
    """What decoding side by side leaves: each step's rows of one request between the others'."""
    grown = [tuple(range(1 + i, 65, 4)) for i in range(4)]
    before = picture(64, *grown)
    plan = plan_moves(before, epoch=1, row_limit=64)
    assert plan.before.runs == 64
    assert plan.after.runs == 4
    assert measure(before.renumbered(permutation(plan))) == plan.after


def test_a_long_request_is_gathered_over_several_passes() -> None:
    seen = picture(400, tuple(range(2, 400, 4)))
    for _ in range(40):
        plan = plan_moves(seen, epoch=1, row_limit=10)
        assert plan.rows <= 10
        if not plan.rows:
            break
        seen = seen.renumbered(permutation(plan))
    assert measure(seen).runs == 1


def test_what_is_contiguous_stays() -> None:
    assert plan_moves(picture(20, (1, 2, 3), (9, 10, 11, 12)), epoch=1).rows == 0
    long_enough = picture(400, (*range(1, 101), *range(200, 300)))
    assert plan_moves(long_enough, epoch=1, long_run=64).rows == 0
    assert plan_moves(long_enough, epoch=1, long_run=100).rows == 100


@settings(max_examples=150, deadline=None)
@given(pictures(), st.integers(1, 60), st.sampled_from([2, 64]))
def test_a_plan_is_bounded_valid_and_never_makes_it_worse(
    seen: SlotPicture, row_limit: int, long_run: int
) -> None:
    plan = plan_moves(seen, 7, row_limit, long_run)
    assert plan.rows <= row_limit
    check_plan(plan, 7, seen.size, row_limit)
    table = permutation(plan)
    assert sorted(table) == list(range(seen.size + 1))
    assert table[0] == 0
    after = seen.renumbered(table)
    assert measure(after) == plan.after
    assert breaks(after) * long_run + plan.rows <= breaks(seen) * long_run
    held = set(range(1, seen.size + 1)) - set(seen.free.tolist())
    assert set(plan.sources) <= held
    assert set(after.free.tolist()) == set(range(1, seen.size + 1)) - {int(table[s]) for s in held}
    assert plan_moves(pickle.loads(pickle.dumps(seen)), 7, row_limit, long_run) == plan


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_valid_moves_close_to_a_permutation(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    some = st.lists(st.integers(1, size), unique=True)
    sources = data.draw(some)
    targets = data.draw(st.permutations(range(1, size + 1)))[: len(sources)]
    table = permutation(plan_of(sources, targets, size=size))
    assert sorted(table) == list(range(size + 1))
    assert table[sources].tolist() == list(targets)
    assert set(np.flatnonzero(table != np.arange(size + 1))) <= {*sources, *targets}
    held = np.array([False, *(data.draw(st.booleans()) for _ in range(size))])
    rows = np.arange(size + 1)
    copied_from, copied_to = rows_to_copy(table, held)
    rows[copied_to] = rows[copied_from].copy()
    assert all(rows[table[slot]] == slot for slot in np.flatnonzero(held))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (plan_of([1, 1], [2, 3]), "slot 1 is used twice as a source"),
        (plan_of([1, 2], [3, 3]), "slot 3 is used twice as a target"),
        (plan_of([0], [3]), r"source slot 0 is out of range: slots are 1\.\.8"),
        (plan_of([1, 2], [3, 9]), "target slot 9 is out of range"),
        (plan_of([1, 2], [3]), "2 sources but 1 targets"),
        (plan_of([1], [2], size=9), "for 9 slots, the replica has 8"),
        (plan_of([1, 2, 3, 4, 5], [2, 3, 4, 5, 1]), "moves 5 rows, a pass at most 4"),
    ],
)
def test_a_faulty_plan_is_refused(plan: Plan, why: str) -> None:
    with pytest.raises(PlanRefused, match=why):
        check_plan(plan, epoch=3, size=8, row_limit=4)


def test_a_plan_of_another_epoch_is_refused_as_such() -> None:
    with pytest.raises(StalePlan, match="epoch 3, the replica is at 4"):
        check_plan(plan_of([1], [2]), epoch=4, size=8, row_limit=4)


def test_the_digest_is_that_of_the_moves() -> None:
    plan = plan_of([1, 2], [2, 3])
    others = [plan_of([2, 1], [2, 3]), plan_of([1, 2], [2, 4]), plan_of([1, 2], [2, 3], epoch=4)]
    assert len({plan.digest, *(other.digest for other in others)}) == 4
    assert pickle.loads(pickle.dumps(plan)).digest == plan.digest
    assert dataclasses.replace(plan, before=measure(picture(8, (1,)))).digest == plan.digest


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="wanted at least 1"):
        plan_moves(picture(4, (1, 3)), 1, *limits)
