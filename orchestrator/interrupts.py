"""How a command that starts things ends when it is told to."""

import signal


def end_tidily() -> None:
    """SIGTERM ends the command as Ctrl-C does: what it started is taken away first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
