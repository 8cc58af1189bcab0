"""Where the host's time of a step goes on a GPU: role `host` of `engine_runs.py`.

Milliseconds of a step by policy, and what Python's profiler says of the loop's thread: its own time
makes short functions look longer than they are, calls into CUDA count in full.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

POLICIES = ("plain", "tree-15", "tree-63", "auto")
SHAPES = ((1, 0.0, 640), (1, 1.0, 256), (8, 0.0, 256), (32, 0.0, 128))
"""Requests, temperature, tokens of a text."""
ROUNDS = 8
LINES = 70

Under = Callable[[str | None], AbstractContextManager[None]]
Prompts = Callable[[int], list[list[int]]]


def steps_ms(engine: Any, prompts: Prompts, under: Under, until: float) -> list[dict[str, Any]]:
    """Milliseconds of a step: the median and the least of texts in turn, of each shape."""
    from engine_cuda import timed

    found = []
    for requests, temperature, new in SHAPES:
        texts: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for number in range(ROUNDS):
            for policy in POLICIES if number % 2 else POLICIES[::-1]:
                params = _params(temperature, new, number)
                with under(policy):
                    rate = timed(engine, prompts(requests), params).as_dict()
                texts[policy].append(rate["ms_per_forward"])
            if time.time() > until:
                break
        ms = {name: [statistics.median(some), min(some)] for name, some in texts.items()}
        found.append({"requests": requests, "T": temperature, "ms": ms})
        print(found[-1], flush=True)
    return found


def profiles(engine: Any, prompts: Prompts, under: Under, until: float) -> dict[str, list[str]]:
    """Lines of a table for each case: microseconds of a step in the function itself, with what it
    calls, calls of a step."""
    found = {}
    for policy, requests, temperature, new in (
        ("tree-63", 1, 0.0, 640),
        ("auto", 1, 1.0, 256),
        ("tree-63", 32, 0.0, 128),
    ):
        if time.time() > until:
            break
        name = f"{policy}, {requests} requests, T {temperature}"
        with under(policy):
            found[name] = _profile(engine, prompts(requests), _params(temperature, new, 0))
        print(name, *found[name], sep="\n", flush=True)
    return found


def _params(temperature: float, new: int, number: int) -> dict[str, Any]:
    more = {"sampling_seed": 10 + number} if temperature else {}
    return {"temperature": temperature, "max_new_tokens": new, "ignore_eos": True} | more


def _profile(engine: Any, prompts: list[list[int]], params: dict[str, Any]) -> list[str]:
    profile = cProfile.Profile()
    rids = [engine.submit(prompt, params) for prompt in prompts]
    engine.step(4)
    engine.at_boundary(lambda _: profile.enable())
    begun = engine.scheduler.forward_ct
    engine.free_run(rids)
    steps = max(1, engine.scheduler.forward_ct - begun)
    engine.at_boundary(lambda _: profile.disable())
    engine.step(3)
    every: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    longest = sorted(every.items(), key=lambda one: one[1][2], reverse=True)[:LINES]
    lines = [f"{steps} steps; us of a step, with calls, calls, function"]
    for (file, line, function), (_, calls, own, total, _) in longest:
        place = "/".join(file.split("/")[-3:])
        lines.append(
            f"{own / steps * 1e6:8.2f} {total / steps * 1e6:9.2f} {calls / steps:7.2f} "
            f"{place}:{line}({function})"
        )
    return lines
