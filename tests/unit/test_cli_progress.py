"""What a user is told while a deployment comes up, and when it does not."""

import io

import pytest

from overstory.orchestrator.progress import PHASES, Progress, describe_ranks, failure_text
from overstory.workers.rank import PHASES as RANK_PHASES


def ranks(*phases: str) -> dict[str, dict[str, str]]:
    return {f"rank-{number}": {"phase": phase} for number, phase in enumerate(phases)}


@pytest.mark.parametrize(
    ("phases", "phase", "line"),
    [
        ((), "placement", "waiting for 2 rank processes"),
        (("importing",), "placement", "2 ranks: 1 importing, 1 not there yet"),
        (("importing", "importing"), "weights", "2 ranks: 2 importing"),
        (("serving", "weights"), "weights", "2 ranks: 1 serving, 1 weights"),
        (("serving", "ready"), "warm-up", "2 ranks: 1 serving, 1 ready"),
    ],
)
def test_the_slowest_rank_gives_the_phase(phases: tuple[str, ...], phase: str, line: str) -> None:
    assert describe_ranks(ranks(*phases), 2) == (phase, line)


@pytest.mark.parametrize("phase", RANK_PHASES)
def test_every_phase_of_a_rank_has_a_place(phase: str) -> None:
    assert describe_ranks(ranks(phase), 1)[0] in PHASES


def test_only_changes_are_told() -> None:
    out, now = io.StringIO(), iter([0.0, 1.0, 2.5, 9.0])
    progress = Progress(out, lambda: next(now))
    progress.tell("nodes", "one")
    progress.tell("nodes", "one")
    progress.tell("weights", "one")
    lines = out.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["[", "1.0", "s]", "nodes", "one"],
        ["[", "2.5", "s]", "weights", "one"],
    ]


DEATH = """Deployment failed: The deployment failed to start 1 times in a row.
Traceback (most recent call last):
  File "x.py", line 1, in y
overstory.x.EngineDead: rank 1 died (exit code 71, phase weights): no memory
  rank 0: answers; weights, forward 0
  last log lines:
    loading"""


def test_a_failure_begins_with_the_rank_that_died() -> None:
    assert failure_text(DEATH).splitlines() == [
        "rank 1 died (exit code 71, phase weights): no memory",
        "  rank 0: answers; weights, forward 0",
        "  last log lines:",
        "    loading",
    ]


def test_a_failure_without_a_dead_rank_is_told_whole() -> None:
    assert failure_text("cannot place rank 0\nmore") == "cannot place rank 0\nmore"
    assert failure_text(" ") != ""
