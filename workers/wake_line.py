"""A file descriptor that one thread rings and another polls together with its sockets."""

from __future__ import annotations

import contextlib
import os


class WakeLine:
    """Rings from any thread; any number of rings before `clear` count once."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Makes the descriptor readable."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Makes it unreadable until the next ring."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
