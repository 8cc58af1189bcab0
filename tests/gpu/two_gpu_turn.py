"""Parts of a session of two GPUs that run side by side measure in turn. Pure standard library."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator


@contextlib.contextmanager
def turn() -> Iterator[float]:
    """Nobody else measures meanwhile who asks here too, in whatever process.

    Who is to ask is told by the file $TWO_GPU_TURN; without it nobody is waited for.

    Yields:
        seconds that were waited.
    """
    file = os.environ.get("TWO_GPU_TURN")
    if not file:
        yield 0.0
        return
    begun = time.monotonic()
    with open(file, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go when the file is closed, however that comes
        yield time.monotonic() - begun
