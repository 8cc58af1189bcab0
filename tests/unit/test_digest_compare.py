"""Comparing digest chains whose reports arrive at different times."""

from array import array

import pytest

from overstory.orchestrator.digest_compare import DigestComparison
from overstory.workers import digest
from overstory.workers.digest import (
    DigestChain,
    LinkFacts,
    LinksKept,
    RequestFacts,
    Stretch,
    explain_difference,
)


def facts(forward, token=7, length=9, slots=(3,), free=10, choice="chain"):
    """A link of one batch that gave one token."""
    request = RequestFacts("r", 4, array("q", [token]), length, slots)
    return LinkFacts([forward], [5], [Stretch(0, choice, (0,))], [request], free)


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
        assert one.add(facts(forward)) == other.add(facts(forward))
    one.add(facts(5, 1))
    other.add(facts(5, 2))
    one.add(facts(6))
    other.add(facts(6))
    assert one.after(4).links[0] != other.after(4).links[0]
    assert one.after(5) != other.after(5), "a chain covers all before it"
    assert one.after(2).links[0][0] == 4


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token": 8}, "request r: emitted (7,) and (8,)"),
        ({"length": 10}, "request r: length 9 and 10"),
        ({"slots": (4,)}, "request r: slots (3,) and (4,)"),
        ({"free": 11}, "free KV slots 10 and 11"),
        ({"choice": "plain"}, "tree policy 'chain' and 'plain'"),
    ],
)
def test_each_fact_changes_the_digest_and_is_named(changed, words):
    one, other = DigestChain(), DigestChain()
    assert one.add(facts(1)) != other.add(facts(1, **changed))
    assert explain_difference(one.facts(1), other.facts(1), 1) == f"forward 1: {words}"


def test_the_forward_number_is_part_of_the_digest():
    assert DigestChain().add(facts(1)) != DigestChain().add(facts(2))


def test_a_chain_says_up_to_where_it_has_forgotten(monkeypatch):
    monkeypatch.setattr(digest, "LINKS_KEPT", 3)
    chain = DigestChain()
    for forward in (2, 4, 6):
        chain.add(facts(forward))
    assert chain.after(0).forgotten == 0
    chain.add(facts(8))
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
        one.add(facts(forward, token=1))
        other.add(facts(forward, token=2 if forward == 3 else 1))
    comparison = DigestComparison(2)
    comparison.add(0, one.after(0))
    comparison.add(1, LinksKept(other.after(5).links, 5))
    assert comparison.compare().forward == 6


def test_a_forward_skipped_after_a_late_start_is_a_difference():
    comparison = DigestComparison(2)
    comparison.add(0, links("f", "g", start=6, forgotten=5))
    comparison.add(1, kept((7, "g"), forgotten=4))
    assert comparison.compare().forward == 6


def test_no_two_links_are_encoded_alike():
    """Whatever stands in one list instead of the next one, or is split differently."""
    tokens = array("q", [5, 6])

    def one(forwards, given, stretches, requests, free=1):
        stretches = [Stretch(*fields) for fields in stretches]
        return LinkFacts(forwards, given, stretches, list(map(request, requests)), free)

    def request(fields):
        rid, begun, given, length, slots, finished = fields
        return RequestFacts(rid, begun, array("q", given), length, slots, finished)

    chain, plain = (0, "chain", (0,)), ("r", 4, tokens, 9, (7, 8), "")
    different = [
        one([3], [2], [chain], [plain]),
        one([3], [2], [chain], [plain], free=2),
        one([4], [2], [chain], [plain]),
        one([3], [2], [(0, "plain", (0,))], [plain]),
        one([3], [], [(0, "chain", (0, 2))], [plain]),
        one([3], [0, 2], [(0, "chain", ())], [plain]),
        one([3, 2], [], [chain], [plain]),
        one([], [3, 2], [chain], [plain]),
        one([3, 0], [2], [(0, "chain", ()), (0, "", (2,))], [plain]),
        one([3, 3], [2, 2], [chain], [plain]),
        one([3, 3], [2, 2], [chain, (1, "chain", (0,))], [plain]),
        one([3], [2], [chain], [("s", *plain[1:])]),
        one([3], [2], [chain], [("r", 5, *plain[2:])]),
        one([3], [2], [chain], [("r", 4, [6, 5], 9, (7, 8), "")]),
        one([3], [2], [chain], [("r", 4, [5], 9, (7, 8), "")]),
        one([3], [2], [chain], [("r", 4, [5, 6, 7], 9, (8,), "")]),
        one([3], [2], [chain], [("r", 4, tokens, 8, (7, 8), "")]),
        one([3], [2], [chain], [("r", 4, tokens, 9, (7,), "")]),
        one([3], [2], [chain], [("r", 4, tokens, 9, (7, 8), "x")]),
        one([3], [2], [chain], [("rx", 4, tokens, 9, (7, 8), "")]),
        one([3], [2], [chain], [("", 4, tokens, 9, (7, 8), "r")]),
        one([3], [2], [chain], [plain, ("", 0, [], 0, (), "")]),
        one([3], [2], [chain], []),
        one([], [], [], [plain]),
    ]
    encoded = [link.encoded() for link in different]
    assert len(set(encoded)) == len(different)
    assert one([3], [2], [chain], [plain]).encoded() == encoded[0]


def test_facts_are_kept_by_the_batches_behind_them(monkeypatch):
    monkeypatch.setattr(digest, "BATCHES_KEPT", 3)
    chain = DigestChain()
    for forward in (2, 4, 6, 8):
        chain.add(LinkFacts([forward - 1, forward], [], [Stretch(0, "", ())], [], 1))
    assert [forward for forward in (2, 4, 6, 8) if chain.facts(forward)] == [6, 8]
    chain.add(facts(9))
    assert [forward for forward in (6, 8, 9) if chain.facts(forward)] == [8, 9]
