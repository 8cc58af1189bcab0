"""A sequence that loses its replica: what the client gets, what the next replica is asked, and when
it is given up."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from overstory.orchestrator.backend import (
    EngineRefused,
    ReplicaLeaving,
    ReplicaLost,
    TokenChunk,
    TokenLogprobs,
)
from overstory.orchestrator.generation import ChoicePlan, Generation, LogprobsAsked, Piece
from overstory.orchestrator.journal import GenerateCall, Journal, JournalEntry
from overstory.orchestrator.resume import PROOF, Carrier, ResumeLimits
from overstory.orchestrator.sampling import Sampling
from overstory.orchestrator.token_text import TokenText

PROMPT = (1, 2, 3)
TEXT = "ab 😀 nö — stop here, or go on\n".encode()
QUICK = ResumeLimits(losses=2, wait_s=5.0)


def decode(ids: Sequence[int]) -> str:
    """One token per byte."""
    return bytes(ids).decode(errors="replace")


def describe(token: int) -> TokenText:
    return TokenText(decode([token]), bytes([token]))


class Mortal:
    """Writes `TEXT` from where the call's output stands, and ends each call as its script says.

    A script entry is (tokens that come before it, what happens): an exception, "end" (the answer
    just ends), "hang", or None to go on to the end. The last entry stands for all later calls.
    """

    def __init__(self, *script: tuple[int, Any], step: int = 2) -> None:
        self.calls: list[GenerateCall] = []
        self._script = script
        self._step = step

    async def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        lives, fate = self._script[min(len(self.calls), len(self._script) - 1)]
        self.calls.append(call)
        begun = call.sampling.earlier_output
        assert call.input_ids == (*PROMPT, *TEXT[:begun])
        limit = min(len(TEXT), begun + call.sampling.max_new_tokens)
        at = begun
        while True:
            left = limit if fate is None else min(limit, begun + lives)
            some = list(TEXT[at : min(at + self._step, left)])
            if fate is not None and not some:
                if fate == "hang":
                    await asyncio.Event().wait()
                if fate == "end":
                    return
                raise fate
            logged = [TokenLogprobs(-float(at + i), ()) for i in range(len(some))]
            at += len(some)
            done = {"type": "length"} if at == limit and fate is None else None
            yield TokenChunk(some, done, None if call.logprobs is None else logged)
            if done:
                return


def play(
    backend: Mortal,
    limits: ResumeLimits = QUICK,
    stops: Sequence[str] = (),
    logprobs: bool = False,
    losses: list[str] | None = None,
    moves: list[str] | None = None,
    deadline_s: float = 20.0,
    journal: Journal | None = None,
    **sampling: Any,
) -> tuple[list[Piece], Generation]:
    """All pieces of one choice."""

    async def scenario() -> tuple[list[Piece], Generation]:
        plan = ChoicePlan(0, PROMPT, Sampling(seed=7, max_new_tokens=100, **sampling))
        generation = Generation(
            "r",
            [plan],
            stops,
            backend=backend,
            decode=decode,
            journal=Journal() if journal is None else journal,
            deadline_s=asyncio.get_running_loop().time() + deadline_s,
            on_loss=None if losses is None else losses.append,
            on_move=None if moves is None else moves.append,
            logprobs=LogprobsAsked(0, describe) if logprobs else None,
            resume=limits,
        )
        try:
            return [piece async for piece in generation.pieces()], generation
        finally:
            await generation.aclose()

    return asyncio.run(scenario())


def text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("fate", [ReplicaLost("boom"), ReplicaLeaving("to go"), "end"])
def test_cut_anywhere_a_stream_neither_loses_nor_repeats(fate: Any) -> None:
    """Also inside a character of several bytes and inside what may become a stop string."""
    stops = ["never", "stop here"]
    undisturbed, whole = play(Mortal((0, None)), stops=stops, logprobs=True)
    assert text(undisturbed) == "ab 😀 nö — "
    for lives in range(TEXT.index(b" here") + 5):
        backend = Mortal((lives, fate), (0, None))
        pieces, generation = play(backend, stops=stops, logprobs=True)
        assert text(pieces) == text(undisturbed)
        assert pieces[-1].finish_reason == "stop"
        assert generation.usage == whole.usage
        shown = [token for piece in pieces for token in piece.tokens or ()]
        assert shown == [token for piece in undisturbed for token in piece.tokens or ()]
        assert [call.rid for call in backend.calls] == ["r-0", "r-0.1"]


def test_what_the_next_replica_is_asked() -> None:
    asked = {"min_new_tokens": 9, "frequency_penalty": 0.5, "stop_token_ids": (200,)}
    backend = Mortal((6, ReplicaLost("a")), (1, ReplicaLost("b")), (0, None))
    pieces, _ = play(backend, **asked)
    assert text(pieces) == TEXT.decode()
    first, second, third = (call.sampling for call in backend.calls)
    assert (first.max_new_tokens, second.max_new_tokens, third.max_new_tokens) == (100, 94, 93)
    assert (first.min_new_tokens, second.min_new_tokens, third.min_new_tokens) == (9, 3, 2)
    assert (first.earlier_output, second.earlier_output, third.earlier_output) == (0, 6, 7)
    for left in (second, third):
        assert (left.seed, left.frequency_penalty, left.stop_token_ids) == (7, 0.5, (200,))


def test_the_token_limit_is_that_of_the_request() -> None:
    async def scenario() -> None:
        plan = ChoicePlan(0, PROMPT, Sampling(seed=7, max_new_tokens=9))
        generation = Generation(
            "r", [plan], (), backend=Mortal((5, ReplicaLost("x")), (0, None)), decode=decode,
            journal=Journal(), deadline_s=asyncio.get_running_loop().time() + 20,
        )  # fmt: skip
        pieces = [piece async for piece in generation.pieces()]
        assert pieces[-1].finish_reason == "length"
        assert generation.usage.completion_tokens == 9
        await generation.aclose()

    asyncio.run(scenario())


def test_losses_are_counted_and_told() -> None:
    journal, losses = Journal(), []
    backend = Mortal((2, ReplicaLost("rank 1 died\nits log")))
    with pytest.raises(ReplicaLost, match=r"(?s)rank 1 died.*3 replicas were lost under it"):
        play(backend, losses=losses, journal=journal)
    assert len(backend.calls) == 3  # the first and two resumptions
    assert losses == ["rank 1 died\nits log"] * 3
    assert journal.ended()["failed"] == 1
    assert len(journal) == 0


def test_hand_offs_are_not_counted_as_losses() -> None:
    script = [(1, ReplicaLeaving("to go"))] * 20
    losses: list[str] = []
    moves: list[str] = []
    pieces, _ = play(Mortal(*script, (0, None)), losses=losses, moves=moves)
    assert text(pieces) == TEXT.decode()
    assert losses == []
    assert moves == ["leaving"] * 20


def test_the_wait_for_another_replica_is_bounded() -> None:
    backend = Mortal((4, ReplicaLost("killed")), (0, "hang"))
    with pytest.raises(
        ReplicaLost,
        match=r"^no replica went on .* within 0.3 s; the one before was lost: killed$",
    ):
        play(backend, ResumeLimits(losses=1, wait_s=0.3))
    # Hand-offs that lead nowhere end as well.
    nowhere = Mortal((4, ReplicaLeaving("to go")), (0, ReplicaLeaving("not here")))
    with pytest.raises(ReplicaLost, match=r"no replica went on .* within 0.3 s"):
        play(nowhere, ResumeLimits(losses=0, wait_s=0.3))
    assert len(nowhere.calls) < 10  # not in a spin


def test_a_wait_that_is_over_does_not_count_against_the_next_one() -> None:
    """Two losses, minutes of tokens between them, none of which was a long wait."""
    backend = Mortal((4, ReplicaLost("a")), (10, ReplicaLeaving("b")), (0, None))
    entry = JournalEntry("r", PROMPT, Sampling(seed=7, max_new_tokens=100), 0.0)
    now, moves = [0.0], []

    async def scenario() -> None:
        carrier = Carrier(
            backend, entry, 0.0, None, ResumeLimits(losses=3, wait_s=30.0),
            lambda _: None, moves.append, clock=lambda: now[0],
        )  # fmt: skip
        async for chunk in carrier.chunks():
            entry.commit(chunk.ids)
            now[0] += 20.0

    asyncio.run(scenario())
    assert bytes(entry.committed) == TEXT
    assert moves == ["lost", "leaving"]


def test_a_slow_first_token_is_no_loss() -> None:
    """The limit is on what a loss made necessary, not on a request's own wait."""
    with pytest.raises(TimeoutError):
        play(Mortal((0, "hang")), ResumeLimits(losses=3, wait_s=0.01), deadline_s=0.2)


def test_the_request_s_deadline_stands() -> None:
    with pytest.raises(TimeoutError):
        play(Mortal((4, ReplicaLost("killed")), (0, "hang")), deadline_s=0.3)


def test_a_busy_engine_is_waited_for_only_by_what_has_begun() -> None:
    busy = EngineRefused("queue full", 503)
    with pytest.raises(EngineRefused):
        play(Mortal((0, busy), (0, None)))
    pieces, _ = play(Mortal((3, ReplicaLost("gone")), (0, busy), (0, None)))
    assert text(pieces) == TEXT.decode()
    with pytest.raises(EngineRefused):
        play(Mortal((3, ReplicaLost("gone")), (0, EngineRefused("no", 400)), (0, None)))


def test_a_proof_fails_with_the_first_loss_and_survives_a_hand_off() -> None:
    with pytest.raises(ReplicaLost, match=r"^boom$"):
        play(Mortal((1, ReplicaLost("boom")), (0, None)), PROOF)
    assert text(play(Mortal((1, ReplicaLeaving("go")), (0, None)), PROOF)[0]) == TEXT.decode()
