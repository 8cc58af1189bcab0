"""Sequences that left a replica before their end, whose KV another one may come for. Pure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

COMING_S = 3.0
"""How long after a sequence left this replica another one may still ask for its KV."""


class Departures:
    """Those of a replica. Thread-safe.

    Args:
        least_tokens: nobody asks for the KV of shorter ones.
        clock: seconds, monotonic.
    """

    def __init__(self, least_tokens: int, clock: Callable[[], float]) -> None:
        self._least_tokens, self._clock = least_tokens, clock
        self._lock = threading.Lock()
        self._left: dict[str, float] = {}

    def left(self, rid: str, tokens: int) -> None:
        """A request of so many tokens, prompt and output, is not finished here."""
        now = self._clock()
        with self._lock:
            self._left = {r: at for r, at in self._left.items() if now - at < COMING_S}
            if tokens >= self._least_tokens:
                self._left[rid] = now

    def awaited(self, fetched: Collection[str]) -> list[str]:
        """Requests that somebody may still come for; ``fetched`` are done with."""
        now, done = self._clock(), set(fetched)
        with self._lock:
            return [
                rid for rid, at in self._left.items() if now - at < COMING_S and rid not in done
            ]
