"""Clients that ask an endpoint the same things over and over, whatever happens to its replicas, and
know what the answers must be. Not collected: it holds no test."""

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from overstory.orchestrator.client import EndpointError, _open, stream_completion

TIMEOUT_S = 300.0
_FAULTS = (EndpointError, OSError, ValueError, http.client.HTTPException)
"""Of a request that failed."""


@dataclass(frozen=True)
class Question:
    """A request whose answer is always the same."""

    body: dict[str, Any]
    stream: bool


@dataclass
class Seen:
    """What the clients saw. `gaps_s`: when each stream ended, and its worst time between two
    chunks."""

    answers: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    gaps_s: list[tuple[float, float]] = field(default_factory=list)

    def worst_gap_s(self, since_s: float, until_s: float) -> float:
        """Of the streams that ended in that time (of `time.monotonic`)."""
        return max((gap for at, gap in self.gaps_s if since_s <= at <= until_s), default=0.0)


def questions(model: str, count: int, max_tokens: int) -> list[Question]:
    """Greedy and seeded, streamed and not, some with rules and stop strings."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.9, "seed": 6, "frequency_penalty": 0.6, "min_tokens": 20},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "stop": ["\n\n\n", "class"]},
    ]
    prompts = ("def add(a, b):\n    ", "import os\n\n", "class Tree:\n    def ", "x = [")
    made = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prompt = prompts[(number // len(kinds)) % len(prompts)]
        made.append(
            Question(
                {"model": model, "prompt": prompt, "max_tokens": max_tokens, **kind},
                stream=number % 3 != 2,
            )
        )
    return made


def ask(
    url: str, question: Question, on_gap: Callable[[float, float], None] | None = None
) -> tuple[tuple[Any, ...], float]:
    """The answer (text, finish reason, usage), and the longest time between two chunks. `on_gap` is
    told of each: when it ended (`time.monotonic`), and how long it was."""
    if not question.stream:
        with _open(f"{url}/v1/completions", question.body, TIMEOUT_S) as response:
            body = json.load(response)
        choice = body["choices"][0]
        return (choice["text"], choice["finish_reason"], _counts(body["usage"])), 0.0
    text, reason, usage, gap_s, last_s = "", None, None, 0.0, None
    for event in stream_completion(url, question.body, timeout_s=TIMEOUT_S):
        now_s = time.monotonic()
        if last_s is not None:
            gap_s = max(gap_s, now_s - last_s)
            if on_gap is not None:
                on_gap(now_s, now_s - last_s)
        last_s = now_s
        text += event.text
        reason = event.finish_reason or reason
        usage = event.usage or usage
    return (text, reason, _counts(usage or {})), gap_s


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


@contextmanager
def load(url: str, asked: list[Question], clients: int) -> Iterator[Seen]:
    """`clients` that ask in turn while the block runs; each ends the question it is at.

    What the answers must be is asked for first, one after another, undisturbed.
    """
    wanted = [ask(url, question)[0] for question in asked]
    seen, stop, lock = Seen(), threading.Event(), threading.Lock()

    def client(first: int) -> None:
        for number in itertools.count(first):
            if stop.is_set():
                return
            at = number % len(asked)
            try:
                answer, gap_s = ask(url, asked[at])
            except _FAULTS as error:
                with lock:
                    seen.failed.append(f"{type(error).__name__}: {error}")
                continue
            with lock:
                seen.answers += 1
                seen.tokens += answer[2][1]
                seen.gaps_s.append((time.monotonic(), gap_s))
                if answer != wanted[at]:
                    seen.changed.append(f"{asked[at]}: {answer!r} instead of {wanted[at]!r}")

    with _running(client, stop, clients):
        yield seen


@contextmanager
def _running(client: Callable[[int], None], stop: threading.Event, clients: int) -> Iterator[None]:
    """So many of `client`, given their first question's number, until the block ends and `stop` is
    set."""
    threads = [threading.Thread(target=client, args=(i * 3,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads), "a client hangs"


@contextmanager
def strangers(url: str, model: str, max_tokens: int, clients: int) -> Iterator[list[str]]:
    """Clients that never ask the same thing twice, so that no replica knows their text from before.
    Yields what failed; what they are answered is not compared to anything."""
    failed: list[str] = []
    numbers, stop = itertools.count(), threading.Event()

    def client(_: int) -> None:
        while not stop.is_set():
            body = {"model": model, "prompt": f"# {next(numbers)}\n", "max_tokens": max_tokens}
            body["ignore_eos"] = True  # some of these texts are over after a few tokens
            try:
                ask(url, Question(body | {"temperature": 0.0}, stream=True))
            except _FAULTS as error:
                failed.append(f"{type(error).__name__}: {error}")

    with _running(client, stop, clients):
        yield failed
