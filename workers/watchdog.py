"""A rank's watchdog: ends the rank's own process when it stands still with work in hand.

SGLang's sends SIGQUIT to the parent process, which for a Ray actor is the raylet: it would take
down every actor of the node. This one takes its place and leaves a note with the cause.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from overstory.workers.death_note import EXIT_WATCHDOG, LastWill

CHECKS_PER_TIMEOUT = 4


class StandstillClock:
    """Judges whether a counter has stood still too long. Pure; the caller brings the time.

    Args:
        timeout_s: longest standstill allowed while active.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._counter: int | None = None
        self._since_s = 0.0

    def stands_still_s(self, now_s: float, counter: int, active: bool) -> float | None:
        """Seconds of standstill if above the time-out, else None. Inactive time does not count."""
        if not active or counter != self._counter:
            self._counter, self._since_s = counter, now_s
            return None
        still_s = now_s - self._since_s
        return still_s if still_s > self._timeout_s else None


def watch(raw: Any, will: LastWill, sleep: Callable[[float], None] = time.sleep) -> None:
    """Body of SGLang's watchdog thread in a rank (`WatchdogRaw._watchdog_once`).

    Args:
        raw: SGLang's WatchdogRaw: `get_counter`, `is_active`, `watchdog_timeout`, `soft`,
        `dump_info`.
        will: of this rank.
        sleep: seconds to wait between two looks.
    """
    clock = StandstillClock(raw.watchdog_timeout)
    while True:
        still_s = clock.stands_still_s(time.monotonic(), raw.get_counter(), raw.is_active())
        if still_s is not None:
            break
        sleep(raw.watchdog_timeout / CHECKS_PER_TIMEOUT)
    cause = (
        f"watchdog: no batch was launched for {still_s:.1f} s with work in hand "
        f"(watchdog_timeout {raw.watchdog_timeout} s)"
    )
    detail = f"{_state(raw)}\n{thread_stacks()}"
    if raw.soft:
        print(f"{cause}\n{detail}", file=sys.stderr, flush=True)
        return
    will.execute(cause, EXIT_WATCHDOG, detail)


def thread_stacks() -> str:
    """Python stacks of all threads of this process."""
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _state(raw: Any) -> str:
    """SGLang's own description; it reads live state from another thread, so it may fail."""
    if raw.dump_info is None:
        return ""
    try:
        return str(raw.dump_info())
    except Exception as error:  # A dump must not keep the watchdog from its work.
        return f"(no state: {type(error).__name__}: {error})"
