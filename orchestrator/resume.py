"""One sequence over as many replicas as it takes: after a loss or a hand-off it goes on elsewhere.

What stands is in the journal's entry: prompt, sampling with its seed, committed tokens. The next
replica gets them as one call, counts the committed tokens as output, and draws with the noise of
the same seed at the same positions, so that it goes on with the same text.

Two things are bounded. Losses are counted, for a sequence may be what its replicas die of;
hand-offs are not, for nobody is at fault. And whatever the sequence waits for (a replica that comes
up, one that is busy), it waits for only so long.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus

from overstory.orchestrator.backend import (
    Backend,
    EngineRefused,
    ReplicaLeaving,
    ReplicaLost,
    TokenChunk,
)
from overstory.orchestrator.journal import JournalEntry

_PAUSE_S = 0.2
"""Before the next attempt after one that brought no token, so that nothing is asked in a spin."""


MOVES = ("lost", "leaving", "busy")
"""Why sequences go on with another call."""


@dataclass(frozen=True, slots=True)
class ResumeLimits:
    """How far a sequence is carried on.

    Attributes:
        losses: replicas that may be lost under it; one more ends it.
        wait_s: longest that it waits, after a loss or a hand-off, for the next first token.
    """

    losses: int = 3
    wait_s: float = 300.0


PROOF = ResumeLimits(losses=0)
"""For proofs, which ask whether replicas work: the first loss is an answer, a hand-off is none."""


class _TooLate(ReplicaLost):
    """No replica went on with the sequence in time: there is nothing to wait for any more."""


class Carrier:
    """Carries one sequence on. Iterate `chunks` once.

    Args:
        backend: the replicas.
        entry: the sequence; whoever takes the chunks commits their tokens to it before the next.
        hold_s, logprobs: as in `GenerateCall`.
        limits: how far.
        on_loss: told the cause of each loss.
        on_move: told why whenever the sequence goes on with another call: `lost`, `leaving`,
            `busy`.
        clock: seconds.
    """

    def __init__(
        self,
        backend: Backend,
        entry: JournalEntry,
        hold_s: float,
        logprobs: int | None,
        limits: ResumeLimits,
        on_loss: Callable[[str], None],
        on_move: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._entry = entry
        self._hold_s = hold_s
        self._logprobs = logprobs
        self._limits = limits
        self._on_loss = on_loss
        self._on_move = on_move
        self._clock = clock
        self._losses = 0
        self._cause = ""  # of the last loss
        self._waits_since: float | None = None  # since the loss or hand-off; None: all is well

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """Chunks up to one with a finish reason, as if from one replica.

        Raises:
            ReplicaLost: one loss too many, or no replica went on with it in time; with the cause.
            EngineRefused: as `Backend.generate`; a busy engine only where the sequence has not
                begun yet.
        """
        while True:
            try:
                async with aclosing(self._attempt()) as chunks:
                    async for chunk in chunks:
                        yield chunk
                        if chunk.finish is not None:
                            return
                raise ReplicaLost("the replica's answer ended before the sequence did")
            except _TooLate:
                raise
            except ReplicaLost as error:
                self._on_loss(str(error))
                self._losses += 1
                self._cause = str(error)
                self._entry.left("")
                pause_s = self._go_on("lost", error)
            except ReplicaLeaving as error:
                self._entry.left(error.replica)
                pause_s = self._go_on("leaving", error)
            except EngineRefused as error:
                if error.status != HTTPStatus.SERVICE_UNAVAILABLE or not self._entry.moves:
                    raise
                pause_s = self._go_on("busy", error)
            await asyncio.sleep(pause_s)

    async def _attempt(self) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of one replica. Only the first of them is waited for with a limit."""
        call = self._entry.call(self._hold_s, self._logprobs)
        async with aclosing(self._backend.generate(call)) as chunks:
            try:
                async with asyncio.timeout(self._left_s()):
                    first = await anext(chunks, None)
            except TimeoutError as error:
                raise _TooLate(self._too_late()) from error
            if first is None:
                return
            self._waits_since = None
            yield first
            async for chunk in chunks:
                yield chunk

    def _go_on(self, why: str, error: Exception) -> float:
        """Raises what ends the sequence, or gives seconds until the next attempt."""
        pause_s = 0.0 if self._waits_since is None else _PAUSE_S
        if self._waits_since is None:
            self._waits_since = self._clock()
        if self._losses > self._limits.losses:
            several = f"\n({self._losses} replicas were lost under it)" if self._losses > 1 else ""
            raise ReplicaLost(f"{error}{several}") from error
        if self._left_s() == 0:
            raise _TooLate(self._too_late()) from error
        self._entry.moves += 1
        self._on_move(why)
        return pause_s

    def _too_late(self) -> str:
        waited = f"no replica went on with the sequence within {self._limits.wait_s:g} s"
        return f"{waited}; the one before was lost: {self._cause}" if self._cause else waited

    def _left_s(self) -> float | None:
        """Until the wait for a replica is too long; None while there is nothing to wait for."""
        if self._waits_since is None:
            return None
        return max(0.0, self._limits.wait_s - (self._clock() - self._waits_since))
