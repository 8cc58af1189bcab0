"""Which replica is likely to have a prompt's beginning in its prefix cache, within a bound on load.

Pure. What a replica holds it reports itself, from its radix tree (`prefix_watch`). A report is some
seconds old, so what was sent to a replica since counts as well, and where a replica reports nothing
that is all there is: prompts in blocks of tokens, the least recently used forgotten first. A wrong
belief costs time, never a wrong text. One process's knowledge; safe in any thread.
"""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from overstory.orchestrator.prefix_blocks import BLOCK_TOKENS, blocks_of

Routing = Literal["least_loaded", "prefix_affine", "session_sticky"]
"""`least_loaded`: of two at random the shorter queue. `prefix_affine`: the longest known prefix.
`session_sticky`: where the session was before."""

ROUTINGS: tuple[Routing, ...] = get_args(Routing)

__all__ = ["BLOCK_TOKENS", "ROUTINGS", "Affinity", "LoadBound", "Routing", "affinity_of"]

SENT_S = 10.0
"""What was sent to a replica is believed to be there so long, whatever it reports meanwhile: it may
still wait for its prefill. After that its reports decide, where it makes any."""
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
    """Where prompts and sessions went, and what replicas say they hold."""

    def __init__(
        self,
        routing: Routing = "least_loaded",
        bound: LoadBound | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routing = routing
        self._bound = bound or LoadBound()
        self._clock = clock
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, dict[str, float]] = OrderedDict()  # replica -> when sent
        self._reported: dict[str, frozenset[int]] = {}
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
        now = self._clock()
        with self._lock:
            for block in blocks_of(ids):
                self._blocks.setdefault(block, {})[replica] = now
                self._blocks.move_to_end(block)
            while len(self._blocks) > KEPT_BLOCKS:
                self._blocks.popitem(last=False)
            if session:
                self._sessions[session] = replica
                self._sessions.move_to_end(session)
                if len(self._sessions) > KEPT_SESSIONS:
                    self._sessions.popitem(last=False)

    @property
    def wants_reports(self) -> bool:
        """Whether `reported` changes anything."""
        return self._routing != "least_loaded"

    def reported(self, replica: str, blocks: Iterable[int]) -> None:
        """A replica says which blocks (`prefix_blocks`) its prefix cache holds: all of them."""
        held = frozenset(blocks)
        with self._lock:
            self._reported[replica] = held

    def held(self) -> dict[str, int]:
        """Number of blocks that each reporting replica holds."""
        with self._lock:
            return {name: len(blocks) for name, blocks in self._reported.items()}

    def silent(self, replicas: Collection[str]) -> None:
        """These alone report now; of the others what was sent to them counts again."""
        with self._lock:
            for name in self._reported.keys() - set(replicas):
                del self._reported[name]

    def keep(self, replicas: Collection[str]) -> None:
        """Others are gone, and their caches with them."""
        with self._lock:
            for sent in self._blocks.values():
                for name in sent.keys() - set(replicas):
                    del sent[name]
            for name in self._reported.keys() - set(replicas):
                del self._reported[name]
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
        fresh_s = self._clock() - SENT_S
        for block in blocks_of(ids):
            holding = {name for name in best if self._holds(name, block, fresh_s)}
            if not holding:
                break
            best = holding
        return min(best, key=lambda name: (loads.get(name, 0), name), default=None)

    def _holds(self, replica: str, block: int, fresh_s: float) -> bool:
        """Whether a replica has a block: by its report, or since it was sent there lately."""
        sent_s = self._blocks.get(block, {}).get(replica)
        held = self._reported.get(replica)
        if held is None:
            return sent_s is not None
        return block in held or (sent_s is not None and sent_s >= fresh_s)


_AFFINITIES: dict[str, Affinity] = {}


def affinity_of(app: str, routing: Routing | None = None) -> Affinity:
    """This process's knowledge about an application's replicas; `routing` where it begins."""
    if app not in _AFFINITIES or routing is not None:
        _AFFINITIES[app] = Affinity(routing or "least_loaded")
    return _AFFINITIES[app]
