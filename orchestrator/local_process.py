"""A process of this host, by pid and start time: a reused pid is never mistaken for it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from overstory.workers.process_ids import process_start_ticks

POLL_S = 0.02

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in an uninterruptible wait",
    "Z": "a zombie",
    "R": "running",
    "S": "sleeping",
}


@dataclass(frozen=True)
class LocalProcess:
    """A process by host, pid and start (clock ticks since boot).

    One of another host reads as gone.
    """

    host: str
    pid: int
    started: int

    def alive(self) -> bool:
        """Whether it runs on this host and is not a zombie."""
        return self.state() not in (None, "a zombie")

    def state(self) -> str | None:
        """What the kernel says it does, in words; None if it is gone or on another host."""
        if self.host != socket.gethostname() or process_start_ticks(self.pid) != self.started:
            return None
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return None
        letter = text.rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")

    def wait_gone(self, timeout_s: float) -> bool:
        """Waits until it is gone; False after the time-out."""
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def kill(self) -> None:
        """Kills it (SIGKILL) if it is still this process."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
