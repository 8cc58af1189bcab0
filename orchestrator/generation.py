"""One request in the gateway: its choices run at once on the replicas, and come out as pieces of
text.

Knows tokens, text and the journal; knows neither HTTP nor Ray (a `Backend` is handed in), so tests
drive it as it is.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from overstory.orchestrator.backend import Backend, EngineRefused, TokenChunk, TokenLogprobs
from overstory.orchestrator.journal import Journal, JournalEntry
from overstory.orchestrator.openai_responses import FinishReason, LoggedToken, Usage
from overstory.orchestrator.resume import Carrier, ResumeLimits
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.text import Decode, TextStep, TextStream, TokenTrail
from overstory.orchestrator.token_text import TokenText


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """What one choice of a request generates from; `prompt` numbers the request's prompts,
    `session` is the client's name of the conversation, empty for none."""

    prompt: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    session: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one choice that is certain; the last piece of a choice has its finish reason.

    `tokens` are those whose text begins to show with this piece, where log-probabilities are asked
    for; a token of which a stop string leaves nothing is not among them. `committed` is how many
    tokens its choice has with this piece.
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[LoggedToken, ...] | None = None
    committed: int = 0


@dataclass(frozen=True, slots=True)
class LogprobsAsked:
    """Log-probabilities of every token and of `top` alternatives at its position; `describe` tells
    what a token id stands for."""

    top: int
    describe: Callable[[int], TokenText]


def _ignore(_: str) -> None:
    pass


class Generation:
    """The choices of one request.

    Iterate once, then `aclose`, whatever happened: both are safe to repeat, and closing early
    aborts in the engine.
    """

    def __init__(
        self,
        request_id: str,
        plans: Sequence[ChoicePlan],
        stops: Sequence[str],
        *,
        backend: Backend,
        decode: Decode,
        journal: Journal,
        deadline_s: float,
        hold_s: float = 0.0,
        on_commit: Callable[[], None] | None = None,
        on_loss: Callable[[str], None] | None = None,
        on_move: Callable[[str], None] | None = None,
        on_end: Callable[[], None] | None = None,
        logprobs: LogprobsAsked | None = None,
        resume: ResumeLimits | None = None,
    ) -> None:
        """`deadline_s` is on the event loop's clock; `hold_s` as in `GenerateCall`; `on_commit` is
        called whenever a replica has committed tokens; `on_loss` and `on_move` are as for
        `Carrier`; `on_end` is called once nothing of the request runs any more, whether or not
        its pieces have been taken; `resume` says how far a choice is carried on."""
        self._request_id = request_id
        self._plans = plans
        self._stops = stops
        self._backend = backend
        self._decode = decode
        self._journal = journal
        self._deadline_s = deadline_s
        self._hold_s = hold_s
        self._on_commit = on_commit
        self._on_loss = on_loss or _ignore
        self._on_move = on_move or _ignore
        self._on_end = on_end
        self._resume = resume or ResumeLimits()
        self._logprobs = logprobs
        self._entries: list[JournalEntry] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(plans)
        self._pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    @property
    def usage(self) -> Usage:
        """Tokens so far; a prompt counts once, however many choices it has."""
        prompts = {plan.prompt: len(plan.prompt_ids) for plan in self._plans}
        generated = sum(len(entry.committed) for entry in self._entries)
        return Usage(sum(prompts.values()), generated)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come.

        Raises:
            TimeoutError: the deadline has passed.
            ReplicaLost, EngineRefused: from the first choice that could not be carried on; the
                others are aborted.
        """
        self._start()
        unfinished = len(self._plans)
        loop = asyncio.get_running_loop()
        while unfinished:
            if loop.time() >= self._deadline_s:  # Pieces that are there are taken without a wait.
                raise TimeoutError
            async with asyncio.timeout_at(self._deadline_s):
                piece = await self._pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            unfinished -= piece.finish_reason is not None
            yield piece

    async def aclose(self) -> None:
        """Abort what still runs and close the journal."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for entry in self._entries:
            self._journal.close(entry, "aborted")  # only those that have not ended

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        for index, plan in enumerate(self._plans):
            entry = self._journal.open(
                f"{self._request_id}-{index}",
                plan.prompt_ids,
                plan.sampling,
                loop.time(),
                plan.session,
            )
            self._entries.append(entry)
            self._tasks.append(loop.create_task(self._run(index, entry)))

    async def _run(self, index: int, entry: JournalEntry) -> None:
        """Feed one choice's pieces, or what ended it, into the queue."""
        try:
            carrier = Carrier(
                self._backend,
                entry,
                self._hold_s,
                self._logprobs.top if self._logprobs else None,
                self._resume,
                self._on_loss,
                self._on_move,
            )
            async with aclosing(carrier.chunks()) as chunks:
                await self._follow(index, entry, chunks)
        except Exception as error:
            self._journal.close(entry, "failed")
            self._pieces.put_nowait(error)
        finally:
            self._left -= 1
            if not self._left and self._on_end is not None:
                self._on_end()

    async def _follow(
        self, index: int, entry: JournalEntry, chunks: AsyncIterator[TokenChunk]
    ) -> None:
        stream = LoggedStream(TextStream(self._decode, self._stops), self._logprobs)
        async for chunk in chunks:
            shown, reason = _shown(chunk)
            if chunk.ids and self._on_commit is not None:
                self._on_commit()
            step = stream.feed(shown, chunk.logprobs)
            if step.stop is not None:
                entry.commit(shown[: step.used])
                count = len(entry.committed)
                self._finish(entry, Piece(index, step.text, "stop", stream.shown(step), count))
                return
            entry.commit(chunk.ids)
            tokens = stream.shown(step)
            if reason is not None:
                rest, more = stream.finish()
                ended = Piece(
                    index,
                    step.text + rest.text,
                    "stop" if rest.stop else reason,
                    None if tokens is None else (*tokens, *more),
                    len(entry.committed),
                )
                self._finish(entry, ended)
                return
            if step.text:
                count = len(entry.committed)
                self._pieces.put_nowait(Piece(index, step.text, None, tokens, count))
        raise AssertionError("a sequence was carried on to its end and has none")

    def _finish(self, entry: JournalEntry, piece: Piece) -> None:
        assert piece.finish_reason is not None
        self._journal.close(entry, piece.finish_reason)
        self._pieces.put_nowait(piece)


