"""The controller of a deployment: one task per replica grants leases and reads reports.

```
discovery   every DISCOVERY_S  rank actors by name -> new replicas      (also: register)
replica     until lost         attach; grant what the state says is due
                               wait on rank 0 for a reason to report    (a lease due, half a lease
                               run)
                               read the other ranks' reports, compare digests
                               ranks differ -> the rank to blame is ended, with the cause
                               no answer -> attach again, later and later
```

A plain class over a `RankDirectory`; `overstory.orchestrator.controller_actor` makes it an actor.
It may
die at any moment: replicas go on under their last policy, and its successor attaches anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from overstory.orchestrator.controller_state import ControllerState, Verdict
from overstory.orchestrator.defrag import (
    DefragOrder,
    DefragRefused,
    RanksMovedApart,
    defragment,
)
from overstory.orchestrator.defrag_plan import Fragmentation, SlotPicture
from overstory.orchestrator.handoff import MEET_S, HandOffs, NotMoved, Text
from overstory.orchestrator.lease import Command, LeaseRefused, StaleEpoch
from overstory.orchestrator.rank_directory import RankGone
from overstory.orchestrator.spec import ControlSpec
from overstory.workers.death_note import EXIT_DIVERGED
from overstory.workers.digest import explain_difference
from overstory.workers.tree_policy import parse_policy

logger = logging.getLogger(__name__)

DISCOVERY_S = 5.0
REPORT_WAIT_S = 5.0
CALL_TIMEOUT_S = 10.0
RETRY_S = 1.0
RESULT_S = (0.005, 0.05)
"""Shortest and longest pause between two looks for what a command came to: a sequence that moves
waits for several commands."""
RETRY_MAX_S = 15.0
END_ATTEMPTS = 5


class Ranks(Protocol):
    """What the controller needs of `RankDirectory`."""

    async def replicas(self) -> dict[str, int]:
        """Number of ranks by replica."""

    async def call(
        self, replica: str, rank: int, method: str, *arguments: Any, timeout_s: float
    ) -> Any:
        """Calls a control method of a rank; `RankGone`, TimeoutError or its own error."""

    def forget(self, replica: str) -> None:
        """Drops what is kept of a replica."""


async def _unknown() -> bool:
    """Whether this controller is in charge where nobody can tell: it must not assume so."""
    return False


class Controller:
    """Steers the replicas of one deployment. All methods run on one event loop.

    Args:
        deployment: its name.
        control: the deployment's settings of it.
        ranks: the way to the ranks.
        clock: monotonic seconds.
        in_charge: whether this is the deployment's controller beyond doubt; only then it takes back
            a replica that another one attached to. None: it never does.
        draining: whether a replica is to go: its rows are not worth moving.
        on_report: told the name of a replica whose rank 0 has reported.
    """

    def __init__(
        self,
        deployment: str,
        control: ControlSpec,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
        in_charge: Callable[[], Awaitable[bool]] | None = None,
        draining: Callable[[str], bool] = lambda _: False,
        on_report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ranks = ranks
        self._in_charge = in_charge or _unknown
        self._draining = draining
        self._on_report = on_report
        self._defrag_every_s = control.defrag_every_s
        self._defrag_order = DefragOrder(below=control.defrag_below)
        self._defragmenting: set[str] = set()
        self._handoffs = HandOffs(self)
        self._watch: asyncio.Task[None] | None = None
        self._clock = clock
        self._identity = uuid.uuid4().hex
        self._state = ControllerState(deployment, control, clock)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._nudges: dict[str, asyncio.Event] = {}
        self._discovery: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts discovery on the running event loop."""
        self._discovery = asyncio.get_running_loop().create_task(self._discover())
        if self._defrag_every_s > 0:
            self._watch = asyncio.get_running_loop().create_task(self._watch_fragmentation())

    async def close(self) -> None:
        """Stops granting and lets the replicas run freely at once."""
        await self._handoffs.close()  # While leases still carry commands.
        others = (self._discovery, self._watch)
        tasks = [*self._tasks.values(), *(task for task in others if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in self._state.leased():
            with contextlib.suppress(Exception):  # It falls back to free-running by itself.
                await self._rank(name, 0, "detach", self._state.epoch(name))

    # ------------------------------------------------------------------ calls from outside

    def register(self, replica: str, ranks: int) -> None:
        """A replica is up: follow it now rather than at the next discovery."""
        if self._state.found(replica, ranks):
            self._nudges[replica] = asyncio.Event()
            task = asyncio.get_running_loop().create_task(self._steer(replica))
            self._tasks[replica] = task
            task.add_done_callback(lambda done: self._steered(replica, done))

    async def set_policy(self, policy: str) -> dict[str, Any]:
        """Sets the tree policy of all replicas, from their next boundary on.

        Returns:
            `policy`; `replicas`, those that have room for it and take it at their next boundary;
            `awaited`, those that will be asked once they are under lease; `note`, in words what is
            still open, or empty.

        Raises:
            ValueError: not a policy, or one for which a replica's engine has no room; nothing
            changes.
            TimeoutError: a replica does not say whether it has room; nothing changes.
        """
        parse_policy(policy)
        checked = []
        for name in self._state.leased():
            with contextlib.suppress(RankGone):  # Whoever steers it finds out too.
                await self._rank(name, 0, "check_policy", policy)
                checked.append(name)
        self._state.set_policy(policy)
        self._nudge_all()
        awaited = self._state.awaited()
        note = ""
        if awaited or not checked:
            note = (
                f"not in force yet on {', '.join(awaited) or 'any replica: none is under lease'}; "
                f"{policy} is kept for the next lease, where an engine without room refuses it"
            )
        return {"policy": policy, "replicas": checked, "awaited": awaited, "note": note}

    async def run_command(
        self, command: Command, replica: str | None = None, timeout_s: float = 60.0
    ) -> dict[str, dict[int, Any]]:
        """Lets replicas carry out a command at their next boundary and waits for it.

        Returns:
            the result on each rank, by replica and rank.

        Raises:
            ValueError: unknown replica or command, or no replica under lease.
            TimeoutError: not carried out everywhere in time.
        """
        names = self._state.leased() if replica is None else [replica]
        if not names:
            raise ValueError(f"no replica is under lease: {command.name} would reach none")
        for name in names:
            if name not in self._state.leased():
                raise ValueError(f"no replica {name!r} under lease, only {self._state.leased()}")
            await self._rank(name, 0, "check_command", command.name)
        ticketed = dataclasses.replace(command, ticket=uuid.uuid4().hex)
        for name in names:
            self._state.add_command(name, ticketed)
        self._nudge_all()
        async with asyncio.timeout(timeout_s):
            return {name: await self._results(name, ticketed.ticket) for name in names}

    async def defrag(self, order: DefragOrder, replica: str | None = None) -> dict[str, Any]:
        """Defragments a replica, or all under lease one after the other.

        Returns:
            by replica, see `defragment`.

        Raises:
            DefragRefused: a replica that is unknown, not steered (draining, lost, ...) or already
                being defragmented; or its ranks refuse. Those before it are done.
        """
        staying = [name for name in self._state.leased() if not self._draining(name)]
        names = staying if replica is None else [replica]
        if not names:
            raise DefragRefused("no replica is under lease: there is nothing to defragment")
        return {name: await self._defragment(name, order) for name in names}

    async def hand_off(self, giver: str, taker: str, text: Text) -> int:
        """See `HandOffs.move`."""
        return await self._handoffs.move(giver, taker, text)

    async def meet_ahead(self, giver: str, takers: Sequence[str]) -> None:
        """See `HandOffs.meet_ahead`."""
        await self._handoffs.meet_ahead(giver, takers)

    async def part(self, replica: str) -> None:
        """See `HandOffs.part`."""
        await self._handoffs.part(replica)

    def donor(self) -> str:
        """A replica under lease that can give its weights, rather one that stays; empty if there is
        none."""
        names = sorted(self._state.leased(), key=lambda name: (self._draining(name), name))
        return names[0] if names else ""

    async def status(self) -> dict[str, Any]:
        """See `ControllerState.status`, and `hand_offs`: `HandOffFigures`; reports are read anew
        for it."""
        names = self._state.leased()
        await asyncio.gather(*(self._read(name) for name in names), return_exceptions=True)
        return self.last_status()

    def last_status(self) -> dict[str, Any]:
        """As `status`, of the last reports."""
        return {**self._state.status(), "hand_offs": self._handoffs.status()}

    # ------------------------------------------------------------------ `defrag.Steering`

    def epoch_under_lease(self, replica: str) -> int:
        """Epoch at a replica that is steered and stays; `DefragRefused` if not."""
        if self._draining(replica):
            raise DefragRefused(f"replica {replica} cannot be defragmented: it is draining")
        if replica not in self._state.leased():
            standing = self._state.standing(replica) or f"unknown; known: {self._state.leased()}"
            raise DefragRefused(f"replica {replica} cannot be defragmented: it is {standing}")
        return self._state.epoch(replica)

    async def carry_out(self, replica: str, command: Command) -> Mapping[int, Any]:
        """Results of a command on one replica, by rank."""
        return (await self.run_command(command, replica))[replica]

    async def fetch_picture(self, replica: str, key: str) -> SlotPicture:
        """The picture that rank 0 took under `key`."""
        picture: SlotPicture = await self._rank(replica, 0, "slot_picture", key)
        return picture

    def pictured(self, replica: str, seen: Fragmentation) -> None:
        """Keeps figures for the status."""
        self._state.pictured(replica, dataclasses.asdict(seen))

    # ------------------------------------------------------------------ `handoff.Steering`

    def ranks_of(self, replica: str) -> int:
        """Ranks of a replica whose rows nothing else moves; `NotMoved` for any other."""
        if replica not in self._state.leased():
            raise NotMoved(f"replica {replica} is not steered from here")
        if replica in self._defragmenting:
            raise NotMoved(f"replica {replica} is being defragmented")
        return self._state.ranks(replica)

    async def ask(self, replica: str, rank: int, method: str, *arguments: Any) -> Any:
        """Calls a control method of a rank, which may wait for another rank."""
        limit_s = CALL_TIMEOUT_S + MEET_S
        return await self._ranks.call(replica, rank, method, *arguments, timeout_s=limit_s)

    # ------------------------------------------------------------------ tasks

    async def _discover(self) -> None:
        while True:
            try:
                if self._state.taken_from_us() and await self._in_charge():
                    for name in self._state.taken_from_us():
                        self._state.take_back(name)
                for name, ranks in (await self._ranks.replicas()).items():
                    self.register(name, ranks)
            except Exception:  # Ray's own store may be away for a moment: look again later.
                logger.exception("looking for replicas failed")
            await asyncio.sleep(DISCOVERY_S)

    async def _watch_fragmentation(self) -> None:
        """Looks at replicas that have stepped since; passes follow where it is bad."""
        while True:
            await asyncio.sleep(self._defrag_every_s)
            for name in self._state.worked():
                try:
                    await self._defragment(name, self._defrag_order)
                except DefragRefused as refusal:
                    logger.warning("%s", refusal)
                except Exception:  # Whoever steers the replica finds out what is wrong with it.
                    logger.exception("defragmenting replica %s failed", name)

    async def _defragment(self, name: str, order: DefragOrder) -> dict[str, Any]:
        if name in self._defragmenting:
            raise DefragRefused(f"replica {name} is being defragmented already")
        self._defragmenting.add(name)
        try:
            return await defragment(self, name, order)
        except RanksMovedApart as apart:  # As with digests of steps: nobody may go on with these.
            cause = f"ranks differ after a relocation pass: {apart}"
            logger.error("%s", cause)
            await self._end(name, apart.rank, cause)
            self._state.moved_apart(name, cause)
            raise
        finally:
            self._defragmenting.discard(name)

    async def _steer(self, name: str) -> None:
        """Follows one replica until it is lost or another controller has it."""
        pause_s = RETRY_S
        try:
            while self._state.phase(name) == "found":
                begun = self._clock()
                try:
                    await self._follow(name)
                except TimeoutError as slow:
                    logger.warning("replica %s: %s", name, slow)
                    self._state.unreachable(name, str(slow))
                    if self._clock() - begun > 2 * RETRY_MAX_S:
                        pause_s = RETRY_S  # It went well for a while.
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, RETRY_MAX_S)
        except RankGone as gone:
            self._state.lost(name, str(gone))
        except StaleEpoch as stale:
            self._state.replaced(name, str(stale))
        except Exception as error:
            logger.exception("steering replica %s failed", name)
            self._state.lost(name, f"controller: {type(error).__name__}: {error}")
        finally:
            self._ranks.forget(name)

    async def _follow(self, name: str) -> None:
        """Attaches and steers until the replica is no longer leased, or a call goes unanswered."""
        await self._attach(name)
        while self._state.phase(name) == "leased":
            try:
                await self._grant_due(name)
            except StaleEpoch as stale:  # Perhaps through our own, unanswered attach.
                self._state.unreachable(name, str(stale))
                await self._attach(name)
                continue
            await self._exchange(name)

    async def _attach(self, name: str) -> None:
        """Waits until rank 0 serves, then takes over.

        Raises:
            StaleEpoch: another controller has it since this one had.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                report = await self._rank(name, 0, "report", 0)
                if report["phase"] == "serving":
                    break
            await asyncio.sleep(RETRY_S)
        held = self._state.epoch(name)
        epoch = await self._rank(name, 0, "attach", self._identity, held)
        self._state.attached(name, epoch, report["policy"])

    async def _grant_due(self, name: str) -> None:
        lease = self._state.next_lease(name)
        if lease is None:
            return
        try:
            await self._rank(name, 0, "grant", lease)
        except (TimeoutError, StaleEpoch):
            self._state.unanswered(name, lease)
            raise
        except (LeaseRefused, ValueError) as refusal:
            self._state.refused(name, lease, str(refusal))

    async def _exchange(self, name: str) -> None:
        """Waits for rank 0's reason to report (or a nudge), then reads all ranks' reports."""
        nudge = self._nudges[name]
        waiting = asyncio.ensure_future(
            self._ranks.call(
                name,
                0,
                "exchange",
                self._state.digests_after(name, 0),
                self._state.report_every(name),
                REPORT_WAIT_S,
                timeout_s=REPORT_WAIT_S + CALL_TIMEOUT_S,
            )
        )
        nudged = asyncio.ensure_future(nudge.wait())
        try:
            await asyncio.wait({waiting, nudged}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                nudge.clear()  # The call left behind ends with the grant that now follows.
                return
            try:
                first = waiting.result()
            except TimeoutError:  # Rank 0 is stopped or overloaded: ask again; health says so.
                await asyncio.sleep(RETRY_S)
                return
            await self._read(name, first)
        finally:
            for future in (waiting, nudged):
                future.cancel()

    async def _read(self, name: str, first: Mapping[str, Any] | None = None) -> None:
        """Reads the reports of all ranks and acts on them; `first` is rank 0's if at hand."""
        start = 0 if first is None else 1
        asked = range(start, self._state.ranks(name))
        answers = await asyncio.gather(
            *(self._rank(name, r, "report", self._state.digests_after(name, r)) for r in asked),
            return_exceptions=True,
        )
        reports = {} if first is None else {0: first}
        for rank, answer in zip(asked, answers, strict=True):
            if isinstance(answer, RankGone):
                raise answer
            if not isinstance(answer, BaseException):
                reports[rank] = answer
        if 0 in reports:
            self._on_report(name)
        verdict = self._state.reported(name, reports)
        if verdict is not None:
            await self._condemn(verdict)

    async def _condemn(self, verdict: Verdict) -> None:
        """Ends the rank to blame; its replica sees the loss and ends itself with the cause."""
        name, difference = verdict.replica, verdict.difference
        facts = await asyncio.gather(
            *(
                self._rank(name, rank, "step_facts", difference.forward)
                for rank in (difference.other, difference.rank)
            ),
            return_exceptions=True,
        )
        known = [None if isinstance(fact, BaseException) else fact for fact in facts]
        cause = (
            f"ranks {difference.other} and {difference.rank} differ at "
            f"{explain_difference(known[0], known[1], difference.forward)}"
        )
        self._state.explained(name, cause)
        logger.error("replica %s: %s", name, cause)
        await self._end(name, difference.rank, cause)
        self._state.lost(name, cause)

    async def _end(self, name: str, rank: int, cause: str) -> None:
        for _ in range(END_ATTEMPTS):
            try:
                await self._rank(name, rank, "end", cause, EXIT_DIVERGED)
            except RankGone:
                return
            except TimeoutError:
                await asyncio.sleep(RETRY_S)
        logger.error("replica %s: rank %d could not be told to end", name, rank)

    # ------------------------------------------------------------------ inside

    async def _rank(self, name: str, rank: int, method: str, *arguments: Any) -> Any:
        return await self._ranks.call(name, rank, method, *arguments, timeout_s=CALL_TIMEOUT_S)

    async def _results(self, name: str, ticket: str) -> dict[int, Any]:
        pause_s = RESULT_S[0]
        while True:
            results = self._state.command_results(name, ticket)
            if results is not None:
                return results
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESULT_S[1])
            await self._read(name)

    def _steered(self, name: str, done: asyncio.Task[None]) -> None:
        """A task has ended; the replica may have been taken up again by another."""
        if self._tasks.get(name) is done:
            del self._tasks[name]

    def _nudge_all(self) -> None:
        for nudge in self._nudges.values():
            nudge.set()
