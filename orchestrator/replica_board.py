"""What a gateway process knows of its replicas: which run, which to avoid, which call is on which.

Pure. Serve's router and the gateway's calls may live on different event loops, hence the lock. The
router tells what it knows (`update`, `routed`); a call learns from it that it has to leave.

A call whose replica no longer runs leaves at once where another replica can take it. Where none
can, it stays as long as Serve lets it (`drain_s`): until then the old replica still brings tokens.
What is to be done before calls leave (`before_leaving`) is waited for `PREPARE_S` at most.
"""

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

DRAIN_S = 20.0
"""Longest that a call stays on a replica that is to go. Serve kills it 10 s later."""
PREPARE_S = 1.0
"""Longest that calls stay although they could leave."""


class PlacedCall:
    """One call of a replica. `replica` is known once it is routed, `chosen` when the router wants
    to send it there; when it has to go elsewhere, `on_leave` is called, on the loop of the call,
    maybe more than once."""

    def __init__(self) -> None:
        self.replica: str | None = None
        self.chosen: str | None = None
        self.on_leave: Callable[[], None] = lambda: None
        self._loop = asyncio.get_running_loop()
        self.absent_since_s: float | None = None

    def tell(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(lambda: self.on_leave())

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """From any thread: `act` on the call's loop after `delay_s`."""
        self._loop.call_soon_threadsafe(lambda: self._loop.call_later(delay_s, act))


class ReplicaBoard:
    """The knowledge of one process about one deployment. All methods are safe in any thread.

    Attributes:
        before_leaving: called, from any thread, with a replica that calls are about to leave and
            those that may take them; it ends in `may_leave`. None: they leave at once.
        on_running: told, from any thread, how many replicas run, whenever Serve tells which.
    """

    def __init__(
        self, drain_s: float = DRAIN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._drain_s = drain_s
        self._clock = clock
        self._lock = threading.Lock()
        self._running: frozenset[str] | None = None
        self._shunned: dict[str, float] = {}
        self._calls: dict[str, PlacedCall] = {}
        self._stay_until: dict[str, float] = {}  # of replicas that calls are about to leave
        self.before_leaving: Callable[[str, list[str]], None] | None = None
        self.on_running: Callable[[int], object] = lambda _: None

    @contextmanager
    def following(self, rid: str) -> Iterator[PlacedCall]:
        """Keeps a call on the board while the block runs."""
        call = PlacedCall()
        with self._lock:
            self._calls[rid] = call
        try:
            yield call
        finally:
            with self._lock:
                del self._calls[rid]

    def update(self, running: Collection[str]) -> None:
        """These replicas run; Serve sends nothing new to others."""
        with self._lock:
            self._running = frozenset(running)
            self._shunned = {name: t for name, t in self._shunned.items() if name in self._running}
            left = {call.replica for call in self._calls.values()} - self._running
            self._stay_until = {name: t for name, t in self._stay_until.items() if name in left}
        self.on_running(len(running))
        self._judge()

    def may_leave(self, replica: str) -> None:
        """What was to be done before calls leave it is done, or cannot be."""
        with self._lock:
            if replica in self._stay_until:
                self._stay_until[replica] = -math.inf
        self._judge()

    def routed(self, rid: str, replica: str) -> None:
        """The call `rid` is on `replica`; unknown calls are ignored."""
        with self._lock:
            call = self._calls.get(rid)
            if call is not None:
                call.replica = replica
        self._judge()

    def chosen(self, rid: str, replica: str) -> None:
        """The router wants to send the call `rid` to `replica`, and counts it there already: Serve
        chooses for all that wait before it tells of the first that it is routed."""
        with self._lock:
            call = self._calls.get(rid)
            if call is not None:
                call.chosen = replica

    def shun(self, replica: str | None, for_s: float) -> None:
        """Send nothing to it for so long, unless it is gone before. None: the call was on none."""
        if replica is not None:
            with self._lock:
                self._shunned[replica] = self._clock() + for_s

    def loads(self) -> dict[str, int]:
        """Calls in flight by replica: routed there, or about to be."""
        with self._lock:
            placed = [call.replica or call.chosen for call in self._calls.values()]
        return Counter(name for name in placed if name is not None)

    def usable(self, replica: str) -> bool:
        """Whether to send calls to it."""
        with self._lock:
            return self._usable(replica)

    def _usable(self, replica: str) -> bool:
        return self._shunned.get(replica, 0.0) <= self._clock()

    def _judge(self) -> None:
        """Tell the calls that have to leave now, and look again when others may have to."""
        prepared: list[str] = []
        with self._lock:
            if self._running is None:
                return
            refuges = [name for name in self._running if self._usable(name)]
            for call in self._calls.values():
                if call.replica is None or call.replica in self._running:
                    call.absent_since_s = None
                elif call.absent_since_s is None:
                    call.absent_since_s = self._clock()
                    call.later(self._drain_s, self._judge)
                if call.replica is None or call.absent_since_s is None:
                    continue
                if refuges and self.before_leaving and call.replica not in self._stay_until:
                    prepared.append(call.replica)
                    self._stay_until[call.replica] = self._clock() + PREPARE_S
                    call.later(PREPARE_S, self._judge)
                stays = self._stay_until.get(call.replica, -math.inf) > self._clock()
                over = self._clock() - call.absent_since_s >= self._drain_s
                if over or (refuges and not stays):
                    call.tell()
        for replica in prepared:
            assert self.before_leaving is not None
            self.before_leaving(replica, sorted(refuges))


_BOARDS: dict[str, ReplicaBoard] = {}


def board_of(app: str) -> ReplicaBoard:
    """This process's board of an application's replicas."""
    return _BOARDS.setdefault(app, ReplicaBoard())
