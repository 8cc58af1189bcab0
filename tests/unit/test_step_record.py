"""What a step counts: the tokens that its requests were given, and nothing beyond their ends."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overstory.workers.ddtree.step_record import PENDING, PendingSteps, StepRecord, count_step
from overstory.workers.step_stats import STATS, StepStats

LIMIT = 100


class _Request:
    """As SGLang's `Req`: tokens beyond the end stay in `output_ids`, `finished_len` cuts them."""

    def __init__(self, given: int, is_retracted: bool = False) -> None:
        self.output_ids = [5] * given
        self.finished_len: int | None = None
        self.is_retracted = is_retracted
        self.sampling_params = SimpleNamespace(max_new_tokens=LIMIT)

    def finished(self) -> bool:
        return self.finished_len is not None


def _step(requests: list[_Request], depth: int = 7) -> Any:
    depths = torch.arange(depth + 1).repeat(len(requests), 1)
    tree = SimpleNamespace(tokens=torch.zeros_like(depths), depths=depths)
    return StepRecord("chain", tree, tuple(requests), {"verify": 3})


def _append(request: _Request, tokens: int, end: int | None = None) -> None:
    request.output_ids += [5] * tokens
    request.finished_len = end


def _counted(stats: StepStats) -> dict[str, Any]:
    return stats.snapshot()["verify"]["chain"]


def test_a_running_request_counts_its_path_and_the_bonus() -> None:
    stats, request = StepStats(), _Request(10)
    pending = PendingSteps(stats)
    pending.add(_step([request]))
    pending.read([2])
    _append(request, 3)
    pending.count()
    assert _counted(stats)["tokens"] == 3
    assert _counted(stats)["offered_by_depth"] == [1] * 7
    assert _counted(stats)["accepted_by_depth"] == [1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("end", [11, 13, 15])
def test_what_lies_beyond_a_stop_token_or_a_limit_is_not_counted(end: int) -> None:
    stats, ending, running = StepStats(), _Request(10), _Request(20)
    pending = PendingSteps(stats)
    pending.add(_step([ending, running]))
    pending.read([5, 0])
    _append(ending, 6, end)
    _append(running, 1)
    pending.count()
    counted = _counted(stats)
    handed_out = end - 10
    assert (counted["requests"], counted["tokens"]) == (2, handed_out + 1)
    assert counted["accepted_by_depth"] == [1] * handed_out + [0] * (7 - handed_out)
    assert counted["offered_by_depth"] == [2] * handed_out + [1] * (7 - handed_out)


def test_a_stop_token_as_the_bonus_leaves_the_path_whole() -> None:
    stats, request = StepStats(), _Request(10)
    pending = PendingSteps(stats)
    pending.add(_step([request]))
    pending.read([2])
    _append(request, 3, 13)
    pending.count()
    assert _counted(stats)["tokens"] == 3
    assert _counted(stats)["offered_by_depth"] == [1] * 7


def test_requests_that_had_ended_before_do_not_count() -> None:
    stats, ended, retracted = StepStats(), _Request(10), _Request(10, is_retracted=True)
    ended.finished_len = 8
    pending = PendingSteps(stats)
    pending.add(_step([ended, retracted]))
    pending.read([7, 7])
    pending.count()
    counted = _counted(stats)
    assert (counted["forwards"], counted["requests"], counted["tokens"]) == (1, 0, 0)
    assert sum(counted["offered_by_depth"]) == 0


def test_steps_are_counted_once_each_in_their_order() -> None:
    stats, request = StepStats(), _Request(1)
    pending = PendingSteps(stats)
    pending.add(_step([request]))
    pending.add(_step([request], depth=3))  # overlap: launched before the first is read
    pending.count()  # the output of a prefill
    assert stats.snapshot()["verify"] == {}
    for accepted in (4, 3):
        pending.read([accepted])
        _append(request, accepted + 1)
        pending.count()
        pending.count()
    assert (_counted(stats)["forwards"], _counted(stats)["tokens"]) == (2, 9)
    assert _counted(stats)["offered_by_depth"] == [2, 2, 2, 1, 1, 1, 1]


def test_a_new_worker_starts_without_the_steps_of_the_one_before() -> None:
    stats, request = StepStats(), _Request(1)
    pending = PendingSteps(stats)
    pending.add(_step([request]))
    pending.read([0])
    pending.add(_step([request, request]))
    pending.start()
    pending.count()
    assert stats.snapshot()["verify"] == {}
    pending.add(_step([request]))
    pending.read([1])


def test_sending_output_counts_the_step_of_this_process() -> None:
    request = _Request(1)
    before = STATS.snapshot()["verify"].get("chain", {"tokens": 0})["tokens"]
    PENDING.add(_step([request]))
    PENDING.read([0])
    _append(request, 1)
    assert count_step(object(), [request], return_logprob=False) is None
    assert _counted(STATS)["tokens"] == before + 1


def test_idle_time_lies_between_steps_with_nothing_else_between() -> None:
    """By hand: four steps, a prefill before the third; the fourth was not timed."""
    stats = StepStats()
    pending = PendingSteps(stats)

    def step(*times: int) -> None:
        request = _Request(10)
        record = _step([request])
        known = torch.tensor(times) if times else None
        pending.add(record._replace(times=known))

    def counted() -> tuple[int, int, int]:
        pending.read([0])
        pending.count()
        row = stats.snapshot()["verify"]["chain"]
        return row["device_ns"], row["idle_ns"], row["idle_gaps"]

    step(100, 130)
    step(137, 150)  # overlap: launched before the first is read
    assert counted() == (30, 0, 0)
    pending.interrupted()
    step(900, 950)
    assert counted() == (43, 7, 1)
    assert counted() == (93, 7, 1)
    step()
    step(1000, 1001)
    assert counted() == (93, 7, 1)
    assert counted() == (94, 7, 1)


def test_a_batch_of_whole_paths_is_counted_as_request_by_request() -> None:
    """Whatever ends, is retracted or is cut short."""
    from overstory.workers.ddtree.step_record import _paths, _ReadStep, _whole_paths

    draw, whole = random.Random(3), 0
    for _ in range(500):
        requests = [_Request(draw.randrange(50)) for _ in range(draw.randrange(1, 9))]
        deepest = [draw.randrange(8) for _ in requests]
        accepted = [draw.randrange(depth + 1) for depth in deepest]
        lengths: list[int | None] = [len(request.output_ids) for request in requests]
        for i, request in enumerate(requests):
            _append(request, accepted[i] + 1)
            kind = draw.random()
            if kind < 0.03:
                request.finished_len = len(request.output_ids) - draw.randrange(accepted[i] + 1)
            elif kind < 0.06:
                lengths[i] = None
            elif kind < 0.09:  # a grammar came to its end
                del request.output_ids[-1 - draw.randrange(accepted[i] + 1) :]
        record = StepRecord("chain", SimpleNamespace(), tuple(requests))  # type: ignore[arg-type]
        step = _ReadStep(record, accepted, lengths, True)
        found = _whole_paths(step, deepest)
        whole += found is not None
        assert found is None or found == _paths(step, deepest)
    assert 150 < whole < 450
