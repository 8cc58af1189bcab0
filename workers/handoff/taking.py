"""The taking side of the boundary command `kv_take`: rows come while the loop goes on.

```
boundary   slots reserved for a part of the texts; a thread asks the giving rank for their rows
...        the loop steps on; nobody waits for the peer
boundary   all ranks say whether their rows are there: they become cached text, or nobody's slots
           and the next part begins
```

A giver that stalls costs the sequences that wait for their KV, and nothing else here.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from overstory.workers.handoff import cached

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from overstory.workers.commands import CommandContext
    from overstory.workers.handoff.peers import Peers
    from overstory.workers.handoff.rows import RowTable

logger = logging.getLogger(__name__)


@dataclass
class _Text:
    """One that is to come.

    Attributes:
        tokens: as many as the giver holds.
        whole: of these as many as fill pages.
        have: of these as many as are cached here, and held by `node`.
    """

    tokens: array[int]
    whole: int
    have: int
    node: Any


@dataclass(frozen=True)
class Move:
    """Rows `start` to `end` of text number `text`; none where an earlier text brings them."""

    text: int
    start: int
    end: int


class _Part:
    """Rows on their way, and the thread that waits for them."""

    def __init__(self, moves: Sequence[Move], reserved: cached.Reserved) -> None:
        self.moves, self.reserved = moves, reserved
        self.ended = threading.Event()
        self.failed = ""
        self.seconds = 0.0

    def run(self, name: str, fetch: Callable[[], None]) -> None:
        """`fetch` in a thread of its own."""

        def work() -> None:
            begun = time.perf_counter()
            try:
                fetch()
            except Exception as error:  # Whatever it is: the other ranks count on this one's vote.
                logger.warning("rows did not come: %s: %s", type(error).__name__, error)
                self.failed = str(error) or type(error).__name__
            self.seconds = time.perf_counter() - begun
            self.ended.set()

        threading.Thread(target=work, name=f"taker-{name}", daemon=True).start()


@dataclass
class _Session:
    """What came under one key of the giver, for the controller of `epoch`."""

    epoch: int
    key: str
    name: str
    texts: list[_Text]
    part: _Part | None = None
    parts: int = 0


@dataclass
class Outcome:
    """Of one command `kv_take`."""

    failed: str = ""
    bytes: int = 0
    seconds: float = 0.0
    begun: float = field(default_factory=time.perf_counter)

    def told(self, texts: Sequence[_Text], done: bool) -> dict[str, Any]:
        """What `KvTaking.take` returns."""
        return {
            "cached": [text.have for text in texts],
            "bytes": self.bytes,
            "seconds": self.seconds,
            "stood": time.perf_counter() - self.begun,
            "under_way": not done,
            "done": done,
            "failed": self.failed,
        }


class KvTaking:
    """What one rank takes from others.

    Args:
        peers: its communicators.
        rows: its KV tensors.
        identity: see `identity_of`.
    """

    def __init__(
        self,
        peers: Callable[[], Peers],
        rows: Callable[[Scheduler], RowTable],
        identity: Callable[[], str],
    ) -> None:
        self._peers, self._rows, self._identity = peers, rows, identity
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._leaving: list[_Part] = []

    def count(self) -> int:
        """Texts' sessions that have slots here which must stay where they are. From any thread."""
        with self._lock:
            return len(self._sessions) + len(self._leaving)

    def await_part(self, key: str, timeout_s: float) -> bool:
        """Waits until nothing is on its way under `key`; False if time is up. From any thread."""
        with self._lock:
            session = self._sessions.get(key)
        part = None if session is None else session.part
        return part is None or part.ended.wait(timeout_s)

    def take(self, context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One boundary: takes in what has come, and asks for up to `budget` bytes more.

        All ranks take alike or none does: what one could not get, all give back. This replica's
        pages are taken whole, whatever those of the giver are; the rest of a text is left to be
        computed.

        Args:
            context: of the command.
            arguments: `key` that the giver holds the texts under, `name` of the communicator,
                `budget`; `texts` (lists of tokens, as long as the giver holds them) the first time;
                `give_up`: what is not there yet is not waited for.

        Returns:
            `cached`, tokens of each text in this replica's cache now; `bytes` of what was taken in,
            `seconds` that it was on its way, `stood`, those that this command took; `under_way`:
            more is coming; `done`: nothing more will; `failed`, with the reason, if it ended early.
        """
        scheduler, outcome = context.scheduler.raw, Outcome()
        session = self._sessions.get(arguments["key"])
        if session is None:
            session = self._begin(context, arguments)
            if not session.texts:
                outcome.failed = "nothing is on its way under that key"
        if session.part is not None:
            self._take_in(scheduler, session, arguments, outcome)
        if session.part is None and not outcome.failed and not arguments.get("give_up"):
            self._ask(scheduler, session, int(arguments["budget"]), outcome)
        done = session.part is None
        if done:
            self._end(scheduler, session)
        return outcome.told(session.texts, done)

    def led_by(self, context: CommandContext) -> None:
        """At every boundary where a lease begins: ends what was begun for a controller before this
        one, and frees slots that nobody writes to any more."""
        scheduler = context.scheduler.raw
        for session in [s for s in self._sessions.values() if s.epoch < context.epoch]:
            self._abandon(session)
            self._end(scheduler, session)
        if not self._leaving:
            return
        (over,) = agreed(scheduler, all(part.ended.is_set() for part in self._leaving))
        if over:
            for part in self._leaving:
                cached.give_back(scheduler, cached.release(scheduler, part.reserved))
            with self._lock:
                self._leaving = []

    # ------------------------------------------------------------------ inside

    def _begin(self, context: CommandContext, arguments: Mapping[str, Any]) -> _Session:
        scheduler, texts = context.scheduler.raw, []
        page = cached.page_size(scheduler)
        for tokens in arguments["texts"]:
            held = cached.hold(scheduler, tokens)
            whole = len(tokens) // page * page
            texts.append(_Text(array("q", tokens), whole, len(held.slots), held.node))
        session = _Session(context.epoch, arguments["key"], arguments["name"], texts)
        with self._lock:
            self._sessions[session.key] = session
        return session

    def _end(self, scheduler: Scheduler, session: _Session) -> None:
        with self._lock:
            del self._sessions[session.key]
        for text in session.texts:
            scheduler.tree_cache.dec_lock_ref(text.node)

    def _ask(self, scheduler: Scheduler, session: _Session, budget: int, outcome: Outcome) -> None:
        """The next part, if there is one: slots, and a thread that asks for its rows."""
        table, page = self._rows(scheduler), cached.page_size(scheduler)
        most = max(1, budget // table.row_bytes // page) * page
        moves = next_moves(session.texts, most, page)
        if not moves:
            return
        count = sum(move.end - move.start for move in moves)
        if count == 0:  # Another text has brought all of it.
            _put_in(scheduler, session.texts, moves, torch.empty(0, dtype=torch.int64))
            return
        reserved = cached.reserve(scheduler, count, f"{session.key} {session.parts}")
        if reserved is None:  # The same on all ranks: none has asked for anything.
            outcome.failed = f"no room for {count} rows"
            return
        part = _Part(moves, reserved)
        session.part, session.parts = part, session.parts + 1
        part.run(session.name, self._fetcher(scheduler, session, part))

    def _fetcher(self, scheduler: Scheduler, session: _Session, part: _Part) -> Callable[[], None]:
        """What brings a part's rows, from its own thread."""
        table, identity = self._rows(scheduler), self._identity()
        slots = part.reserved.slots
        before = None
        if slots.is_cuda:  # Whoever had the slots before may still be writing to them.
            before = torch.cuda.Event()
            before.record()

        def fetch() -> None:
            if before is not None:
                torch.cuda.set_device(slots.device)
                before.synchronize()
            taker = self._peers().taker(session.name)
            order = {
                "what": "kv",
                "key": session.key,
                "moves": [(m.text, m.start, m.end) for m in part.moves if m.end > m.start],
                "rows": table.described(),
                "identity": identity,
            }
            with torch.inference_mode():
                taker.take(order, table.scatter(slots, taker.piece_bytes))

        return fetch

    def _take_in(
        self,
        scheduler: Scheduler,
        session: _Session,
        arguments: Mapping[str, Any],
        outcome: Outcome,
    ) -> None:
        """What has come, if it has on every rank."""
        part = session.part
        assert part is not None
        ended = part.ended.is_set()
        over, good = agreed(scheduler, ended, ended and not part.failed)
        if not over and not arguments.get("give_up"):
            return
        if not over:
            outcome.failed = part.failed or "its rows were given up while they were on their way"
            self._abandon(session)
            return
        session.part = None
        slots = cached.release(scheduler, part.reserved)
        if not good:
            cached.give_back(scheduler, slots)
            outcome.failed = part.failed or "another rank did not get its rows"
            return
        _put_in(scheduler, session.texts, part.moves, slots)
        outcome.bytes, outcome.seconds = len(slots) * self._rows(scheduler).row_bytes, part.seconds

    def _abandon(self, session: _Session) -> None:
        """Its slots stay until no rank's thread writes to them any more (`led_by`)."""
        part, session.part = session.part, None
        if part is None:
            return
        with self._lock:
            self._leaving.append(part)
        # To abort what is on its way may take its time.
        threading.Thread(
            target=self._peers().close, args=(session.name,), name="taker-close", daemon=True
        ).start()


def next_moves(texts: Sequence[_Text], most: int, page: int) -> list[Move]:
    """Up to `most` rows that are missing, text by text; what two texts have in common once.

    Args:
        texts: in the order in which they come.
        most: rows, a multiple of `page`.
        page: of this replica's cache.
    """
    moves: list[Move] = []
    reach: list[int] = []  # tokens of each text before that are cached, or will be
    for number, text in enumerate(texts):
        common = [_common(texts[i].tokens, text.tokens, n) for i, n in enumerate(reach)]
        start = min(max([text.have, *(n // page * page for n in common)]), text.whole)
        end = start + min(most, text.whole - start)
        if end > text.have:
            moves.append(Move(number, start, end))
        most -= end - start
        reach.append(end)
    return moves


def _common(one: array[int], other: array[int], most: int) -> int:
    """How many of the first `most` tokens are the same."""
    length = min(len(one), len(other), most)
    differ = np.frombuffer(one, np.int64, length) != np.frombuffer(other, np.int64, length)
    return int(differ.argmax()) if differ.any() else length


def _put_in(
    scheduler: Scheduler, texts: Sequence[_Text], moves: Sequence[Move], slots: torch.Tensor
) -> None:
    """Rows of a part become cached text, which the texts hold from now on."""
    cache, at = scheduler.tree_cache, 0
    for move in moves:
        text, count = texts[move.text], move.end - move.start
        if count:
            rows = slots[at : at + count]
            at += count
            node = cached.put_in(scheduler, text.tokens, move.start, rows)
            cache.inc_lock_ref(node)
        else:  # An earlier text brought it.
            node = cached.hold(scheduler, text.tokens[: move.end]).node
        cache.dec_lock_ref(text.node)
        text.have, text.node = move.end, node


def agreed(scheduler: Scheduler, *mine: bool) -> list[bool]:
    """Of each question, whether all ranks of the replica say yes. Every rank asks at the same
    boundary."""
    group = scheduler.tp_group
    if group.world_size == 1:
        return list(mine)
    votes = torch.tensor([int(one) for one in mine])
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [bool(vote) for vote in votes.tolist()]
