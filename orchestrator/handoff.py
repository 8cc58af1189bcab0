"""KV of sequences that move: from the replica that goes to the one that takes them.

Runs inside the controller. The taking replica asks, once it has such a sequence and before its
engine does; what it gets by then its engine finds in its prefix cache. What it does not get, for
whatever reason, is computed again: nothing here can harm a sequence.

```
move() ...      sequences of one pair of replicas wait together
session         ranks meet (once a pair); giver holds; taker takes, boundary by boundary;
                giver lets go
```
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from overstory.orchestrator.lease import Command

logger = logging.getLogger(__name__)

BRING_S = 30.0
"""Longest that a sequence waits for its KV; then it is computed again."""
FEWEST_BYTES, FIRST_BYTES, MOST_BYTES = 16 << 20, 64 << 20, 4 << 30
"""Of a rank, at one boundary: at least, at first, at most. Over NVLink a boundary of 1 GiB of a
text of 200,000 tokens takes 16 ms, 13 of which are not the rows' way (docs/hand-off.md)."""
STAND_STILL_S = 0.25
"""So long, about, the taking replica's other requests wait at a boundary, whatever the link."""
LET_GO_S = 5.0
"""Whoever is slower lets go later: the command is on its way."""

MEET_S = 15.0
TOGETHER_S = 0.02
"""How long the first sequence of a session waits for others that leave at the same time."""
HOLD_TRIES = 40
HOLD_PAUSE_S = 0.05
"""Until the giver's engine has ended a request that left it."""
LINGER_S = 10.0
"""Ranks stay connected so long after the last session."""


class NotMoved(RuntimeError):
    """The KV of a sequence, or some of it, did not come over. Says why; nothing is wrong."""


