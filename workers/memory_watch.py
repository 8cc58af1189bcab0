"""Whether this process still gets memory. One that does not may raise, or hang: Python's
`Thread.start`, and with it a `ThreadPoolExecutor`, waits for ever for a thread that got no memory
to begin with. Nobody would know before the watchdog's time-out.

Pure standard library. All that is needed is allocated beforehand.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable

PROBE_BYTES = 1 << 20
PERIOD_S = 1.0
PATIENCE = 3
"""So many probes in a row must fail: somebody else may have given memory back meanwhile."""
RESERVE_BYTES = 8 << 20


class Reserve:
    """Address space that is kept for the last words of a process."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = None
        with contextlib.suppress(OSError):
            self._kept = mmap.mmap(-1, RESERVE_BYTES)

    def release(self) -> None:
        """From now on it is there for whoever wants memory. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()


def gets_memory() -> bool:
    """Whether some memory can be had right now."""
    try:
        mmap.mmap(-1, PROBE_BYTES).close()
    except (OSError, MemoryError):
        return False
    return True


def watch_memory(
    on_want: Callable[[], object],
    probe: Callable[[], bool] = gets_memory,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Calls `on_want`, once, when there was no memory for `PATIENCE` seconds. Body of a thread."""
    failed = 0
    while failed < PATIENCE:
        sleep(PERIOD_S)
        failed = 0 if probe() else failed + 1
    on_want()


def begin(on_want: Callable[[], object]) -> None:
    """Starts the thread; it ends with the process."""
    threading.Thread(target=watch_memory, args=(on_want,), name="memory-watch", daemon=True).start()
