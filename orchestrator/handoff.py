"""KV of sequences that move: from the replica that goes to the one that takes them.

Runs inside the controller. The taking replica asks, once it has such a sequence and before its
engine does; what it gets by then its engine finds in its prefix cache. What it does not get, for
whatever reason, is computed again: nothing here can harm a sequence.

```
meet_ahead()    a replica is about to go: its ranks meet those that its sequences may go to
move() ...      sequences of one pair of replicas wait together
session         ranks meet (once a pair); giver holds; taker takes, part by part, while it steps
                on; giver lets go
part()          nobody comes any more: the ranks part while all of them are there
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
FEWEST_BYTES, FIRST_BYTES, MOST_BYTES = 16 << 20, 64 << 20, 16 << 30
"""Of a rank, in one part: at least, at first, at most. What came is kept when the next part does
not come; each part costs a boundary, and that its first and last piece overlap with nothing."""
PART_S = 0.25
"""So long, about, a part is on its way, whatever the link."""
LOOK_S = 0.5
"""So long one question to a rank waits for a part."""
LET_GO_S = 5.0
"""Whoever is slower lets go later: the command is on its way."""

MEET_S = 5.0
"""Longest that ranks wait for each other: sequences wait as long."""
STEERED_S = 2.0
"""Longest that sequences wait for the first lease of the replica that they have come to."""
TOGETHER_S = 0.02
"""How long the first sequence of a session waits for others that leave at the same time."""
HOLD_TRIES = 40
HOLD_PAUSE_S = 0.05
"""Until the giver's engine has ended a request that left it."""
LINGER_S = 10.0
"""Ranks stay connected so long after the last session."""
MOST_AHEAD = 4
"""Replicas that the ranks of one that goes meet ahead, at once: each pair takes GPU memory, and
while it meets one of the threads (`CONTROL_THREADS`) by which a rank gets its leases."""


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
    """Since the controller began.

    Attributes:
        sequences: moved with all their KV.
        fallbacks: computed again, in part or whole.
        bytes: that ranks took in.
        seconds: that ranks stood still for it, the slowest of a replica each time.
        carrying_s: that it was on its way, while they stepped on.
        waited_s: that sequences waited for their KV, each by itself; longest_wait_s of these.
        meetings: of ranks of two replicas; meeting_s that these took, holding_s until givers held
            what was asked for, taking_s until takers had it.
        last_reason: of the last fallback.
    """

    sequences: int = 0
    fallbacks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    carrying_s: float = 0.0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0
    meetings: int = 0
    meeting_s: float = 0.0
    holding_s: float = 0.0
    taking_s: float = 0.0
    last_reason: str = ""


