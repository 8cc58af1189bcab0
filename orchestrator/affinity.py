"""Which replica is likely to have a prompt's beginning in its prefix cache, within a bound on load.

Pure. What a replica holds is guessed from what was sent to it: prompts in blocks of tokens, each
block known by a hash of all tokens up to its end, the least recently used forgotten first. A wrong
guess costs time, never a wrong text. One process's knowledge; safe in any thread.
"""

import math
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Routing = Literal["least_loaded", "prefix_affine", "session_sticky"]
"""`least_loaded`: of two at random the shorter queue. `prefix_affine`: the longest known prefix.
`session_sticky`: where the session was before."""

ROUTINGS: tuple[Routing, ...] = get_args(Routing)

BLOCK_TOKENS = 64
"""Shorter common beginnings are not worth a preference."""
KEPT_BLOCKS = 1 << 17
KEPT_SESSIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadBound:
    """A preferred replica is taken while its calls are at most `factor` times the mean, and
    `slack` more. (Bounded loads, as in consistent hashing with bounded loads.)"""

    factor: float = 1.25
    slack: int = 2

    def most(self, loads: Mapping[str, int], replicas: Collection[str]) -> int:
        """Calls that a replica may have to be given another one."""
        total = sum(loads.get(name, 0) for name in replicas)
        return math.ceil(self.factor * total / len(replicas)) + self.slack


class Affinity:
    """Where prompts and sessions went."""

    def __init__(self, routing: Routing = "least_loaded", bound: LoadBound | None = None) -> None:
        self._routing = routing
        self._bound = bound or LoadBound()
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, set[str]] = OrderedDict()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def prefers(
        self,
        ids: Sequence[int],
        session: str,
        loads: Mapping[str, int],
        replicas: Collection[str],
    ) -> str | None:
        """The replica to send a call to; None for no preference.

        Args:
            ids: prompt and committed tokens.
            session: the client's name of its conversation; empty for none.
            loads: calls in flight by replica.
            replicas: those that may be taken.
        """
        if self._routing == "least_loaded" or len(replicas) < 2:
            return None
        most = self._bound.most(loads, replicas)
        able = {name for name in replicas if loads.get(name, 0) < most}
        with self._lock:
            if self._routing == "session_sticky" and session:
                return self._of_session(session, ids, able, loads)
            return self._of_prefix(ids, able, loads)

    def routed(self, ids: Sequence[int], session: str, replica: str) -> None:
        """A call went there."""
        if self._routing == "least_loaded":
            return
        with self._lock:
            for block in _blocks(ids):
                self._blocks.setdefault(block, set()).add(replica)
                self._blocks.move_to_end(block)
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            if session:
                self._sessions[session] = replica
                self._sessions.move_to_end(session)
                if len(self._sessions) > KEPT_SESSIONS:
                    self._sessions.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Others are gone, and their caches with them."""
        with self._lock:
            for names in self._blocks.values():
                names.intersection_update(replicas)
            gone = [key for key, name in self._sessions.items() if name not in replicas]
            for key in gone:
                del self._sessions[key]

    def _of_session(
        self, session: str, ids: Sequence[int], able: set[str], loads: Mapping[str, int]
    ) -> str | None:
        known = self._sessions.get(session)
        return known if known in able else self._of_prefix(ids, able, loads)

    def _of_prefix(
        self, ids: Sequence[int], able: set[str], loads: Mapping[str, int]
    ) -> str | None:
        """Of those that know most of the prompt's beginning the one with the fewest calls; with
        nothing known, the one with the fewest calls."""
        best = able
        for block in _blocks(ids):
            knowing = self._blocks.get(block, set()) & best
            if not knowing:
                break
            best = knowing
        return min(best, key=lambda name: (loads.get(name, 0), name), default=None)


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block, of all tokens up to its end."""
    seen = 0
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        seen = hash((seen, *ids[end - BLOCK_TOKENS : end]))
        yield seen


_AFFINITIES: dict[str, Affinity] = {}


def affinity_of(app: str, routing: Routing | None = None) -> Affinity:
    """This process's knowledge about an application's replicas; `routing` where it begins."""
    if app not in _AFFINITIES or routing is not None:
        _AFFINITIES[app] = Affinity(routing or "least_loaded")
    return _AFFINITIES[app]
