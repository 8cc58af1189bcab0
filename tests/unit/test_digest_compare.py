"""Comparing digest chains whose reports arrive at different times."""

import pytest

from overstory.orchestrator.digest_compare import DigestComparison
from overstory.workers import digest
from overstory.workers.digest import (
    DigestChain,
    LinksKept,
    RequestFacts,
    StepFacts,
    explain_difference,
)


def facts(token=7, length=9, slots=(3,), free=10):
    return StepFacts((RequestFacts("r", (token,), length, slots),), free)


def links(*names, start=1, forgotten=0):
    return kept(*((start + index, name) for index, name in enumerate(names)), forgotten=forgotten)


def kept(*some, forgotten=0):
    return LinksKept(some, forgotten)


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
    comparison.add(0, kept((1, "a"), (2, "b")))
    comparison.add(1, kept((1, "a"), (3, "b")))
    assert comparison.compare().forward == 2


def test_equal_facts_make_equal_chains_and_a_difference_stays():
    one, other = DigestChain(), DigestChain()
    for forward in (1, 2, 4):
        assert one.add(forward, facts(forward)) == other.add(forward, facts(forward))
    one.add(5, facts(1))
    other.add(5, facts(2))
    one.add(6, facts())
    other.add(6, facts())
    assert one.after(4).links[0] != other.after(4).links[0]
    assert one.after(5) != other.after(5), "a chain covers all before it"
    assert one.after(2).links[0][0] == 4


@pytest.mark.parametrize("changed", [{"token": 8}, {"length": 10}, {"slots": (4,)}, {"free": 11}])
def test_each_fact_changes_the_digest_and_is_named(changed):
    one, other = DigestChain(), DigestChain()
    assert one.add(1, facts()) != other.add(1, facts(**changed))
    words = explain_difference(one.facts(1), other.facts(1))
    name = {"token": "emitted", "free": "free KV slots"}.get(*changed, next(iter(changed)))
    assert name in words


def test_the_forward_number_is_part_of_the_digest():
    assert DigestChain().add(1, facts()) != DigestChain().add(2, facts())


def test_a_chain_says_up_to_where_it_has_forgotten(monkeypatch):
    monkeypatch.setattr(digest, "LINKS_KEPT", 3)
    chain = DigestChain()
    for forward in (2, 4, 6):
        chain.add(forward, facts())
    assert chain.after(0).forgotten == 0
    chain.add(8, facts())
    window = chain.after(0)
    assert [forward for forward, _ in window.links] == [4, 6, 8]
    assert window.forgotten == 2


def test_windows_that_begin_at_different_forwards_are_no_difference():
    comparison = DigestComparison(2)
    comparison.add(0, links("c", "d", "e", start=3, forgotten=2))
    comparison.add(1, links("e", "f", start=5, forgotten=4))
    assert comparison.compare() is None
    assert comparison.compared == 5
    comparison.add(0, links("f", start=6, forgotten=2))
    assert comparison.compare() is None
    assert comparison.compared == 6


def test_windows_that_have_no_forward_in_common_yet_wait():
    comparison = DigestComparison(2)
    comparison.add(0, links("a", "b"))
    comparison.add(1, links("d", "e", start=4, forgotten=3))
    assert comparison.compare() is None
    comparison.add(0, links("c", "d", "x", start=3))
    assert comparison.compare().forward == 5


def test_links_that_grew_too_old_during_a_silence_are_no_difference():
    comparison = DigestComparison(2)
    for rank in (0, 1):
        comparison.add(rank, links("a", "b"))
    comparison.add(0, links("c", "d", "e", "f", start=3, forgotten=2))
    comparison.add(1, links("e", "f", start=5, forgotten=4))
    assert comparison.compare() is None
    assert comparison.compared == 6


def test_a_difference_among_skipped_links_shows_in_the_first_common_one():
    one, other = DigestChain(), DigestChain()
    for forward in range(1, 9):
        one.add(forward, facts(token=1))
        other.add(forward, facts(token=2 if forward == 3 else 1))
    comparison = DigestComparison(2)
    comparison.add(0, one.after(0))
    comparison.add(1, LinksKept(other.after(5).links, 5))
    assert comparison.compare().forward == 6


def test_a_forward_skipped_after_a_late_start_is_a_difference():
    comparison = DigestComparison(2)
    comparison.add(0, links("f", "g", start=6, forgotten=5))
    comparison.add(1, kept((7, "g"), forgotten=4))
    assert comparison.compare().forward == 6
