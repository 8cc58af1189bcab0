"""Comparing digest chains whose reports arrive at different times."""

import pytest

from overstory.orchestrator.digest_compare import DigestComparison
from overstory.workers.digest import DigestChain, RequestFacts, StepFacts, explain_difference


def facts(token=7, length=9, slots=(3,), free=10):
    return StepFacts((RequestFacts("r", (token,), length, slots),), free)


def links(*names, start=1):
    return [(start + index, name) for index, name in enumerate(names)]


def test_links_wait_until_every_rank_has_reported_them():
    comparison = DigestComparison(2)
    comparison.add(0, links("a", "b", "c"))
    assert comparison.compare() is None
    assert comparison.compared == 0
    comparison.add(1, links("a", "b"))
    assert comparison.compare() is None
    assert comparison.compared == 2
    assert (comparison.heard(0), comparison.heard(1)) == (3, 2)


def test_links_reported_twice_count_once():
    comparison = DigestComparison(2)
    for _ in range(2):
        comparison.add(0, links("a", "b"))
        comparison.add(1, links("a", "b"))
    assert comparison.compare() is None
    assert comparison.compared == 2


def test_the_first_difference_names_forward_and_rank():
    comparison = DigestComparison(2)
    comparison.add(0, links("a", "b", "c"))
    comparison.add(1, links("a", "x", "y"))
    found = comparison.compare()
    assert (found.forward, found.rank, found.other) == (2, 1, 0)


@pytest.mark.parametrize("odd", [0, 1, 2, 3])
def test_among_many_the_odd_one_out_is_named(odd):
    comparison = DigestComparison(4)
    for rank in range(4):
        comparison.add(rank, links("a", "x" if rank == odd else "b"))
    found = comparison.compare()
    assert (found.forward, found.rank) == (2, odd)
    assert found.other != odd


def test_a_forward_that_one_rank_skipped_is_a_difference():
    comparison = DigestComparison(2)
    comparison.add(0, [(1, "a"), (2, "b")])
    comparison.add(1, [(1, "a"), (3, "b")])
    assert comparison.compare().forward == 2


def test_equal_facts_make_equal_chains_and_a_difference_stays():
    one, other = DigestChain(), DigestChain()
    for forward in (1, 2, 4):
        assert one.add(forward, facts(forward)) == other.add(forward, facts(forward))
    one.add(5, facts(1))
    other.add(5, facts(2))
    one.add(6, facts())
    other.add(6, facts())
    assert one.after(4)[0] != other.after(4)[0]
    assert one.after(5) != other.after(5), "a chain covers all before it"
    assert one.after(2)[0][0] == 4


@pytest.mark.parametrize("changed", [{"token": 8}, {"length": 10}, {"slots": (4,)}, {"free": 11}])
def test_each_fact_changes_the_digest_and_is_named(changed):
    one, other = DigestChain(), DigestChain()
    assert one.add(1, facts()) != other.add(1, facts(**changed))
    words = explain_difference(one.facts(1), other.facts(1))
    name = {"token": "emitted", "free": "free KV slots"}.get(*changed, next(iter(changed)))
    assert name in words


def test_the_forward_number_is_part_of_the_digest():
    assert DigestChain().add(1, facts()) != DigestChain().add(2, facts())
