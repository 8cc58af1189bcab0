"""Boundary commands of the hand-off of KV: `kv_hold`, `kv_take` and `kv_let_go`.

```
giving replica  kv_hold    texts found in the prefix cache and held; a thread sends what is asked
taking replica  kv_take    slots reserved; a thread asks for rows (`taking.py`)
                kv_take    all ranks agree that they came: they become cached text; the next ones
                ...        again until it has all
giving replica  kv_let_go
```
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.handoff import cached
from overstory.workers.handoff.peers import Peers
from overstory.workers.handoff.pieces import Piece
from overstory.workers.handoff.rows import RowTable
from overstory.workers.handoff.taking import KvTaking, Outcome

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from overstory.workers.commands import CommandContext, CommandTable

_REMEMBERED = 4096
"""Requests that are known as fetched: more than leave a replica in the seconds of its going."""


@dataclass(frozen=True)
class _Order:
    """Texts that are held, for the controller of `epoch`."""

    epoch: int
    rids: list[str]
    texts: list[cached.Held]


class KvHandoff:
    """The commands of one rank.

    Attributes:
        peers: its communicators, which ask `give` for rows; set before the first command.
        identity: see `identity_of`; rows go only to ranks with the same.
    """

    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.identity = ""
        self._lock = threading.Lock()
        self._held: dict[str, _Order] = {}
        self._fetched: deque[str] = deque(maxlen=_REMEMBERED)
        self._table: RowTable | None = None
        self._taking = KvTaking(self._own_peers, self._rows, lambda: self.identity)

    def register(self, table: CommandTable) -> None:
        """Adds the commands."""
        table.register("kv_hold", self.hold)
        table.register("kv_take", self.take)
        table.register("kv_let_go", self.let_go)

    def rehearse(self, scheduler: Scheduler) -> None:
        """Copies the row of slot 0, which is nobody's, out of the KV tensors and back."""
        if self._cannot(scheduler):
            return
        table = self._rows(scheduler)
        device = scheduler.token_to_kv_pool_allocator.device
        staging = torch.empty(table.row_bytes, dtype=torch.uint8, device=device)
        slots = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            for pieces in (table.gather, table.scatter):
                for piece in pieces(slots, table.row_bytes):
                    piece.move(staging)

    def holding(self) -> int:
        """Hand-offs that this rank gives to or takes from at present. From any thread."""
        with self._lock:
            return len(self._held) + self._taking.count()

    def outgoing(self) -> dict[str, Any]:
        """`holding`, hand-offs that this rank gives to, and `fetched`: requests whose KV was asked
        for and let go. From any thread."""
        with self._lock:
            return {"holding": len(self._held), "fetched": list(self._fetched)}

    def led_by(self, context: CommandContext) -> None:
        """At a boundary: lets go of what was held for a controller before this one, which cannot
        end what it began. A thread that is sending it finds so; the taker computes the rest. So
        with what is taken."""
        with self._lock:
            orphans = [key for key, order in self._held.items() if order.epoch < context.epoch]
        for key in orphans:
            self._end(context, key)
        with torch.inference_mode():
            self._taking.led_by(context)

    # ------------------------------------------------------------------ giving

    def hold(self, context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Finds and holds the KV of `texts` (each `rid`, `tokens`) under `key`.

        Returns:
            `lengths`, tokens found of each; `running`, rids whose KV is not in the cache yet: then
            nothing is held, and it may be asked again; or `refused`.
        """
        scheduler = context.scheduler.raw
        if reason := self._cannot(scheduler):
            return {"refused": reason}
        texts = arguments["texts"]
        running = [t["rid"] for t in texts if cached.still_running(scheduler, t["rid"])]
        if running:
            return {"running": running, "lengths": []}
        self._end(context, arguments["key"])  # an order before, whose answer did not arrive
        table = self._rows(scheduler)
        held = [cached.hold(scheduler, text["tokens"]) for text in texts]
        with self._lock:
            rids = [text["rid"] for text in texts]
            self._held[arguments["key"]] = _Order(context.epoch, rids, held)
        return {
            "lengths": [len(one.slots) for one in held],
            "running": [],
            "row_bytes": table.row_bytes,
        }

    def let_go(self, context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Ends what `hold` began under `key`. Returns how many texts were held."""
        order = self._end(context, arguments["key"])
        if order is None:
            return {"texts": 0}
        with self._lock:
            self._fetched += order.rids
        return {"texts": len(order.texts)}

    def _end(self, context: CommandContext, key: str) -> _Order | None:
        with self._lock:
            order = self._held.pop(key, None)
        for one in [] if order is None else order.texts:
            cached.let_go(context.scheduler.raw, one)
        return order

    def give(self, order: Any, piece_bytes: int) -> tuple[Iterable[Piece], Callable[[], bool]]:
        """Rows of texts held under `key`: of each of `moves` (text, start, end). From a giver's
        thread.

        Raises:
            ValueError: no such rows are held here, or the taking rank's rows are others.
        """
        with self._lock:
            held = self._held.get(order["key"])
        table = self._table
        if held is None or table is None:
            raise ValueError(f"nothing is held under {order['key']!r}")
        if order["identity"] != self.identity or order["rows"] != table.described():
            raise ValueError("the two replicas do not have the same weights or KV layout")
        slots = torch.cat([_rows_of(held.texts, *move) for move in order["moves"]])
        return table.gather(slots, piece_bytes), lambda: self._holds(order["key"], held)

    def _holds(self, key: str, held: _Order) -> bool:
        with self._lock:
            return self._held.get(key) is held

    # ------------------------------------------------------------------ taking

    def take(self, context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See `KvTaking.take`."""
        if reason := self._cannot(context.scheduler.raw):
            return Outcome(failed=reason).told([], done=True)
        with torch.inference_mode():
            return self._taking.take(context, arguments)

    def arrived(self, key: str, timeout_s: float) -> bool:
        """See `KvTaking.await_part`."""
        return self._taking.await_part(key, timeout_s)

    def _own_peers(self) -> Peers:
        assert self.peers is not None, "commands run after the rank has started"
        return self.peers

    # ------------------------------------------------------------------ both

    def _cannot(self, scheduler: Scheduler) -> str:
        """Why this engine's KV cannot be handed over; empty if it can."""
        if reason := cached.cannot(scheduler):
            return reason
        try:
            self._rows(scheduler)
        except (RuntimeError, ValueError) as error:
            return f"its KV tensors have no plain rows: {error}"
        return ""

    def _rows(self, scheduler: Scheduler) -> RowTable:
        if self._table is None:
            from overstory.workers.defrag.relocate import pool_buffers

            self._table = RowTable(pool_buffers(scheduler))
        return self._table


def _rows_of(texts: Sequence[cached.Held], text: int, start: int, end: int) -> torch.Tensor:
    """Slots of rows `start` to `end` of a text that is held; ValueError if it has not so many."""
    if not 0 <= text < len(texts) or not 0 <= start < end <= len(texts[text].slots):
        have = [len(one.slots) for one in texts]
        raise ValueError(f"rows {start} to {end} of text {text}; held are {have}")
    return texts[text].slots[start:end]