class Steering(Protocol):
    """The controller, as seen from here."""

    def ranks_of(self, replica: str) -> int:
        """Ranks of a replica under lease; `NotMoved` if it is not."""

    async def carry_out(self, replica: str, command: Command) -> Mapping[int, Any]:
        """Results of a boundary command by rank."""

    async def ask(self, replica: str, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a control method of a rank."""


@dataclass(frozen=True)
class Text:
    """A sequence's tokens so far, and what its request was called at the replica it leaves."""

    rid: str
    tokens: tuple[int, ...]


@dataclass
class HandOffFigures:
    """Since the controller began."""

    sequences: int = 0
    fallbacks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    last_reason: str = ""


@dataclass
class _Pair:
    """Sequences that wait to go from one replica to another, and the ranks' communicator."""

    giver: str
    taker: str
    waiting: list[tuple[Text, asyncio.Future[int]]] = field(default_factory=list)
    name: str = ""
    task: asyncio.Task[None] | None = None


class HandOffs:
    """All hand-offs of a deployment.

    Args:
        steering: the controller.
    """

    def __init__(self, steering: Steering) -> None:
        self._steering = steering
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self.figures = HandOffFigures()

    async def close(self) -> None:
        """Ends all that is under way: ranks let go and part, whoever waits computes again."""
        tasks = [pair.task for pair in self._pairs.values() if pair.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def move(self, giver: str, taker: str, text: Text) -> int:
        """Brings the KV of a sequence over.

        Returns:
            how many of its tokens the taker has KV of now.

        Raises:
            NotMoved: it has not all that the giver had.
        """
        pair = self._pairs.setdefault((giver, taker), _Pair(giver, taker))
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        pair.waiting.append((text, outcome))
        if pair.task is None:
            pair.task = asyncio.get_running_loop().create_task(self._serve(pair))
        try:
            tokens = await outcome
        except NotMoved as reason:
            self.figures.fallbacks += 1
            self.figures.last_reason = str(reason)
            raise
        self.figures.sequences += 1
        return tokens

    def status(self) -> dict[str, Any]:
        """Figures, for the status and metrics."""
        return dataclasses.asdict(self.figures)

    # ------------------------------------------------------------------ inside

    async def _serve(self, pair: _Pair) -> None:
        """Sessions until nobody has come for a while. Ends what waits whatever happens."""
        try:
            idle_since = time.monotonic()
            while pair.waiting or pair.name or time.monotonic() - idle_since < LINGER_S:
                await asyncio.sleep(TOGETHER_S)
                if pair.waiting:
                    batch, pair.waiting = pair.waiting, []
                    await self._session(pair, batch)
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since >= LINGER_S:
                    await self._part(pair)
        finally:
            del self._pairs[pair.giver, pair.taker]  # Who comes now begins anew.
            _fail(pair.waiting, "the hand-off ended")
            await self._part(pair)

    async def _session(self, pair: _Pair, batch: list[tuple[Text, asyncio.Future[int]]]) -> None:
        """One hold, as many takes as it needs."""
        key = uuid.uuid4().hex
        texts = [text for text, _ in batch]
        try:
            try:
                await self._meet(pair)
                lengths = await self._hold(pair, key, texts)
                cached, failed = await self._take(pair, key, texts, lengths)
            finally:
                if pair.name:
                    await self._let_go(pair, key)
            for (_, outcome), have, want in zip(batch, cached, lengths, strict=True):
                _settle(outcome, have, want, failed)
            if failed:  # Perhaps of a communicator that is of no more use.
                await self._part(pair)
        except Exception as error:
            reason = str(error) or type(error).__name__
            logger.warning("KV of %d sequences stays at %s: %s", len(batch), pair.giver, reason)
            _fail(batch, reason)
            if not isinstance(error, NotMoved):
                await self._part(pair)
        finally:
            _fail(batch, "the controller ends")  # No-op for those that have an outcome.

    async def _meet(self, pair: _Pair) -> None:
        """Rank i of one with rank i of the other; all or none."""
        steering, ranks = self._steering, self._steering.ranks_of(pair.giver)
        if steering.ranks_of(pair.taker) != ranks:
            raise NotMoved(f"{pair.giver} and {pair.taker} have not as many ranks")
        if pair.name:
            return
        name = f"kv-{pair.giver}-{pair.taker}-{uuid.uuid4().hex[:8]}"
        kind = await steering.ask(pair.giver, 0, "peer", "kind")
        pair.name = name  # From now on there is something to close.
        tickets = [
            await steering.ask(pair.giver, rank, "peer", "offer", name) for rank in range(ranks)
        ]
        opened = await asyncio.gather(
            *(
                steering.ask(replica, rank, "peer", "open", name, kind, ticket, MEET_S)
                for rank in range(ranks)
                for replica, ticket in ((pair.giver, None), (pair.taker, tickets[rank]))
            ),
            return_exceptions=True,
        )
        failures = [answer for answer in opened if isinstance(answer, BaseException)]
        if failures:
            await self._part(pair)
            raise NotMoved(f"the ranks did not meet: {failures[0]}") from failures[0]

    async def _hold(self, pair: _Pair, key: str, texts: Sequence[Text]) -> list[int]:
        """Tokens of each text that the giver holds KV of."""
        asked = [{"rid": text.rid, "tokens": list(text.tokens)} for text in texts]
        for _ in range(HOLD_TRIES):
            command = Command("kv_hold", {"key": key, "texts": asked}, drain=True)
            results = await self._steering.carry_out(pair.giver, command)
            first = results[0]
            if "refused" in first:
                raise NotMoved(first["refused"])
            if not first["running"]:
                if any(result["lengths"] != first["lengths"] for result in results.values()):
                    raise NotMoved(f"the ranks of {pair.giver} hold different texts: {results}")
                return list(first["lengths"])
            await asyncio.sleep(HOLD_PAUSE_S)
        raise NotMoved(f"{pair.giver} still generates {', '.join(first['running'])}")

    async def _take(
        self, pair: _Pair, key: str, texts: Sequence[Text], lengths: Sequence[int]
    ) -> tuple[list[int], str]:
        """Tokens of each text that the taker has KV of, and why not all, or nothing."""
        cut = [list(text.tokens[:n]) for text, n in zip(texts, lengths, strict=True)]
        arguments = {"key": key, "name": pair.name, "texts": cut}
        budget, until = FIRST_BYTES, time.monotonic() + BRING_S
        while True:
            command = Command("kv_take", {**arguments, "budget": budget}, drain=True)
            results = await self._steering.carry_out(pair.taker, command)
            self.figures.bytes += sum(result["bytes"] for result in results.values())
            self.figures.seconds += max(result["seconds"] for result in results.values())
            first = results[0]
            cached = first["cached"] or [0] * len(cut)
            if first["done"]:
                # Every rank has its own reason; most only know that another one failed.
                reasons = [r["failed"] for r in results.values() if r["failed"]]
                telling = [r for r in reasons if "another rank" not in r]
                return cached, (telling or reasons or [""])[0]
            if time.monotonic() > until:  # Nobody waits for the rest any more.
                return cached, f"not all of it came in {BRING_S:g} s"
            budget = next_budget(budget, results.values())

    async def _let_go(self, pair: _Pair, key: str) -> None:
        with contextlib.suppress(Exception):  # A giver that is gone holds nothing.
            async with asyncio.timeout(LET_GO_S):
                await self._steering.carry_out(pair.giver, Command("kv_let_go", {"key": key}))

    async def _part(self, pair: _Pair) -> None:
        """Both sides close; whoever is gone has closed."""
        name, pair.name = pair.name, ""
        if not name:
            return
        sides = []
        for replica in (pair.taker, pair.giver):
            with contextlib.suppress(NotMoved):
                ranks = self._steering.ranks_of(replica)
                sides += [(replica, rank) for rank in range(ranks)]
        await asyncio.gather(
            *(self._steering.ask(replica, rank, "peer", "close", name) for replica, rank in sides),
            return_exceptions=True,
        )


def next_budget(budget: int, results: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of a rank for the next boundary, so that it takes about `STAND_STILL_S`.

    Args:
        budget: of the boundary before.
        results: of its ranks; the slowest counts.
    """
    rates = [r["bytes"] / r["seconds"] for r in results if r["bytes"] and r["seconds"] > 0]
    if not rates:
        return budget
    return int(min(max(FEWEST_BYTES, min(rates) * STAND_STILL_S), MOST_BYTES))


def _settle(outcome: asyncio.Future[int], have: int, want: int, failed: str) -> None:
    if outcome.done():  # Whoever waited has gone.
        return
    if failed and have < want:
        outcome.set_exception(NotMoved(failed))
    else:
        outcome.set_result(have)


def _fail(batch: list[tuple[Text, asyncio.Future[int]]], reason: str) -> None:
    for _, outcome in batch:
        if not outcome.done():
            outcome.set_exception(NotMoved(reason))
