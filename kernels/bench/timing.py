"""Time of one launch inside a replayed CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Launch = Callable[[], object]

_LAUNCHES = 16
"""At least this many in a graph, so that what a replay itself costs is spread thin."""
_REPLAYS = (5, 50)
"""Fewest and most timed replays."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch, over the timed replays."""

    median: float
    p20: float
    p80: float


def time_launches(launches: Sequence[Launch], budget_s: float = 0.25) -> Timing:
    """Capture the launches one after another, replay, and divide by their number.

    Each launch works on inputs of its own, so that by the time its turn comes again the others
    have passed through the cache. What a launch needs at first use (builds, attributes) happens
    in a round before the capture.

    Args:
        launches: rotating sets; repeated in this order to at least 16 in the graph.
        budget_s: time for the replays; at least five are timed however long they take.
    """
    rounds = max(1, -(-_LAUNCHES // len(launches)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    # A slow kernel needs no amortisation, and sixteen of it would eat the budget.
    if (time.perf_counter() - begun) / len(launches) > 2e-3:
        rounds = 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    torch.cuda.synchronize()
    samples = _replays(graph, budget_s)
    per_launch = torch.tensor(samples, dtype=torch.float64) * 1e3 / (rounds * len(launches))
    p20, median, p80 = torch.quantile(per_launch, torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return Timing(median, p20, p80)


def _replays(graph: torch.cuda.CUDAGraph, budget_s: float) -> list[float]:
    """Milliseconds of each replay."""
    samples: list[float] = []
    end_at = time.perf_counter() + budget_s
    while len(samples) < _REPLAYS[0] or (
        len(samples) < _REPLAYS[1] and time.perf_counter() < end_at
    ):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return samples
