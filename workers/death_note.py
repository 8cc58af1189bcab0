"""What a rank leaves behind when it ends itself: the cause, for its replica and `deploy` to show.

A rank that ends by `os._exit` or a signal can no longer answer a call, so the cause goes to a file
beside the process's log. Pure standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from overstory.workers.memory_watch import Reserve

EXIT_WATCHDOG = 70
"""No batch was finished for longer than the watchdog time-out."""
EXIT_LOOP_FAILED = 71
"""SGLang's scheduler raised."""
EXIT_DIVERGED = 72
"""Its digests differ from another rank's."""
EXIT_ORDERED = 73
"""The replica or the controller told the rank to end."""

LOG_TAIL_BYTES = 16 * 1024

_MARK = re.compile(r":(job_id|actor_name|task_name):")
"""Lines that Ray writes into worker logs for its own use."""


_MEMORY_WORDS = re.compile(
    r"\bMemoryError\b|OutOfMemory|out of memory|can't allocate memory|Cannot allocate memory"
    r"|not enough memory|std::bad_alloc",
    re.IGNORECASE,
)


def wants_memory(cause: str) -> bool:
    """Whether the words of an error are about want of memory."""
    return bool(_MEMORY_WORDS.search(cause))


@dataclass(frozen=True)
class DeathNote:
    """Why a rank's process ended.

    Attributes:
        rank: tensor-parallel rank.
        pid: process that wrote this.
        cause: one line for a person.
        exit_code: status it was about to exit with.
        phase: what it was doing (`overstory.workers.rank.PHASES`).
        forwards: batches it had launched.
        detail: longer text (a traceback, thread stacks), may be empty.
        written_at: Unix seconds.
    """

    rank: int
    pid: int
    cause: str
    exit_code: int
    phase: str
    forwards: int
    detail: str = ""
    written_at: float = 0.0


class LastWill:
    """Writes this rank's note and ends its process. The first cause stands.

    Args:
        folder: where the note goes; exists already.
        rank: tensor-parallel rank.
        describe: gives (phase, launched batches) at that moment.
    """

    def __init__(self, folder: Path, rank: int, describe: Callable[[], tuple[str, int]]) -> None:
        self._rank = rank
        self._describe = describe
        self._reserve = Reserve()
        self.path = note_path(folder, os.getpid())

    def write(self, cause: str, exit_code: int, detail: str = "") -> DeathNote:
        """Writes the note unless an earlier one stands; returns the one that stands."""
        self.release_memory()
        earlier = read_note(self.path)
        if earlier is not None:
            return earlier
        phase, forwards = self._describe()
        note = DeathNote(
            rank=self._rank,
            pid=os.getpid(),
            cause=cause,
            exit_code=exit_code,
            phase=phase,
            forwards=forwards,
            detail=detail,
            written_at=time.time(),
        )
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(note)))
        partial.replace(self.path)
        return note

    def release_memory(self) -> None:
        """What was kept for the last words is free: want of memory may be what they are about."""
        self._reserve.release()

    def execute(self, cause: str, exit_code: int, detail: str = "") -> NoReturn:
        """Writes the note and ends this process at once, without unwinding threads or atexit."""
        try:
            note = self.write(cause, exit_code, detail)
            print(f"overstory rank {self._rank} ends itself: {note.cause}", file=sys.stderr)
            if detail:
                print(detail, file=sys.stderr)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(ValueError, OSError):
                    stream.flush()
        finally:
            os._exit(exit_code)


def note_path(folder: Path, pid: int) -> Path:
    """Where the process `pid` leaves its note."""
    return folder / f"overstory-rank-{pid}.json"


def read_note(path: Path) -> DeathNote | None:
    """The note at `path`, or None if there is none (or half of one)."""
    try:
        return DeathNote(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_log_tail(path: Path, lines: int = 30) -> list[str]:
    """Last `lines` lines of a log file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip() and not _MARK.match(line)][-lines:]
