"""The gateway's record of every sequence in flight: all that another replica would need to go on
with it.

Pure. A sequence is its prompt, its sampling (seed included) and the tokens committed so far; the
sampler's noise is a function of seed and absolute position, so those three determine the rest of
the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from overstory.orchestrator.sampling import Sampling

Outcome = Literal["stop", "length", "aborted", "failed"]
"""How a sequence ended: `stop` and `length` are OpenAI's, `aborted` is the client's doing,
`failed` is ours."""


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """Where a gateway takes tokens (`token_sink`); lines there begin with `secret`."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One call of a replica: go on after `input_ids`.

    Attributes:
        rid: unique among the sequences in flight.
        input_ids: prompt and committed tokens.
        sampling: what is left to do.
        hold_s: how long tokens may be held back to be sent together; each message costs the
            processes on its way a few milliseconds of CPU.
        logprobs: alternatives to log at each position beside the token itself; None for no
            log-probabilities at all.
        session: the client's name of its conversation, for routing alone; empty for none.
        kv_at: replica that has KV of it, and its `rid` there; None where there is none.
        sink: where to send the tokens; None for the call's own answer.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: Sampling
    hold_s: float = 0.0
    logprobs: int | None = None
    session: str = ""
    kv_at: tuple[str, str] | None = None
    sink: SinkAddress | None = None


@dataclass(slots=True)
class JournalEntry:
    """One sequence. `started_s` is on the clock of whoever opens it; `moves` counts how often it
    went on with another call."""

    rid: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    started_s: float
    committed: list[int] = field(default_factory=list)
    outcome: Outcome | None = None
    moves: int = 0
    session: str = ""
    kv_at: tuple[str, str] | None = None

    def commit(self, ids: Sequence[int]) -> None:
        """Tokens that the engine has decided for good."""
        assert self.outcome is None, f"{self.rid} ended ({self.outcome}) and still got tokens"
        self.committed.extend(ids)
        assert len(self.committed) <= self.sampling.max_new_tokens, (
            f"{self.rid}: {len(self.committed)} tokens of {self.sampling.max_new_tokens}"
        )

    def call(self, hold_s: float = 0.0, logprobs: int | None = None) -> GenerateCall:
        """The call that produces what is still missing, from the start or after a loss.

        After a move it has another `rid`: the replica of the call before may still know that one.
        """
        assert self.outcome is None, f"{self.rid} ended ({self.outcome})"
        return GenerateCall(
            rid=f"{self.rid}.{self.moves}" if self.moves else self.rid,
            input_ids=(*self.prompt_ids, *self.committed),
            sampling=self.sampling.after(len(self.committed)),
            hold_s=hold_s,
            logprobs=logprobs,
            session=self.session,
            kv_at=self.kv_at,
        )

    def left(self, replica: str) -> None:
        """The call in flight has ended early; its KV can be had at `replica`, if that is named."""
        self.kv_at = (replica, self.call().rid) if replica else None


class Journal:
    """Entries in flight, by request id, and counts of those that ended."""

    def __init__(self) -> None:
        self._open: dict[str, JournalEntry] = {}
        self._ended: dict[Outcome, int] = {"stop": 0, "length": 0, "aborted": 0, "failed": 0}

    def open(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        now_s: float,
        session: str = "",
    ) -> JournalEntry:
        """Start a sequence."""
        assert rid not in self._open, f"{rid} is in flight already"
        entry = JournalEntry(rid, tuple(prompt_ids), sampling, now_s, session=session)
        self._open[rid] = entry
        return entry

    def close(self, entry: JournalEntry, outcome: Outcome) -> None:
        """End a sequence; a second end is ignored, the first is the cause."""
        if entry.outcome is not None:
            return
        entry.outcome = outcome
        self._ended[outcome] += 1
        del self._open[entry.rid]

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._open.values())

    def ended(self) -> dict[Outcome, int]:
        """How many sequences ended in each way since the start."""
        return dict(self._ended)
