"""What can go wrong between a replica and its engine, by what its caller should do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class RequestRefused(ValueError):
    """The engine does not take this request (too long, bad parameters): not worth trying again."""


class EngineBusy(RuntimeError):
    """The engine cannot take the request now (queue full, shutting down): try again later."""


@dataclass(frozen=True)
class RankDeath:
    """The first rank of a replica that died, as far as it can be told.

    Attributes:
        rank: tensor-parallel rank; None if no rank is known to have died, but what watches over
            them failed.
        cause: one line for a person.
        exit_code: None if unknown: the process did not end by itself.
        signal: name of the signal that ended it, where one did; for SIGKILL a conclusion.
        out_of_memory: whether memory ran out.
        phase: what the rank was doing.
        forwards: batches it had launched.
        detail: longer text: its traceback or thread stacks, Ray's own words.
        log_tail: last lines of its log.
        others: what was found of the other ranks at that moment, by rank.
    """

    rank: int | None
    cause: str
    exit_code: int | None = None
    signal: str | None = None
    out_of_memory: bool = False
    phase: str = "unknown"
    forwards: int = 0
    detail: str = ""
    log_tail: Sequence[str] = ()
    others: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        code = "unknown" if self.exit_code is None else str(self.exit_code)
        signal = f", {self.signal}" if self.signal else ""
        memory = ", out of memory" if self.out_of_memory else ""
        who = "the replica's watcher" if self.rank is None else f"rank {self.rank}"
        lines = [
            f"{who} died (exit code {code}{signal}{memory}, phase {self.phase}, "
            f"forward {self.forwards}): {self.cause}"
        ]
        lines += [f"  rank {rank}: {state}" for rank, state in sorted(self.others.items())]
        if self.log_tail:
            lines.append("  last log lines:")
            lines += [f"    {line}" for line in self.log_tail]
        return "\n".join(lines)


class EngineDead(RuntimeError):
    """A rank died, so the whole replica's engine is gone; `death` names the rank and the cause."""

    def __init__(self, death: RankDeath) -> None:
        super().__init__(str(death))
        self.death = death

    def __reduce__(self) -> tuple[type, tuple[RankDeath]]:
        return (EngineDead, (self.death,))
