"""The closed loop that GPU sessions measure policies in, with an engine on a CPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import current_thread
from typing import TYPE_CHECKING, Any

import pytest
from ddtree_support import random_prompts, server_args

from overstory.workers import tree_policy
from overstory.workers.tree_policy import parse_policy

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from engine_loop import ClosedLoop, Window

if TYPE_CHECKING:
    from harness import EngineHarness

ROWS, REQUESTS, NEW = 16, 3, 24
PROMPTS = random_prompts([5, 9, 14, 20, 31], seed=4)


@pytest.fixture
def harness(engine: Callable[..., EngineHarness], pair: tuple[str, str]) -> Iterator[EngineHarness]:
    held = engine(**server_args(pair[1], rows=ROWS))
    held.outputs.clear()
    yield held
    tree_policy.set_current(parse_policy("plain"))


class Texts:
    """Texts as they are asked for, by number."""

    def __init__(self, temperature: float) -> None:
        self.numbers: list[int] = []
        self._temperature = temperature

    def __call__(self, number: int) -> tuple[list[int], dict[str, Any]]:
        self.numbers.append(number)
        seed = {"sampling_seed": number} if self._temperature else {}
        return PROMPTS[number % len(PROMPTS)], {"temperature": self._temperature} | seed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_windows_of_several_policies_in_one_loop(
    harness: EngineHarness, temperature: float
) -> None:
    texts = Texts(temperature)
    heard: list[int] = []  # tokens of each message, by a count of the test's own
    given = harness.scheduler.output_streamer.send_to_detokenizer.send_output

    def send_output(message: Any, request: Any = None) -> None:
        if hasattr(message, "output_ids"):
            heard.append(sum(map(len, message.output_ids)))
        given(message, request)

    harness.scheduler.output_streamer.send_to_detokenizer.send_output = send_output
    windows = list[tuple[str, Window, list[int]]]()
    try:
        with ClosedLoop(harness, REQUESTS, texts, NEW) as loop:
            for turn, policy in enumerate(["chain", "plain", "tree-15", "plain"]):
                loop.turn, ends = turn, list[int]()
                note = lambda ends=ends: ends.append(len(heard))  # noqa: E731
                window = loop.window(policy, tokens=REQUESTS * NEW, begin=note, end=note)
                windows.append((policy, window, heard[slice(*ends)]))
            short = loop.window("chain", most=5)
            running = len(harness.scheduler.running_batch.reqs)
    finally:
        harness.scheduler.output_streamer.send_to_detokenizer.send_output = given
    assert running <= REQUESTS
    for policy, window, inside in windows:
        assert list(window.ran) == [policy], "steps of others are outside"
        assert window.ran[policy] == pytest.approx(window.steps, abs=1), "one may be in flight"
        assert REQUESTS * NEW <= window.tokens < REQUESTS * (NEW + ROWS)
        assert sum(inside) == window.tokens
        assert len(inside) == window.steps + window.prefills
        assert 1 <= window.prefills <= REQUESTS + 1, "a text of each ends, some together"
        assert window.requests > 0.8 * REQUESTS
        assert 0 < window.ms_per_step < 1e3 * window.seconds
    assert short.steps + short.prefills == 5
    assert texts.numbers[:REQUESTS] == list(range(REQUESTS))
    turns = [number // REQUESTS for number in texts.numbers]
    assert turns == sorted(turns)
    assert set(turns) == {0, 1, 2, 3}
    harness.assert_no_leak()
    assert not harness.outputs, "nothing of the loop is left"


def test_what_is_called_at_both_ends_is_called_by_the_loop(harness: EngineHarness) -> None:
    calls: list[tuple[str, str, float]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: calls.append((name, current_thread().name, time.perf_counter()))

    with ClosedLoop(harness, 1, Texts(0.0), NEW) as loop:
        window = loop.window("chain", most=6, begin=note("begin"), end=note("end"))
    (first, thread, begun), (last, other, ended) = calls
    assert (first, last) == ("begin", "end")
    assert thread == other == "event-loop"
    assert begun >= window.begun
    assert ended >= window.begun + window.seconds


def test_a_text_that_is_refused_is_told(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few would run; the loop that saw it ends, and whoever waits is told why."""
    import engine_loop

    monkeypatch.setattr(engine_loop, "POLL_S", 0.05)

    def refused(number: int) -> tuple[list[int], dict[str, Any]]:
        return PROMPTS[0], {"temperature": 0.0, "logit_bias": {"3": float("nan")}}

    with (
        pytest.raises(RuntimeError, match="event loop ended") as told,
        ClosedLoop(harness, 1, refused, NEW),
    ):
        pass
    causes = [str(error) for error in _causes(told.value)]
    assert any("a request was refused" in cause and "logit_bias" in cause for cause in causes)
    assert not harness.alive(), "the next test has an engine of its own"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
