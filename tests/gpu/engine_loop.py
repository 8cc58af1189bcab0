"""So many requests all the time: a closed loop in an engine, measured window by window.

Each request that ends is replaced at once, and the policy changes while the loop runs: nothing
stops between windows, and who asks for them sleeps while they are taken. `engine_pairs.py` compares
policies by it, `engine_host.py` profiles steps in it. Any engine of `tests/engine/harness.py` will
do.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from overstory.workers import tree_policy
from overstory.workers.step_stats import STATS

SETTLE = 4
"""Messages between a change of policy and a window: what was in flight is the policy's before."""

BEGIN_S = 60.0
WINDOW_S = 120.0
ABORT_STEPS = 200
POLL_S = 5.0
"""Who waits for a window looks so often whether the loop still runs: it takes the interpreter, and
Python's profiler sees it."""

_MANY = 1 << 40

Text = tuple[list[int], dict[str, Any]]
"""A prompt and sampling parameters, less the number of new tokens."""


class Mark(NamedTuple):
    """A message of the loop: when it came (`time.perf_counter`), its tokens and requests, and
    whether a prefill gave it."""

    at: float
    tokens: int
    requests: int
    prefill: bool


class Window(NamedTuple):
    """What was measured between two messages of a loop.

    Attributes:
        begun: when, by `time.perf_counter`.
        tokens, seconds: all tokens between them, those of prefills too.
        steps, prefills: batches that decoded, and that prefilled.
        ms_per_step: of the steps beside no prefill, mean.
        median_ms: the same, median: what seldom comes between two steps is in the mean alone.
        step_tokens: tokens of a step, of all requests together.
        requests: of a step, mean.
        ran: steps by what they ran.
    """

    begun: float
    tokens: int
    seconds: float
    steps: int
    prefills: int
    ms_per_step: float
    median_ms: float
    step_tokens: float
    requests: float
    ran: Mapping[str, int]

    @property
    def rate(self) -> float:
        """Tokens/s, prefills and all."""
        return self.tokens / self.seconds

    @property
    def step_rate(self) -> float:
        """Tokens/s of the steps alone."""
        return 1e3 * self.step_tokens / self.ms_per_step

    @property
    def prefill_s(self) -> float:
        """Seconds that prefills added."""
        return self.seconds - 1e-3 * self.ms_per_step * self.steps

    @property
    def prefill_share(self) -> float:
        """How much of the time prefills added."""
        return self.prefill_s / self.seconds


def window_of(marks: Sequence[Mark], ran: Mapping[str, int]) -> Window:
    """The window from the first of ``marks`` (whose tokens came before it) to the last.

    With overlap a prefill's launch falls before the message in front of its own, and the step
    behind it waits for it: those three stretches are no steps' time.
    """
    begun, counted = marks[0].at, marks[1:]
    seconds = marks[-1].at - begun
    decoded = [mark for mark in counted if not mark.prefill]
    apart = [
        marks[i].at - marks[i - 1].at
        for i in range(1, len(marks))
        if not any(mark.prefill for mark in marks[i - 1 : i + 2])
    ]
    apart = apart or [seconds / len(counted)]
    steps = len(decoded)
    return Window(
        begun,
        sum(mark.tokens for mark in counted),
        seconds,
        steps,
        len(counted) - steps,
        1e3 * statistics.fmean(apart),
        1e3 * statistics.median(apart),
        sum(mark.tokens for mark in decoded) / max(steps, 1),
        sum(mark.requests for mark in decoded) / max(steps, 1),
        ran,
    )


class _Wanted:
    """A window that is being taken: of at least ``tokens``, or of ``most`` messages."""

    def __init__(
        self,
        policy: str,
        tokens: float,
        most: int,
        begin: Callable[[], object],
        end: Callable[[], object],
    ) -> None:
        self._policy, self._begin, self._end = policy, begin, end
        self._tokens, self._most = tokens, most
        self._settling = SETTLE
        self._marks: list[Mark] = []
        self._ran: Counter[str] = Counter()
        self.over = threading.Event()

    def heard(self, mark: Mark) -> bool:
        """Takes a message in, in the loop's thread; whether it was the last one."""
        if self._settling:
            if self._settling == SETTLE:
                tree_policy.set_current(tree_policy.parse_policy(self._policy))
            self._settling -= 1
            if not self._settling:
                self._marks.append(mark)
                self._ran = _forwards()
                self._begin()
            return False
        self._marks.append(mark)
        self._tokens -= mark.tokens
        self._most -= 1
        if self._tokens > 0 and self._most > 0:
            return False
        self._end()
        self._ran = _forwards() - self._ran
        self.over.set()
        return True

    def result(self) -> Window:
        """Once it is over."""
        return window_of(self._marks, dict(self._ran))


def _forwards() -> Counter[str]:
    return Counter(
        {name: counts["forwards"] for name, counts in STATS.snapshot()["verify"].items()}
    )


