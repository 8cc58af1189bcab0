"""The live view of `overstory status --watch`, from a picture of a deployment."""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console
from status_picture import LOAD, STEPS, picture, rank

from overstory.orchestrator import status
from overstory.orchestrator.status_live import (
    bar,
    draw_tree,
    faults,
    fitted_view,
    live_view,
    pool_map,
)
from overstory.orchestrator.step_figures import current_figures, policy_figures


def screen(shown: dict[str, Any]) -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live_view(shown))
    return console.export_text()


def test_figures_of_a_policy() -> None:
    first, second = policy_figures(STEPS)
    assert (first.policy, second.policy) == ("tree-15", "plain")
    assert first.tokens_per_forward == 3.5
    assert first.rows_per_forward == 32
    assert first.accepted == (0.8, 0.45, 0.04)
    assert first.stage_ms["verify"] == 80.0
    assert first.slowest == "verify"
    assert second.slowest is None


def test_where_a_rule_chooses_the_most_used_policy_is_shown() -> None:
    shown = current_figures(STEPS, "auto")
    assert shown is not None
    assert shown.policy == "tree-15"
    assert current_figures(STEPS, "plain") == policy_figures(STEPS)[1]
    assert current_figures(None, "plain") is None


def test_bars() -> None:
    assert bar(0.5, width=4) == "██··"
    assert bar(0.25, 0.75, width=4) == "█▒▒·"
    assert bar(2.0, width=4) == "████"
    assert bar(0.0, width=4) == "····"


def test_pool_map_has_requests_cache_and_free() -> None:
    assert (pool_map(LOAD).count("█"), pool_map(LOAD).count("▒")) == (30, 15)
    assert set(pool_map({})) == {"█"}


def test_tree_by_depth() -> None:
    assert draw_tree(policy_figures(STEPS)[0]) == "■──●──○──·"


def test_everything_is_on_the_screen() -> None:
    text = screen(picture())
    for part in (
        "kimi  kimi-k2.6 at http://h:8000  ready",
        "gateway: 2 of 32 sequences running, 3 requests queued",
        "controller: policy tree-15, leases of 64 steps",
        "replica r1: leased",
        "queue  2 running, 1 waiting",
        "80%",
        "■──●──○──·",
        "requests 500",
        "free 250  of 1000 slots",
        "4 s ago: 2 requests, 500 rows in 20 runs",
        "digests of all ranks equal up to forward 101",
    ):
        assert part in text, part
    assert text.count("61.5") == 2
    assert "last faults" not in text


def test_faults_are_on_the_screen() -> None:
    broken = picture(ready=False, reason="no replica")
    broken["controller"]["health"] = [
        {"name": "r0", "state": "RETIRED", "reason": "rank 1 died\nmore", "failed_lives": 3}
    ]
    broken["controller"]["replicas"][0].update(phase="condemned", reason="digests differ")
    text = screen(broken)
    assert "not ready: no replica" in text
    assert "last faults" in text
    assert faults(broken) == ["r0: RETIRED: rank 1 died", "r1: condemned: digests differ"]


def _left(picture: dict[str, Any], as_told: bool) -> dict[str, Any]:
    """The picture with a replica that has gone, asked for or not."""
    gone = {"name": "r0", "phase": "lost", "reason": "rank-0 is gone", "digests_equal_up_to": 3}
    picture["controller"]["replicas"].insert(0, {**gone, "ranks": []})
    slot = {"name": "r0", "state": "RETIRED", "reason": "it was told to end", "failed_lives": 0}
    picture["controller"]["health"].append({**slot, "as_told": as_told})
    return picture


def test_a_replica_that_left_as_told_is_no_fault() -> None:
    assert "r0" not in screen(_left(picture(), True))
    assert faults(_left(picture(), True)) == []
    assert faults(_left(picture(), False)) == [
        "r0: RETIRED: it was told to end",
        "r0: lost: rank-0 is gone",
    ]


@pytest.mark.parametrize("replicas", [1, 2, 8])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 18), (200, 60), (40, 20)])
def test_faults_and_every_replica_are_on_any_screen(width: int, height: int, replicas: int) -> None:
    shown = picture(ready=False, reason="no replica")
    one = shown["controller"]["replicas"][0] | {"ranks": [rank(number) for number in range(8)]}
    shown["controller"]["replicas"] = [one | {"name": f"r{number}"} for number in range(replicas)]
    shown["controller"]["health"][0] |= {"state": "SUSPECT", "reason": "no progress"}
    console = Console(width=width, height=height, file=open("/dev/null", "w"))  # noqa: SIM115
    lines = console.render_lines(fitted_view(shown, console))
    assert len(lines) <= height
    text = "\n".join("".join(part.text for part in line).rstrip() for line in lines)
    assert "r1: SUSPECT: no progress" in text
    assert [name for name in range(replicas) if f"replica r{name}: leased" not in text] == []


def test_there_is_as_much_detail_as_the_screen_has_lines_for() -> None:
    def lines(height: int) -> str:
        console = Console(width=80, height=height, file=open("/dev/null", "w"))  # noqa: SIM115
        rows = console.render_lines(fitted_view(picture(), console))
        return "\n".join("".join(part.text for part in row) for row in rows)

    assert "digests of all ranks" in lines(24)
    assert "accepted by depth, %: 80 45 4" in lines(16)
    assert "and 1 more rank" in lines(16)
    assert "replica r1: leased  tree-15  61.5 tokens/s  2 running, 1 waiting  KV 75%" in lines(8)


def test_nothing_answers() -> None:
    silent = picture(serve=None, controller=None, gateway=None)
    assert "no controller answers" in screen(silent)
    assert faults(silent)[-1] == "Serve does not know this deployment"


def test_a_rank_without_a_report_yet() -> None:
    early = picture()
    early["controller"]["replicas"][0]["ranks"] = [rank(0, load=None, steps=None)]
    text = screen(early)
    assert "no drafts verified yet" in text
    assert "KV pool not reported yet" in text


def test_what_the_automatic_policy_chose_is_shown() -> None:
    auto = {"choice": "tree-15", "why": "best", "greedy": {"seen": 3, "tokens": {"tree-15": 3.4}}}
    chosen = picture()
    ranks = [rank(0, policy="auto<=15", auto=auto)]
    chosen["controller"]["replicas"][0]["ranks"] = ranks
    assert "chosen: tree-15 (best); tokens per step expected: 3.40 greedy" in screen(chosen)


@pytest.mark.parametrize(
    ("term", "tty", "drawn"),
    [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)],
)
def test_only_a_terminal_that_can_be_drawn_on_is_drawn_on(
    term: str,
    tty: bool,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TERM", term)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(status, "connected", lambda _: nullcontext(None))
    monkeypatch.setattr(status, "gather", lambda _: picture())
    monkeypatch.setattr(status.serving, "quiet_serve_logs", lambda: None)
    monkeypatch.setattr(status.Looks, "wait", lambda *_: False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    status.show_status(None, as_json=False, every_s=1.0)
    out = capsys.readouterr().out
    assert ("\x1b[?1049h" in out) is drawn, "the other screen"
    assert ("    rank 0  pid 100  working" in out) is not drawn
