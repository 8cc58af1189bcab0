"""A rank's host around a scheduler that is a plain object: what ends its loop leaves a note."""

from types import SimpleNamespace

import pytest

from overstory.orchestrator.lease import Command, Lease
from overstory.workers.death_note import EXIT_LOOP_FAILED, read_note
from overstory.workers.handoff.rank_side import RankSide
from overstory.workers.rank import RankFailed, RankHost

NOTHING_NOTED = SimpleNamespace(lease=lambda _steps: None)


class View:
    def __init__(self, error=None):
        self.error = error
        self.raw = self

    def launched(self):
        return 7

    def run_event_loop(self):
        raise self.error


@pytest.fixture
def host(tmp_path):
    return RankHost(0, "cpu", note_folder=str(tmp_path))


@pytest.mark.parametrize("error", [SystemExit(3), BaseException("odd"), RuntimeError("no memory")])
def test_whatever_ends_the_loop_leaves_a_note(host, tmp_path, error):
    host._view = View(error)
    with pytest.raises(RankFailed, match=type(error).__name__):
        host.run_loop()
    (path,) = tmp_path.glob("*.json")
    note = read_note(path)
    assert (note.exit_code, note.phase, note.forwards) == (EXIT_LOOP_FAILED, "serving", 7)
    assert type(error).__name__ in note.cause
    assert host.phase()["phase"] == "failed"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_for_want_of_memory_the_process_ends(host, monkeypatch, error):
    """To raise the error through Ray would take memory too."""
    ends = []

    def execute(*words):
        ends.append(words)
        raise SystemExit

    monkeypatch.setattr(host._will, "execute", execute)
    host._view = View(error)
    with pytest.raises(SystemExit):
        host.run_loop()
    ((cause, exit_code, detail),) = ends
    assert (exit_code, "run_event_loop" in detail) == (EXIT_LOOP_FAILED, True)
    assert type(error).__name__ in cause


def test_a_command_granted_twice_is_carried_out_once(host, monkeypatch):
    """After what steps did before the lease is linked."""
    done = []
    host._view = View()
    host._notes = SimpleNamespace(lease=done.append)
    monkeypatch.setattr(host._commands, "carry_out", lambda name, *_: done.append(name))
    for seq in (1, 2):
        host._begin_lease(Lease(1, seq, 4 * seq, "plain", (Command("standing", ticket="t"),)))
    assert done == [4, "standing", 8]


def test_no_rows_move_while_some_are_handed_over(tmp_path, monkeypatch):
    """A thread reads them by the slot numbers that they had when they were held."""
    monkeypatch.setattr(RankSide, "holding", lambda _: 2)
    host = RankHost(0, "cpu", note_folder=str(tmp_path))
    host._view, host._notes = View(), NOTHING_NOTED
    host._begin_lease(Lease(1, 1, 4, "plain", (Command("relocate", {"plan": None}, ticket="t"),)))
    assert "handed over between replicas (2 at present)" in host._command_results["t"]["refused"]