class LoggedStream:
    """A text stream, with the log-probabilities of each token where they are `asked` for."""

    def __init__(self, stream: TextStream, asked: LogprobsAsked | None) -> None:
        self._stream = stream
        self._asked = asked
        self._trail: TokenTrail[LoggedToken] = TokenTrail()

    def feed(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> TextStep:
        """Text of `ids`; `logprobs` has one entry for each, and may have more."""
        if self._asked is None:
            return self._stream.feed(ids)
        assert logprobs is not None, "the replica sent no log-probabilities"
        texts = []
        for used, (token, logged) in enumerate(zip(ids, logprobs, strict=False), 1):
            self._trail.add(self._stream.decoded, self._describe(token, logged, self._asked))
            step = self._stream.feed((token,))
            texts.append(step.text)
            if step.stop is not None:
                return TextStep("".join(texts), used, step.stop)
        assert len(texts) == len(ids), f"{len(ids)} tokens and {len(logprobs)} log-probabilities"
        return TextStep("".join(texts), len(ids))

    def shown(self, step: TextStep) -> tuple[LoggedToken, ...] | None:
        """The tokens whose text begins to show with that of `step`; None where not asked for."""
        return None if self._asked is None else tuple(self._trail.sent(len(step.text)))

    def finish(self) -> tuple[TextStep, tuple[LoggedToken, ...]]:
        """What was held back, at the end of the sequence."""
        step = self._stream.finish()
        tokens = self._trail.sent(len(step.text))
        if step.stop is None:
            tokens += self._trail.rest()
        return step, tuple(tokens)

    def _describe(self, token: int, logged: TokenLogprobs, asked: LogprobsAsked) -> LoggedToken:
        return LoggedToken(
            asked.describe(token),
            logged.own,
            tuple((asked.describe(other), value) for other, value in logged.top),
            self._stream.decoded,
        )


def _shown(chunk: TokenChunk) -> tuple[list[int], FinishReason | None]:
    """The ids whose text counts, and OpenAI's finish reason; a stop token is no part of the
    text."""
    if chunk.finish is None:
        return chunk.ids, None
    kind = chunk.finish.get("type")
    if kind == "length":
        return chunk.ids, "length"
    if kind == "stop":
        matched = chunk.finish.get("matched")
        ends_so = bool(chunk.ids) and chunk.ids[-1] == matched
        return (chunk.ids[:-1] if ends_so else chunk.ids), "stop"
    raise EngineRefused(
        str(chunk.finish.get("message") or chunk.finish),
        int(chunk.finish.get("status_code") or 500),
    )