@dataclass
class _Pair:
    """Sequences that wait to go from one replica to another, and the ranks' communicator.

    Attributes:
        tried: a first meeting has been tried, or is not wanted before there is a sequence.
        ends: which of the two ends its process, once nobody comes any more.
    """

    giver: str
    taker: str
    waiting: list[tuple[Text, asyncio.Future[int]]] = field(default_factory=list)
    name: str = ""
    task: asyncio.Task[None] | None = None
    tried: asyncio.Event = field(default_factory=asyncio.Event)
    ends: str = ""


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

    async def meet_ahead(self, giver: str, takers: Sequence[str]) -> None:
        """Ranks of a replica that is about to go meet those that its sequences may go to, so that
        these need not wait for that. Returns when they have, or cannot."""
        await asyncio.gather(
            *(self._pair(giver, taker, ahead=True).tried.wait() for taker in takers[:MOST_AHEAD])
        )

    async def part(self, replica: str) -> None:
        """A replica goes and nobody comes for what it had: others' ranks part from its own while
        all of them are there. Returns when they have."""
        pairs = [p for p in self._pairs.values() if replica in (p.giver, p.taker)]
        for pair in pairs:
            pair.ends = replica
        if tasks := [pair.task for pair in pairs if pair.task is not None]:
            await asyncio.wait(tasks)

    async def move(self, giver: str, taker: str, text: Text) -> int:
        """Brings the KV of a sequence over.

        Returns:
            how many of its tokens the taker has KV of now.

        Raises:
            NotMoved: it has not all that the giver had.
        """
        outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pair(giver, taker).waiting.append((text, outcome))
        begun = time.monotonic()
        try:
            tokens = await outcome
        except NotMoved as reason:
            self.figures.fallbacks += 1
            self.figures.last_reason = str(reason)
            raise
        finally:
            waited_s = time.monotonic() - begun
            self.figures.waited_s += waited_s
            self.figures.longest_wait_s = max(self.figures.longest_wait_s, waited_s)
        self.figures.sequences += 1
        return tokens

    def status(self) -> dict[str, Any]:
        """Figures, for the status and metrics."""
        return dataclasses.asdict(self.figures)

    # ------------------------------------------------------------------ inside

    def _pair(self, giver: str, taker: str, ahead: bool = False) -> _Pair:
        """What there is of the two, or a new one, whose ranks meet at once or for a sequence."""
        pair = self._pairs.get((giver, taker))
        if pair is None:
            pair = self._pairs[giver, taker] = _Pair(giver, taker)
            if not ahead:
                pair.tried.set()
            pair.task = asyncio.get_running_loop().create_task(self._serve(pair))
        return pair

    async def _serve(self, pair: _Pair) -> None:
        """Sessions until nobody has come for a while. Ends what waits whatever happens."""
        try:
            if not pair.tried.is_set():
                await self._try_to_meet(pair)
            idle_since, ended = time.monotonic(), False
            while pair.waiting or not ended:
                await asyncio.sleep(TOGETHER_S)
                if pair.waiting:
                    batch, pair.waiting = pair.waiting, []
                    await self._session(pair, batch)
                    idle_since = time.monotonic()
                elif pair.ends or time.monotonic() - idle_since >= LINGER_S:
                    await self._part(pair)
                    ended = True
        finally:
            del self._pairs[pair.giver, pair.taker]  # Who comes now begins anew.
            pair.tried.set()
            _fail(pair.waiting, "the hand-off ended")
            await self._part(pair)

    async def _try_to_meet(self, pair: _Pair) -> None:
        """Before there is a sequence; those that have come by the time that it fails do without."""
        try:
            await self._meet(pair)
        except Exception as error:
            reason = str(error) or type(error).__name__
            logger.warning("%s and %s do not meet: %s", pair.giver, pair.taker, reason)
            waiting, pair.waiting = pair.waiting, []
            _fail(waiting, reason)
            await self._part(pair)
        pair.tried.set()

    async def _session(self, pair: _Pair, batch: list[tuple[Text, asyncio.Future[int]]]) -> None:
        """One hold, as many takes as it needs."""
        key = uuid.uuid4().hex
        texts = [text for text, _ in batch]
        try:
            try:
                await self._meet(pair)
                begun = time.monotonic()
                lengths = await self._hold(pair, key, texts)
                held = time.monotonic()
                self.figures.holding_s += held - begun
                cached, failed = await self._take(pair, key, texts, lengths)
                self.figures.taking_s += time.monotonic() - held
                for (_, outcome), have, want in zip(batch, cached, lengths, strict=True):
                    _settle(outcome, have, want, failed)
            finally:
                if pair.name:
                    await self._let_go(pair, key)
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
        if await self._steered(pair.taker) != ranks:
            raise NotMoved(f"{pair.giver} and {pair.taker} have not as many ranks")
        if pair.name:
            return
        begun = time.monotonic()
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
        self.figures.meetings += 1
        self.figures.meeting_s += time.monotonic() - begun
        failures = [answer for answer in opened if isinstance(answer, BaseException)]
        if failures:
            await self._part(pair)
            raise NotMoved(f"the ranks did not meet: {failures[0]}") from failures[0]

    async def _steered(self, taker: str) -> int:
        """Ranks of the taking replica, which may have begun to serve just now: sequences come to it
        before it is under its first lease."""
        until = time.monotonic() + STEERED_S
        while True:
            try:
                return self._steering.ranks_of(taker)
            except NotMoved:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(TOGETHER_S)

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
        arguments: dict[str, Any] = {"key": key, "name": pair.name, "texts": cut}
        try:
            return await self._take_parts(pair, arguments, lengths)
        except BaseException:
            await self._give_up(pair, key)
            raise

    async def _take_parts(
        self, pair: _Pair, arguments: dict[str, Any], lengths: Sequence[int]
    ) -> tuple[list[int], str]:
        budget, until, give_up = FIRST_BYTES, time.monotonic() + BRING_S, False
        while True:
            asked = {**arguments, "budget": budget, "give_up": give_up}
            command = Command("kv_take", asked, drain=True)
            results = await self._steering.carry_out(pair.taker, command)
            self._count(results.values())
            first = results[0]
            if first["done"]:
                cached = list(first["cached"]) or [0] * len(lengths)
                if give_up and cached != list(lengths):
                    return cached, f"not all of it came in {BRING_S:g} s"
                return cached, _reason(results.values())
            arguments["texts"] = []  # They are known there.
            budget = next_budget(budget, results.values())
            await self._arrival(pair, arguments["key"], until)
            give_up = time.monotonic() > until  # Nobody waits for the rest any more.

    async def _arrival(self, pair: _Pair, key: str, until: float) -> None:
        """Until the part that is on its way has come to every rank, or failed."""
        ask, ranks = self._steering.ask, range(self._steering.ranks_of(pair.taker))
        while (left := until - time.monotonic()) > 0:
            look_s = min(left, LOOK_S)
            asked = [ask(pair.taker, rank, "peer", "arrived", key, look_s) for rank in ranks]
            if all(await asyncio.gather(*asked)):
                return

    async def _give_up(self, pair: _Pair, key: str) -> None:
        """The taking ranks wait for nothing more."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LET_GO_S):
                arguments = {"key": key, "name": pair.name, "texts": [], "budget": 1}
                command = Command("kv_take", {**arguments, "give_up": True}, drain=True)
                await self._steering.carry_out(pair.taker, command)

    def _count(self, results: Iterable[Mapping[str, Any]]) -> None:
        ranks = list(results)
        self.figures.bytes += sum(result["bytes"] for result in ranks)
        self.figures.seconds += max(result["stood"] for result in ranks)
        self.figures.carrying_s += max(result["seconds"] for result in ranks)

    async def _let_go(self, pair: _Pair, key: str) -> None:
        with contextlib.suppress(Exception):  # A giver that is gone holds nothing.
            async with asyncio.timeout(LET_GO_S):
                await self._steering.carry_out(pair.giver, Command("kv_let_go", {"key": key}))

    async def _part(self, pair: _Pair) -> None:
        """Both sides close; whoever is gone has closed, and whoever ends need not."""
        name, pair.name = pair.name, ""
        if not name:
            return
        sides = []
        for replica in {pair.taker, pair.giver} - {pair.ends}:
            with contextlib.suppress(NotMoved):
                ranks = self._steering.ranks_of(replica)
                sides += [(replica, rank) for rank in range(ranks)]
        await asyncio.gather(
            *(self._steering.ask(replica, rank, "peer", "close", name) for replica, rank in sides),
            return_exceptions=True,
        )


def next_budget(budget: int, results: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of a rank for the next part, so that it takes about `PART_S`.

    Args:
        budget: of the part before.
        results: of its ranks; the slowest counts.
    """
    rates = [r["bytes"] / r["seconds"] for r in results if r["bytes"] and r["seconds"] > 0]
    if not rates:
        return budget
    return int(min(max(FEWEST_BYTES, min(rates) * PART_S), MOST_BYTES))


def _reason(results: Iterable[Mapping[str, Any]]) -> str:
    """Why it ended early, if it did: every rank has its own reason, and most only know that another
    one failed."""
    reasons = [result["failed"] for result in results if result["failed"]]
    telling = [reason for reason in reasons if "another rank" not in reason]
    return (telling or reasons or [""])[0]


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