class ClosedLoop:
    """A context in which ``requests`` run all the time, whatever the policy.

    Args:
        engine: an idle engine; all its requests are the loop's meanwhile.
        requests: how many.
        text: text of a number. A request that begins takes the number ``requests * turn`` and its
            place among them, so that windows of one turn run alike texts.
        new: tokens of a request; those of the first ones are spread evenly, and so are ends.
    """

    def __init__(self, engine: Any, requests: int, text: Callable[[int], Text], new: int) -> None:
        self._engine, self._requests = engine, requests
        self._text, self._new = text, new
        self.turn = 0
        self._places: dict[str, int] = {}  # of the requests that run
        self._fresh: set[str] = set()  # of these, those that have said nothing yet
        self._begun, self._closing = threading.Event(), False
        self._wanted: _Wanted | None = None

    def __enter__(self) -> ClosedLoop:
        engine = self._engine
        collector = engine.scheduler.output_streamer.send_to_detokenizer
        self._given = collector.send_output
        collector.send_output = self._heard
        for place in range(self._requests):
            self._submit(place, max(1, self._new * (place + 1) // self._requests))
        with engine._gate.condition:
            engine._gate.allowed = _MANY
            engine._gate.condition.notify_all()
        try:
            self._wait(self._begun, BEGIN_S, self._not_begun)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop()

    def window(
        self,
        policy: str,
        tokens: float = float("inf"),
        most: int = 1 << 40,
        begin: Callable[[], object] = lambda: None,
        end: Callable[[], object] = lambda: None,
    ) -> Window:
        """Measures ``policy`` until ``tokens`` have come or ``most`` messages have, one for each
        step or prefill. ``begin`` and ``end`` are called in the loop's thread."""
        wanted = self._wanted = _Wanted(policy, tokens, most, begin, end)
        self._wait(wanted.over, WINDOW_S, lambda: f"no end of a window of {policy}")
        return wanted.result()

    def _wait(self, event: threading.Event, seconds: float, late: Callable[[], str]) -> None:
        """Sleeps until the loop sets ``event``; RuntimeError if it ends before or takes longer."""
        gate, deadline = self._engine._gate, time.monotonic() + seconds
        while not event.wait(POLL_S):
            if gate.ended is not None:
                raise RuntimeError("the scheduler's event loop ended") from gate.ended
            if time.monotonic() > deadline:
                raise RuntimeError(f"{late()} within {seconds:.0f} s")

    def _not_begun(self) -> str:
        engine = self._engine
        return (
            f"{len(self._fresh)} of {self._requests} requests have not begun (the engine runs "
            f"max_running_requests={engine.server_args.max_running_requests} in "
            f"{engine.scheduler.max_total_num_tokens} KV slots; each takes its prompt and up to "
            f"{self._new} tokens)"
        )

    def _submit(self, place: int, new: int) -> None:
        prompt, params = self._text(self._requests * self.turn + place)
        more = {"max_new_tokens": new, "ignore_eos": True}
        rid = self._engine.submit(prompt, params | more)
        self._places[rid] = place
        self._fresh.add(rid)

    def _heard(self, message: Any, request: Any = None) -> None:
        """Stands for the collector's `send_output`, in the loop's thread."""
        at = time.perf_counter()
        self._given(message, request)
        if not hasattr(message, "output_ids"):
            if (rid := getattr(message, "rid", None)) in self._places:
                self._ended(rid, {"type": "abort", "message": self._engine.outputs[rid].refused})
            return
        rids = message.rids
        prefill = not self._fresh.isdisjoint(rids)
        if prefill:
            self._fresh.difference_update(rids)
            if not self._fresh:
                self._begun.set()
        if any(message.finished_reasons):
            for rid, reason in zip(rids, message.finished_reasons, strict=True):
                if reason:
                    self._ended(rid, reason)
        if self._wanted is not None:
            mark = Mark(at, sum(map(len, message.output_ids)), len(rids), prefill)
            if self._wanted.heard(mark):
                self._wanted = None

    def _ended(self, rid: str, reason: dict[str, Any]) -> None:
        """Has the next request take the place of one that has ended. Where one was refused too few
        would run: the loop ends with what the scheduler said."""
        place = self._places.pop(rid)
        self._fresh.discard(rid)
        del self._engine.outputs[rid]  # thousands come and go
        if self._closing:
            return
        if reason["type"] == "abort":
            raise RuntimeError(f"a request was refused: {reason['message']}")
        self._submit(place, self._new)

    def _stop(self) -> None:
        """Ends all requests and leaves the engine idle, as it was found."""
        engine, self._closing = self._engine, True
        with engine._gate.condition:
            engine._gate.allowed = 0
        try:
            engine._gate.wait_idle()
            for rid in self._places:
                engine.abort(rid)
            for _ in range(ABORT_STEPS):
                if not self._places:
                    break
                engine.step()
            else:
                raise RuntimeError(f"{len(self._places)} requests do not end when aborted")
            engine.step(3)
        finally:
            engine.scheduler.output_streamer.send_to_detokenizer.send_output = self._given
