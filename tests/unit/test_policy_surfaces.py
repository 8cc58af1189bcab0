"""Where people meet the automatic policy: names, deployment file, leases, bench rows, status."""

from __future__ import annotations

from typing import Any

import pytest

from overstory.orchestrator.auto_text import auto_line, policy_at_work
from overstory.orchestrator.bench_rows import counted, parse_settings
from overstory.orchestrator.engine_flags import resolve_engine
from overstory.orchestrator.replica_setup import policy_environment
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.spec import SpecError, parse_spec
from overstory.workers.policy import FLOOR_ENV, MEASURE_SECONDS_ENV, OPT_OUT
from overstory.workers.tree_policy import AutoPolicy, PolicyHolder, TreePolicy, parse_policy

PAIR = {"model": "overstory-tiny", "drafter": "overstory-tiny-drafter"}


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("auto", AutoPolicy()),
        (" AUTO<=15 ", AutoPolicy(15)),
        ("tree-15", TreePolicy("tree", 15)),
        ("plain", TreePolicy("plain")),
    ],
)
def test_names(text: str, policy: Any) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("text", ["auto<=0", "auto<15", "auto<=", "automatic", "auto-15", "bush"])
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(ValueError, match="'auto' and 'auto<=N'"):
        parse_policy(text)


def test_auto_needs_a_table_and_room() -> None:
    holder = PolicyHolder()
    with pytest.raises(ValueError, match="by a cost table"):
        holder.start(AutoPolicy(), block_size=8, max_nodes=31)
    holder.start(TreePolicy("chain"), block_size=8, max_nodes=31)
    with pytest.raises(ValueError, match="has not measured"):
        holder.set_current(AutoPolicy())
    holder.start(AutoPolicy(), block_size=8, max_nodes=31, automatic=True)
    holder.set_current(AutoPolicy(31))
    with pytest.raises(ValueError, match="drafts 32 nodes"):
        holder.set_current(AutoPolicy(32))
    assert str(holder.current()) == "auto<=31"


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        ({"policy": "auto"}, "auto"),
        ({"policy": "auto", "budget": 15}, "auto"),
        ({"policy": "auto", "budget": 4}, "auto<=4"),
        ({"policy": "auto", "budget": 7}, "auto"),
        ({"budget": 15}, "tree-15"),
    ],
)
def test_a_deployment_starts_with_its_rule(tree: dict[str, Any], rule: str) -> None:
    spec = parse_spec(PAIR | {"tree": tree})
    settings = resolve_engine(spec)
    assert str(settings.rule) == rule
    environment = policy_environment(spec)
    assert environment["OVERSTORY_TREE_POLICY"] == rule
    assert (MEASURE_SECONDS_ENV in environment) == rule.startswith("auto")
    rows = settings.server_args["speculative_num_draft_tokens"]
    assert rows == 1 + max(tree.get("budget", 31), 7)


def test_settings_of_the_policy_reach_the_ranks() -> None:
    tree = {"policy": "auto", "measure_s": 3, "acceptance_floor": 0.2}
    environment = policy_environment(parse_spec(PAIR | {"tree": tree}))
    assert environment[MEASURE_SECONDS_ENV] == "3.0"
    assert environment[FLOOR_ENV] == "0.2"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"policy": "auto", "budget": 0}, "tree.budget: 0"),
        ({"policy": "auto", "spine_first": True}, "tree.spine_first: True"),
        ({"policy": "sometimes"}, "tree.policy"),
        ({"acceptance_floor": 1.0}, "tree.acceptance_floor"),
        ({"measure_s": 0}, "tree.measure_s"),
    ],
)
def test_contradictions_in_the_file(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(PAIR | {"tree": tree})


def test_bench_counts_all_that_auto_chose() -> None:
    def snapshot(chain: int, tree: int) -> dict[str, Any]:
        def row(n: int) -> dict[str, Any]:
            return {"forwards": n, "requests": n, "rows": 8 * n, "tokens": 3 * n,
                    "offered_by_depth": [n], "accepted_by_depth": [n]}  # fmt: skip

        return {"verify": {"chain": row(chain), "tree-8": row(tree), "plain": row(5)}}

    before, after = [snapshot(2, 10)], [snapshot(3, 40)]
    total = counted(before, after, "auto")
    assert total["forwards"] == 31
    assert total["tokens"] == 93
    assert total["choices"] == {"chain": 1, "tree-8": 30}
    assert counted(before, after, "tree-8")["choices"] == {"tree-8": 30}
    settings = parse_settings("plain,auto,auto<=15", 1, 1, "1", "0", 1)
    assert settings.modes == ("plain", "auto", "auto<=15")


def _report(**more: Any) -> dict[str, Any]:
    kind = {"seen": 40, "tokens": {"plain": 1.0, "tree-8": 4.256}}
    return {
        "choice": "tree-8", "why": "best", "table": 7, "beliefs": 3, "drafter": "on",
        "first_accepted": 0.91, "switched_off": 0, "greedy": kind,
        "sampled": {"seen": 0, "tokens": {"plain": 1.0, "tree-8": 1.0}},
    } | more  # fmt: skip


def test_status_says_what_was_chosen() -> None:
    assert auto_line(None) == ""
    assert auto_line({"choice": None}) == ""
    assert auto_line(_report()) == (
        "tree-8 (best); tokens per step expected: 4.26 greedy; drafter on; "
        "91% of first tokens right"
    )
    off = _report(choice="plain", why="off", drafter="off", first_accepted=0.01, switched_off=2)
    assert "drafter off; 1% of first tokens right; switched off 2 times" in auto_line(off)
    of_rank_1 = {"choice": "chain", "why": "probe", "table": 7, "beliefs": 3}
    assert auto_line(of_rank_1) == "chain (probe)"


def test_figures_are_those_of_the_choice_only_under_auto() -> None:
    assert policy_at_work({"policy": "auto", "auto": _report()}) == "tree-8"
    assert policy_at_work({"policy": "auto<=15", "auto": {"choice": None}}) == "auto<=15"
    assert policy_at_work({"policy": "tree-31", "auto": _report()}) == "tree-31"
    assert policy_at_work({"policy": "plain"}) == "plain"


def test_requests_opt_out_by_a_field_of_their_own() -> None:
    assert "custom_params" not in Sampling(seed=1, max_new_tokens=5).engine_params()
    spared = Sampling(seed=1, max_new_tokens=5, speculate=False)
    assert spared.engine_params()["custom_params"] == {OPT_OUT: False}
    assert spared.after(2).engine_params()["custom_params"] == {
        OPT_OUT: False,
        "overstory_earlier_output": 2,
    }
