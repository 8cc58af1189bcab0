"""Random allocations, shares, frees and passes against a model: every token stays readable."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from overstory.orchestrator.defrag_plan import (
    Plan,
    SlotPicture,
    SlotSequence,
    check_plan,
    measure,
    permutation,
    plan_moves,
    rows_to_copy,
)

SIZE = 24
EPOCH = 5


class PoolMachine(RuleBasedStateMachine):
    """A pool whose rows hold tokens, an allocator, and requests that share prefixes.

    The model is what each request has written: `texts`. A plan may be carried out long after its
    picture, as on a busy replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = np.zeros(SIZE + 1, dtype=np.int64)
        self.free = np.arange(1, SIZE + 1)
        self.requests: dict[int, np.ndarray] = {}
        self.texts: dict[int, list[int]] = {}
        self.plans: list[Plan] = []
        self.written = 0

    def allocate(self, number: int, count: int) -> None:
        got, self.free = self.free[:count], self.free[count:]
        tokens = range(self.written + 1, self.written + 1 + len(got))
        self.written += len(got)
        self.rows[got] = tokens
        self.requests[number] = np.concatenate((self.requests[number], got))
        self.texts[number] += tokens

    def some_request(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.requests)))

    @rule(count=st.integers(0, 8))
    def begin(self, count: int) -> None:
        number = self.written * 100 + len(self.requests)
        if number not in self.requests:
            self.requests[number], self.texts[number] = np.zeros(0, np.int64), []
            self.allocate(number, count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def extend(self, data: st.DataObject, count: int) -> None:
        self.allocate(self.some_request(data), count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 4))
    def share(self, data: st.DataObject, count: int) -> None:
        of = self.some_request(data)
        length = data.draw(st.integers(0, len(self.texts[of])))
        number = -1 - self.written * 100 - len(self.requests)
        if number not in self.requests:
            self.requests[number] = self.requests[of][:length]
            self.texts[number] = self.texts[of][:length]
            self.allocate(number, count)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        gone = self.some_request(data)
        slots = self.requests.pop(gone)
        del self.texts[gone]
        self.free = np.concatenate((self.free, slots[~np.isin(slots, self.held())]))

    @rule(row_limit=st.integers(1, SIZE))
    def plan(self, row_limit: int) -> None:
        sequences = tuple(SlotSequence(str(k), slots) for k, slots in self.requests.items())
        seen = SlotPicture(SIZE, sequences, np.sort(self.free))
        self.plans = [*self.plans[-2:], plan_moves(seen, EPOCH, row_limit, long_run=16)]

    @rule(data=st.data())
    def plan_at_random(self, data: st.DataObject) -> None:
        slots = st.lists(st.integers(1, SIZE), unique=True, max_size=6)
        sources, targets = data.draw(slots), data.draw(slots)
        count = min(len(sources), len(targets))
        nothing = measure(SlotPicture(SIZE, (), self.free))
        moves = (tuple(sources[:count]), tuple(targets[:count]))
        self.plans = [*self.plans[-2:], Plan(EPOCH, SIZE, *moves, nothing, nothing)]

    @precondition(lambda self: self.plans)
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        plan = self.plans.pop(data.draw(st.integers(0, len(self.plans) - 1)))
        check_plan(plan, EPOCH, SIZE, SIZE)
        table = permutation(plan)
        held = np.ones(SIZE + 1, dtype=bool)
        held[self.free] = held[0] = False
        sources, targets = rows_to_copy(table, held)
        assert len(sources) <= 2 * plan.rows
        self.rows[targets] = self.rows[sources].copy()
        self.rows[np.setdiff1d(sources, targets)] = -1
        self.free = table[self.free]
        self.requests = {number: table[slots] for number, slots in self.requests.items()}

    def held(self) -> np.ndarray:
        return np.unique(np.concatenate([np.zeros(0, np.int64), *self.requests.values()]))

    @invariant()
    def every_token_is_readable(self) -> None:
        for number, slots in self.requests.items():
            assert self.rows[slots].tolist() == self.texts[number]

    @invariant()
    def every_slot_is_free_or_held(self) -> None:
        assert sorted([*self.free, *self.held()]) == list(range(1, SIZE + 1))


def run(examples: int) -> None:
    machine = type("Machine", (PoolMachine,), {})
    machine.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=25, deadline=None
    )
    machine.TestCase("runTest").runTest()


def test_pool_against_the_model() -> None:
    run(40)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_pool_against_the_model_10_000_times() -> None:
    run(10_000)
