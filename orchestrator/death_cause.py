"""What ended a rank's process, read from what it left: which signal, and whether memory ran out.

Nobody tells: the process's parent is the raylet, and who kills does not say so. But each way to go
leaves something. Pure.

```
a note by the rank itself      it raised, its watchdog, or it was told to end
a crash handler's headline     a signal of the processor (SIGSEGV, ...): Python's fault handler,
                               torch's or Ray's
Ray says SIGTERM               the worker process takes that one itself
Ray says it was short of       Ray's own memory monitor killed it
memory
the kernel counted a kill      the kernel's out-of-memory killer, on that host, in that time
nothing at all                 SIGKILL: the only signal that leaves no trace
```
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from overstory.workers.death_note import wants_memory

_FAULTS = {
    "Segfault encountered": "SIGSEGV",
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
"""Words of Python's fault handler, and of torch's."""

_FAULT_LINE = re.compile(
    r"Fatal Python error: ([\w -]+)|!!! (Segfault encountered) !!!|\*\*\* (SIG[A-Z]+) received at"
)
_RAY_MEMORY = re.compile(r"running low on memory|OutOfMemoryError|memory monitor", re.IGNORECASE)


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        signal: its name, where a signal ended it.
        out_of_memory: whether it was for want of memory.
        words: for a person; empty where its own note says it all.
    """

    signal: str | None = None
    out_of_memory: bool = False
    words: str = ""


def ending_of(
    note: str | None, log_tail: Sequence[str], ray_says: str, kernel_kills: int
) -> Ending:
    """Concludes from what is left.

    Args:
        note: cause in the rank's own note, if it left one.
        log_tail: last lines of its log.
        ray_says: Ray's words about its end; empty if it has none.
        kernel_kills: how many processes the kernel killed for want of memory on the rank's host
            since the rank began.
    """
    if note is not None:
        return Ending(out_of_memory=wants_memory(note))
    if _RAY_MEMORY.search(ray_says):
        return Ending(
            "SIGKILL", True, "killed by Ray's memory monitor: its host was short of memory"
        )
    for line in reversed(log_tail):
        found = _FAULT_LINE.search(line)
        what = (found[1] or found[2] or found[3]).strip() if found else ""
        name = what if what.startswith("SIG") else _FAULTS.get(what)
        if name is not None:
            return Ending(name, words=f"its process crashed: {what} ({name})")
    if "SIGTERM" in ray_says:
        return Ending("SIGTERM", words="ended from outside by SIGTERM")
    if kernel_kills > 0:
        return Ending(
            "SIGKILL",
            True,
            f"most likely killed by the kernel for want of memory: it killed {kernel_kills} "
            "processes on that host since this one began",
        )
    return Ending("SIGKILL", words="killed from outside: SIGKILL, which leaves no trace")
