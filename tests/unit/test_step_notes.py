"""What batches did, noted step by step and linked a few at a time."""

from __future__ import annotations

import weakref
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from overstory.workers.digest import DigestChain, explain_difference
from overstory.workers.step_notes import CHOICE, STEPS, StepNotes


class _Request:
    """As much of SGLang's `Req` as is noted."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.origin_input_ids = [1, 2, 3]
        self.output_ids = array("q")
        self.kv_committed_len = 3
        self.finished_reason: object | None = None


class _Rank:
    """Notes of one rank, and its chain."""

    def __init__(self, requests: int = 2) -> None:
        self.chain = DigestChain()
        self.free = 100
        self.notes = StepNotes(self.chain, self._slots, lambda: self.free)
        self.requests = [_Request(f"r{i}") for i in range(requests)]
        self.forward = 0

    @staticmethod
    def _slots(req: Any, start: int, end: int) -> tuple[int, ...]:
        return tuple(range(10 + start, 10 + end))

    def step(self, *given: list[int], choice: str = "chain") -> None:
        """One batch of all requests, each of which gets ``given``."""
        self.forward += 1
        for request, tokens in zip(self.requests, given, strict=True):
            request.output_ids.extend(tokens)
            request.kv_committed_len += len(tokens)
        batch = SimpleNamespace(reqs=self.requests, forward_iter=self.forward)
        self.notes.note(batch, SimpleNamespace(**{CHOICE: choice}))

    def numbers(self) -> list[int]:
        """Of its links."""
        return [forward for forward, _ in self.chain.after(0).links]


def test_batches_are_linked_a_few_at_a_time_and_none_twice() -> None:
    rank = _Rank()
    for number in range(2 * STEPS + 3):
        rank.step([number], [number, 7])
    assert rank.numbers() == [STEPS, 2 * STEPS]
    rank.notes.close()
    rank.notes.close()
    assert rank.numbers() == [STEPS, 2 * STEPS, 2 * STEPS + 3]
    facts = rank.chain.facts(2 * STEPS + 3)
    assert facts is not None
    assert facts.forwards == [2 * STEPS + 1, 2 * STEPS + 2, 2 * STEPS + 3]
    assert list(facts.emitted()) == [
        {"r0": (number,), "r1": (number, 7)} for number in range(2 * STEPS, 2 * STEPS + 3)
    ]
    first, second = facts.requests
    assert (first.begun, first.length) == (2 * STEPS, 3 + 2 * STEPS + 3)
    assert second.slots == tuple(range(13 + 4 * STEPS, 13 + 4 * STEPS + 6))


def test_the_end_of_a_request_closes_a_link_so_that_an_answer_is_always_covered() -> None:
    rank = _Rank()
    rank.step([1], [2])
    rank.requests[1].finished_reason = KeyError()
    rank.step([1], [2])
    assert rank.numbers() == [2]
    facts = rank.chain.facts(2)
    assert facts is not None
    assert [request.finished for request in facts.requests] == ["", "KeyError"]


@pytest.mark.parametrize("wrong", range(1, STEPS + 1))
def test_a_token_that_differs_is_caught_in_its_link_and_its_forward_named(wrong: int) -> None:
    one, other = _Rank(), _Rank()
    for number in range(1, STEPS + 1):
        one.step([5, 6], [9])
        other.step([5, 6], [8 if number == wrong else 9])
    assert one.numbers() == other.numbers() == [STEPS]
    assert one.chain.after(0) != other.chain.after(0)
    words = explain_difference(one.chain.facts(STEPS), other.chain.facts(STEPS), STEPS)
    assert words == f"forward {wrong}: request r1: emitted (9,) and (8,)"


def test_tokens_given_at_other_steps_differ_though_the_texts_are_the_same() -> None:
    one, other = _Rank(1), _Rank(1)
    for first, second in (([5], [5, 6]), ([6, 7], [7])):
        one.step(first)
        other.step(second)
    for rank in (one, other):
        rank.notes.close()
    assert one.requests[0].output_ids == other.requests[0].output_ids
    words = explain_difference(one.chain.facts(2), other.chain.facts(2), 2)
    assert words == "forward 1: request r0: emitted (5,) and (5, 6)"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rank: setattr(rank, "free", 99), "free KV slots 100 and 99"),
        (lambda rank: rank.requests.reverse(), "batches of"),
        (lambda rank: setattr(rank, "forward", 1), "the other rank took in forward 2"),
        (lambda rank: rank.step([0], [0], choice="plain"), "tree policy 'chain' and 'plain'"),
    ],
)
def test_every_other_fact_is_covered(spoil: Any, words: str) -> None:
    one, other = _Rank(), _Rank()
    spoil(other)
    for rank in (one, other):
        if not rank.forward:
            rank.step([0], [0])
        rank.requests = rank.requests[:1]
        rank.step([1])
        rank.notes.close()
    assert one.chain.after(0) != other.chain.after(0)
    found = explain_difference(*(rank.chain.facts(rank.forward) for rank in (one, other)), 2)
    assert words in found


def test_a_retracted_request_starts_over() -> None:
    rank = _Rank(1)
    rank.step([4, 5])
    rank.notes.close()
    rank.requests[0].kv_committed_len = 0
    rank.step([6])
    rank.notes.close()
    facts = rank.chain.facts(2)
    assert facts is not None
    assert facts.requests[0].slots == ()
    assert list(facts.emitted()) == [{"r0": (6,)}]


def test_what_has_ended_is_not_held() -> None:
    rank = _Rank(1)
    rank.requests[0].finished_reason = KeyError()
    rank.step([1])
    gone = weakref.ref(rank.requests.pop())
    assert rank.chain.facts(1) is not None
    assert gone() is None


@pytest.mark.parametrize(
    ("steps", "links"), [(20, [3, 11, 19, 22]), (3, [3, 4, 5]), (64, [3, 33, 63]), (2000, [3, 259])]
)
def test_a_link_ends_where_a_lease_begins_and_shortly_before_half_of_it(
    steps: int, links: list[int]
) -> None:
    """At half of it a report is due, when the last batch is still in flight."""
    rank = _Rank(1)
    for _ in range(3):
        rank.step([1])
    rank.notes.lease(steps)
    for _ in range(min(steps - 1, 300)):
        rank.step([1])
    rank.notes.lease(steps)
    assert rank.numbers()[: len(links)] == links
