"""Load profiles of `overstory bench`: which requests a cell consists of, and when they come. Pure.

A profile has one variable; `sweep` alone has none beyond concurrency and temperature. Requests of
`long` and `shared` begin with something new each time, so that no earlier cell has filled the
prefix cache for them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overstory.orchestrator.bench_rows import BenchError

SHARED_TOKENS = 512
"""Length of the beginning that a group of `shared` has in common."""
LEFT_EVENTS = 3
"""A client of `churn` leaves after so many pieces of its answer."""


@dataclass(frozen=True)
class Profile:
    """A kind of load: what its variable is, in which unit, and the values taken if none are given.

    `open` loads send at set times, whatever is still under way.
    """

    name: str
    help: str
    unit: str = ""
    values: tuple[float, ...] = ()
    least: float = 0.0
    most: float = float("inf")
    open: bool = False


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("sweep", "held-out prompts, so many at a time (--concurrency)"),
        Profile(
            "rates",
            "requests come at a rate, at random",
            "requests/s",
            (0.5, 1, 2),
            0.01,
            open=True,
        ),
        Profile("long", "prompts of a length, none in the cache", "tokens", (256, 1024, 2048), 1),
        Profile(
            "shared",
            f"so many prompts in a row begin with the same {SHARED_TOKENS} tokens",
            "prompts",
            (1, 4, 16),
            1,
        ),
        Profile("churn", "this share of clients leaves early", "of clients", (0.0, 0.5), 0.0, 1.0),
    )
}


@dataclass(frozen=True)
class Asked:
    """One request: its prompt, when it is sent (seconds from the cell's begin, for open loads), and
    after how many pieces its client leaves (None: it stays)."""

    prompt: Any
    at_s: float = 0.0
    leaves_after: int | None = None


def profile_of(name: str, values: str) -> tuple[Profile, tuple[float, ...]]:
    """A profile by its name, and the values of its variable.

    Raises:
        BenchError: there is no such profile, or it does not take these values.
    """
    profile = PROFILES.get(name)
    if profile is None:
        raise BenchError(f"--profile: got {name!r}, wanted one of {', '.join(PROFILES)}")
    if not values:
        return profile, profile.values
    if not profile.values:
        raise BenchError(f"--values: {name} has no variable; use --concurrency")
    try:
        found = tuple(float(part) for part in values.split(","))
    except ValueError:
        found = ()
    if not found or not all(profile.least <= value <= profile.most for value in found):
        bounds = f"at least {profile.least:g}"
        bounds += f" and at most {profile.most:g}" if profile.most < float("inf") else ""
        raise BenchError(
            f"--values: got {values!r}, wanted numbers of {bounds} ({profile.unit}), separated by "
            "commas"
        )
    return profile, found


def label(profile: Profile, value: float | None) -> str:
    """How a row names the load of its cell; empty for `sweep`."""
    return "" if value is None else f"{value:g} {profile.unit}"


def requests(
    profile: Profile, value: float | None, prompts: Sequence[Any], cell: str
) -> list[Asked]:
    """The requests of one cell.

    Args:
        profile: which.
        value: of its variable.
        prompts: all texts, or all lists of token ids.
        cell: unique to the cell, round and mode: each is to meet a cache without its beginnings.
    """
    draw = random.Random(f"{profile.name} {value}")
    match profile.name:
        case "sweep":
            return [Asked(prompt) for prompt in prompts]
        case "rates":
            assert value is not None
            at_s, asked = 0.0, []
            for prompt in prompts:
                asked.append(Asked(prompt, at_s))
                at_s += draw.expovariate(value)
            return asked
        case "long":
            assert value is not None
            return [
                Asked(_begun(f"{cell} {number}", prompts, number, int(value)))
                for number in range(len(prompts))
            ]
        case "shared":
            assert value is not None
            return [
                Asked(_begun(f"{cell} {number // int(value)}", prompts, 0, SHARED_TOKENS) + prompt)
                for number, prompt in enumerate(prompts)
            ]
        case "churn":
            assert value is not None
            leaving = set(draw.sample(range(len(prompts)), round(value * len(prompts))))
            return [
                Asked(prompt, 0.0, LEFT_EVENTS if number in leaving else None)
                for number, prompt in enumerate(prompts)
            ]
    raise AssertionError(profile.name)


def _begun(unique: str, prompts: Sequence[Any], first: int, length: int) -> Any:
    """Token ids (for texts: about as many tokens) of prompts one after another, the beginning
    unlike any other's."""
    draw = random.Random(unique)
    if isinstance(prompts[0], str):
        text, at = f"# {draw.getrandbits(64):x}\n", first
        while len(text) < length * _CHARS_PER_TOKEN:
            text += prompts[at % len(prompts)]
            at += 1
        return text[: int(length * _CHARS_PER_TOKEN)]
    ids: list[int] = [draw.choice(prompts[0]) for _ in range(min(8, length))]
    at = first
    while len(ids) < length:
        ids += prompts[at % len(prompts)]
        at += 1
    return ids[:length]


_CHARS_PER_TOKEN = 3.0
"""Of code, roughly."""
