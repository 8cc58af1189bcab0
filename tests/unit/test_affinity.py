"""Routing by prefix and by session, within a bound on load."""

import random
from typing import Any

import pytest

from overstory.orchestrator import affinity as affinity_module
from overstory.orchestrator.affinity import BLOCK_TOKENS, Affinity, LoadBound, Routing
from overstory.orchestrator.openai_protocol import CompletionRequest

NAMES = ("a", "b", "c")


def _tokens(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(1000), k=int(blocks * BLOCK_TOKENS))


def test_the_longest_known_prefix_wins() -> None:
    routes = Affinity("prefix_affine")
    system, one, two = _tokens(1, 2), _tokens(2, 3), _tokens(3, 1)
    routes.routed(system + one, "", "a")
    routes.routed(system + two, "", "b")
    assert routes.prefers(system + one + _tokens(9, 1), "", {}, NAMES) == "a"
    assert routes.prefers(system + two + _tokens(9, 1), "", {}, NAMES) == "b"
    assert routes.prefers(system + _tokens(9, 1), "", {"a": 1}, NAMES) == "b"  # both know that much
    assert routes.prefers(_tokens(7, 4), "", {"a": 1, "b": 2}, NAMES) == "c"  # nobody does
    assert routes.prefers(one, "", {"a": 1}, NAMES) == "b"  # a part that is no beginning


def test_less_than_a_block_is_no_reason() -> None:
    routes = Affinity("prefix_affine")
    short = _tokens(1, 0.9)
    routes.routed(short, "", "c")
    assert routes.prefers(short, "", {"c": 1}, NAMES) == "a"


@pytest.mark.parametrize("routing", ["prefix_affine", "session_sticky"])
def test_no_replica_gets_more_than_the_bound(routing: Routing) -> None:
    bound = LoadBound(factor=1.25, slack=2)
    routes = Affinity(routing, bound)
    loads = dict.fromkeys(NAMES, 0)
    for _ in range(300):  # one prompt, one session: all would go to one place
        wanted = routes.prefers(_tokens(1, 5), "s", loads, NAMES)
        assert wanted is not None
        assert loads[wanted] < bound.most(loads, NAMES)
        loads[wanted] += 1
        routes.routed(_tokens(1, 5), "s", wanted)
    assert max(loads.values()) <= 1.25 * sum(loads.values()) / 3 + 3
    assert min(loads.values()) > 0


def test_a_session_stays_where_it_was() -> None:
    routes = Affinity("session_sticky")
    routes.routed(_tokens(1, 1), "ann", "b")
    assert routes.prefers(_tokens(2, 3), "ann", {"b": 1}, NAMES) == "b"
    assert routes.prefers(_tokens(1, 1), "", {}, NAMES) == "b"  # no session: by prefix
    assert routes.prefers(_tokens(2, 3), "bob", {"a": 1, "b": 1}, NAMES) == "c"
    routes.routed(_tokens(2, 3), "ann", "c")  # it had to move
    assert routes.prefers(_tokens(4, 1), "ann", {}, NAMES) == "c"


def test_what_a_replica_knew_goes_with_it() -> None:
    routes = Affinity("session_sticky")
    routes.routed(_tokens(1, 2), "ann", "a")
    routes.keep(("b", "c"))
    assert routes.prefers(_tokens(1, 2), "ann", {"b": 1}, ("b", "c")) == "c"
    assert routes.prefers(_tokens(1, 2), "ann", {}, NAMES) == "a"  # fewest calls, then by name


def test_least_loaded_and_a_single_replica_have_no_preference() -> None:
    assert Affinity().prefers(_tokens(1, 3), "s", {}, NAMES) is None
    assert Affinity("prefix_affine").prefers(_tokens(1, 3), "s", {}, ("a",)) is None


def test_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(affinity_module, "KEPT_BLOCKS", 10)
    monkeypatch.setattr(affinity_module, "KEPT_SESSIONS", 5)
    routes = Affinity("session_sticky")
    for seed in range(40):
        routes.routed(_tokens(seed, 2), f"s{seed}", "c")
    assert len(routes._blocks) <= 10
    assert len(routes._sessions) <= 5
    assert routes.prefers(_tokens(39, 2), "", {"c": 1}, NAMES) == "c"
    assert routes.prefers(_tokens(0, 2), "", {"c": 1}, NAMES) == "a"  # forgotten


def test_where_a_request_names_its_session() -> None:
    def session(**fields: Any) -> str:
        return CompletionRequest(model="m", prompt="p", **fields).session

    assert session() == ""
    assert session(user="u") == "u"
    assert session(user="u", prompt_cache_key="k") == "k"
