"""Where the gateway's tokens come from, and how that can end. Pure: knows neither Ray nor text."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from overstory.orchestrator.journal import GenerateCall


class ReplicaLost(Exception):
    """The replica that served a sequence is gone, with the cause."""


class ReplicaLeaving(Exception):
    """The replica that serves a sequence is to go, or takes no new one: nothing is wrong, the
    sequence goes on elsewhere. `replica` is where its KV can be had for a while, if anywhere."""

    def __init__(self, message: str, replica: str = "") -> None:
        super().__init__(message)
        self.replica = replica


class EngineRefused(Exception):
    """The engine ended a sequence that nobody here aborted, with its reason; `status` is the HTTP
    status it names."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position: the token's own, and (token id, value)
    of the most probable ones, best first."""

    own: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens that one step of the engine committed to one sequence.

    `finish` is SGLang's finish reason with the last chunk, None before: `{"type": "stop",
    "matched": id}`, `{"type": "length", ...}` or `{"type": "abort", "message": ...}`.
    """

    ids: list[int]
    finish: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per id, where the call asks for them."""


class Backend(Protocol):
    """Where tokens come from."""

    def generate(self, call: GenerateCall) -> AsyncGenerator[TokenChunk, None]:
        """Chunks up to one with a finish reason; closing the generator early aborts the sequence.

        Raises:
            ReplicaLost, ReplicaLeaving, EngineRefused: as the classes say. Chunks that came before
                stand.
        """
        ...
