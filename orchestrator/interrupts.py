"""How commands end when they are told to."""

import contextlib
import signal
import time
from types import FrameType
from typing import Self


def end_tidily() -> None:
    """SIGTERM ends the command as Ctrl-C does: what it started is taken away first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class Looks:
    """Looks repeated until Ctrl-C, for a main thread that looks by calls into others' code.

    There an exception out of a signal handler can be lost (a callback's is only printed), and the
    command would go on as if nobody had said anything. So Ctrl-C is noted, and ends a wait between
    two looks, never a look; a second one raises `KeyboardInterrupt` at once.
    """

    def __init__(self) -> None:
        self.told = False
        self._waiting = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def wait(self, seconds: float) -> bool:
        """Until the next look is due; False where there is to be none."""
        with contextlib.suppress(KeyboardInterrupt):
            self._waiting = True
            if not self.told:
                time.sleep(seconds)
        self._waiting = False
        return not self.told

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.told = self.told, True
        if again or self._waiting:
            raise KeyboardInterrupt
