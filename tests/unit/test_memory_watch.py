"""A process that gets no memory any more says so and ends, whatever its main thread does."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from overstory.workers import memory_watch
from overstory.workers.death_note import (
    EXIT_LOOP_FAILED,
    LastWill,
    note_path,
    read_note,
    wants_memory,
)

ENDS_S = 20.0
_FORK = multiprocessing.get_context("fork")


def test_only_want_that_lasts_counts() -> None:
    answers = iter([False, False, True, False, True, False, False, False])
    calls: list[int] = []
    slept: list[float] = []
    memory_watch.watch_memory(lambda: calls.append(1), lambda: next(answers), slept.append)
    assert calls == [1]
    assert slept == [memory_watch.PERIOD_S] * 8
    assert list(answers) == []


def exhaust() -> list[bytearray]:
    """No thread of this process gets memory any more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    held = []
    for piece in (1 << 20, 1 << 12, 1 << 6):
        try:
            while True:
                held.append(bytearray(piece))
        except MemoryError:
            continue
    return held


def raises(will: LastWill) -> None:
    held = exhaust()
    will.execute("out of memory", EXIT_LOOP_FAILED, "x" * 1000)
    assert held


def hangs(will: LastWill) -> None:
    memory_watch.PERIOD_S = 0.05  # in this process, which is a child
    memory_watch.begin(lambda: will.execute("out of memory", EXIT_LOOP_FAILED))
    held = exhaust()
    threading.Event().wait()
    assert held


@pytest.mark.parametrize("act", [raises, hangs])
def test_its_last_words_are_written(act: Callable[[LastWill], None], tmp_path: Path) -> None:
    process = _FORK.Process(target=lambda: act(LastWill(tmp_path, 3, lambda: ("serving", 7))))
    process.start()
    try:
        process.join(ENDS_S)
        assert process.exitcode == EXIT_LOOP_FAILED
        assert process.pid is not None
        note = read_note(note_path(tmp_path, process.pid))
        assert note is not None
        assert (note.cause, note.rank, note.forwards) == ("out of memory", 3, 7)
    finally:
        process.kill()
        process.join()


def test_there_is_memory_here() -> None:
    assert memory_watch.gets_memory()


@pytest.mark.parametrize(
    ("cause", "wanted"),
    [
        ("MemoryError: deliberate", True),
        ("CUDA out of memory. Tried to allocate 2 GiB", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes", True),
        ("an illegal memory access was encountered", False),
    ],
)
def test_which_errors_are_want_of_memory(cause: str, wanted: bool) -> None:
    assert wants_memory(cause) == wanted
