"""Boundary commands of the hand-off of KV: `kv_hold`, `kv_take` and `kv_let_go`.

```
giving replica  kv_hold    texts found in the prefix cache and held; a thread sends what is asked
taking replica  kv_take    slots taken, rows received, all ranks agree, rows become cached text
                ...        again until it has all; so many bytes each time: its ranks wait
giving replica  kv_let_go
```
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from overstory.workers.handoff import cached
from overstory.workers.handoff.peers import Peers
from overstory.workers.handoff.pieces import Carried, Piece
from overstory.workers.handoff.rows import RowTable

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from overstory.workers.commands import CommandContext, CommandTable

logger = logging.getLogger(__name__)

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

    def register(self, table: CommandTable) -> None:
        """Adds the commands."""
        table.register("kv_hold", self.hold)
        table.register("kv_take", self.take)
        table.register("kv_let_go", self.let_go)

    def holding(self) -> int:
        """Hand-offs that this rank gives to at present. From any thread."""
        with self._lock:
            return len(self._held)

    def outgoing(self) -> dict[str, Any]:
        """`holding`, and `fetched`: requests whose KV was asked for and let go. From any thread."""
        with self._lock:
            return {"holding": len(self._held), "fetched": list(self._fetched)}

    def led_by(self, context: CommandContext) -> None:
        """At a boundary: lets go of what was held for a controller before this one, which cannot
        end what it began. A thread that is sending it finds so; the taker computes the rest."""
        with self._lock:
            orphans = [key for key, order in self._held.items() if order.epoch < context.epoch]
        for key in orphans:
            self._end(context, key)

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
        """Rows `start` to `end` of text `text` held under `key`. From a giver's thread.

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
        slots = held.texts[order["text"]].slots
        start, end = order["start"], order["end"]
        if not 0 <= start < end <= len(slots):
            raise ValueError(f"rows {start} to {end} of {len(slots)} that are held")
        return table.gather(slots[start:end], piece_bytes), lambda: self._holds(order["key"], held)

    def _holds(self, key: str, held: _Order) -> bool:
        with self._lock:
            return self._held.get(key) is held

    # ------------------------------------------------------------------ taking

    def take(self, context: CommandContext, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Takes up to `budget` bytes of the KV of `texts` (lists of tokens, as long as the giver
        holds them, held under `key`) over the communicator `name`.

        All ranks take alike or none does: what one could not get, all give back. This replica's
        pages are taken whole, whatever those of the giver are; the rest of a text is left to be
        computed.

        Returns:
            `cached`, tokens of each text in this replica's cache now; `bytes`, `seconds`; `done`,
            whether nothing is left to take; `failed`, with the reason, if it ended early.
        """
        scheduler = context.scheduler.raw
        texts: Sequence[Sequence[int]] = arguments["texts"]
        if reason := self._cannot(scheduler):
            return {"failed": reason, "cached": [], "bytes": 0, "seconds": 0.0, "done": True}
        table = self._rows(scheduler)
        page = cached.page_size(scheduler)
        left = max(1, int(arguments["budget"]) // table.row_bytes // page) * page
        carried, lengths, failed, done = Carried(0, 0.0), [], "", True
        with torch.inference_mode():
            for number, tokens in enumerate(texts):
                held = cached.hold(scheduler, tokens)
                try:
                    start, whole = len(held.slots), len(tokens) // page * page
                    count = min(left, whole - start)
                    if count > 0 and not failed:
                        what = {"key": arguments["key"], "text": number}
                        part, failed = self._take_rows(
                            scheduler, arguments["name"], what, tokens, held, count
                        )
                        carried += part
                        left -= count
                        start += 0 if failed else count
                    done = done and start == whole
                    lengths.append(start)
                finally:
                    cached.let_go(scheduler, held)
        return {
            "cached": lengths,
            "bytes": carried.bytes,
            "seconds": carried.seconds,
            "done": done or bool(failed),
            "failed": failed,
        }

    def _take_rows(
        self,
        scheduler: Scheduler,
        name: str,
        what: Mapping[str, Any],
        tokens: Sequence[int],
        held: cached.Held,
        count: int,
    ) -> tuple[Carried, str]:
        """Rows of the `count` tokens after those held; the reason if they did not come."""
        start = len(held.slots)
        slots = cached.take_slots(scheduler, count)
        if slots is None:  # The same on all ranks: none has asked for anything.
            return Carried(0, 0.0), f"no room for {count} rows"
        begun = time.perf_counter()
        reason = ""
        try:
            assert self.peers is not None, "commands run after the rank has started"
            taker = self.peers.taker(name)
            table = self._rows(scheduler)
            order = {
                "what": "kv",
                **what,
                "start": start,
                "end": start + count,
                "rows": table.described(),
                "identity": self.identity,
            }
            taker.take(order, table.scatter(slots, taker.piece_bytes))
        except Exception as error:  # Whatever it is: the other ranks wait for this one's vote.
            logger.warning("rows did not come: %s: %s", type(error).__name__, error)
            reason = str(error) or type(error).__name__
        if not agreed(scheduler, not reason):
            cached.give_back(scheduler, slots)
            return Carried(0, 0.0), reason or "another rank did not get its rows"
        cached.put_in(scheduler, tokens, held, slots)
        table = self._rows(scheduler)
        return Carried(count * table.row_bytes, time.perf_counter() - begun), ""

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


def agreed(scheduler: Scheduler, mine: bool) -> bool:
    """Whether all ranks of the replica say yes. Every rank asks at the same boundary."""
    group = scheduler.tp_group
    if group.world_size == 1:
        return mine
    vote = torch.tensor([int(mine)])
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(vote.item())
