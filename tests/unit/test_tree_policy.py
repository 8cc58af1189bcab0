"""Tree policies: names, budgets, and the room that an engine has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overstory.workers.tree_policy import PolicyHolder, TreePolicy, policy_from_budget


@pytest.mark.parametrize("name", ["plain", "chain", "tree-1", "tree-31", "spine-8", "spine-63"])
def test_name_is_inverse_of_parse(name: str) -> None:
    assert str(TreePolicy.parse(name)) == name
    assert TreePolicy.parse(f" {name.upper()} ") == TreePolicy.parse(name)


@pytest.mark.parametrize(
    "name", ["", "tree", "tree-0", "tree-", "tree-1.5", "chain-7", "spine", "31"]
)
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tree policy"):
        TreePolicy.parse(name)


@pytest.mark.parametrize(
    ("mode", "nodes", "spine"),
    [("plain", 3, False), ("chain", 7, False), ("plain", 0, True), ("tree", 0, False)],
)
def test_contradictions_are_refused(mode: str, nodes: int, spine: bool) -> None:
    with pytest.raises(ValueError, match="polic"):
        TreePolicy(mode, nodes, spine)  # type: ignore[arg-type]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'bush'"):
        TreePolicy("bush")  # type: ignore[arg-type]


@given(budget=st.integers(0, 63), block=st.integers(2, 16), spine=st.booleans())
def test_budget_is_what_is_drafted(budget: int, block: int, spine: bool) -> None:
    policy = policy_from_budget(budget, block, spine)
    assert policy.drafted_nodes(block) == budget
    assert TreePolicy.parse(str(policy)) == policy
    if budget == 0:
        assert policy.mode == "plain"
    elif budget == block - 1:
        assert policy.mode == "chain"
    else:
        assert policy.spine_first is spine


def test_bad_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        policy_from_budget(-1, 8)
    with pytest.raises(ValueError, match="block size"):
        policy_from_budget(3, 1)


def test_holder_refuses_what_the_engine_has_no_room_for() -> None:
    holder = PolicyHolder()
    holder.set_current(TreePolicy.parse("tree-63"))  # no engine yet
    with pytest.raises(ValueError, match="at most 31"):
        holder.start(TreePolicy.parse("tree-32"), block_size=8, max_nodes=31)
    assert str(holder.current()) == "tree-63"
    holder.start(TreePolicy.parse("chain"), block_size=8, max_nodes=31)
    holder.set_current(TreePolicy.parse("spine-31"))
    with pytest.raises(ValueError, match="tree-32"):
        holder.set_current(TreePolicy.parse("tree-32"))
    assert str(holder.current()) == "spine-31"
    holder.start(TreePolicy.parse("tree-63"), block_size=8, max_nodes=63)  # a larger engine
    assert str(holder.current()) == "tree-63"
