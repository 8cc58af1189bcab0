"""What a benchmark measures and how it is summed up. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf
from statistics import median
from typing import Any

from overstory.orchestrator.errors import UserFault
from overstory.workers.tree_policy import AutoPolicy, parse_policy


class BenchError(UserFault):
    """A benchmark that cannot be run as asked."""


_TREES = (15, 31)
"""Sizes of trees that are measured where the budget has room for them."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every mode at every concurrency and temperature, `rounds` times."""

    modes: tuple[str, ...]
    prompts: int
    max_new_tokens: int
    concurrency: tuple[int, ...]
    temperatures: tuple[float, ...]
    rounds: int
    profile: str = "sweep"
    values: tuple[float, ...] = ()
    """Of the profile's variable (`bench_profiles`); empty where it has none."""

    def loads(self) -> tuple[float | None, ...]:
        """Values of the profile's variable; None alone where it has none."""
        return self.values or (None,)

    def cells(self) -> list[tuple[int, float]]:
        """(concurrency, temperature) pairs."""
        return [(c, t) for t in self.temperatures for c in self.concurrency]

    def order(self, round_number: int) -> tuple[str, ...]:
        """Modes in the order of this round: turned by one each time, so none is always first."""
        turn = round_number % len(self.modes)
        return self.modes[turn:] + self.modes[:turn]


def _numbers(name: str, text: str, kind: type, least: float) -> tuple[Any, ...]:
    try:
        values = tuple(kind(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(least <= value < inf for value in values):
        raise BenchError(
            f"--{name}: got {text!r}, wanted {'whole ' if kind is int else ''}numbers of at least "
            f"{least:g}, separated by commas"
        )
    return values


def parse_settings(
    modes: str,
    prompts: int,
    max_new_tokens: int,
    concurrency: str,
    temperature: str,
    rounds: int,
) -> BenchSettings:
    """Settings from the command line's texts. Empty `modes` are left to the deployment
    (`default_modes`).

    Raises:
        BenchError: an option is not what it should be.
    """
    try:
        policies = tuple(str(parse_policy(part)) for part in modes.split(",") if modes)
    except ValueError as error:
        raise BenchError(f"--modes: {error}") from error
    if len(set(policies)) != len(policies):
        raise BenchError(f"--modes: got {modes!r}, wanted each mode once")
    return BenchSettings(
        policies,
        prompts,
        max_new_tokens,
        _numbers("concurrency", concurrency, int, 1),
        _numbers("temperature", temperature, float, 0),
        rounds,
    )


def default_modes(budget: int, automatic: bool, spine_first: bool) -> tuple[str, ...]:
    """What a deployment can be measured under: plain, chain, trees of its kind up to its
    `tree.budget`, and `auto` where it was started with it (`tree.policy: auto`)."""
    if not budget:
        return ("plain",)
    trees = sorted({size for size in _TREES if size < budget} | {budget})
    auto = ("auto",) if automatic else ()
    kind = "spine" if spine_first else "tree"
    return ("plain", "chain", *(f"{kind}-{size}" for size in trees), *auto)


@dataclass(frozen=True)
class Answer:
    """One request: seconds to its first text and new tokens. `left`: its client went before the
    end; its tokens are not counted then."""

    first_s: float
    tokens: int
    left: bool = False


@dataclass(frozen=True)
class Sample:
    """One mode measured once: all prompts, and what rank 0 of the replicas counted meanwhile."""

    mode: str
    concurrency: int
    temperature: float
    seconds: float
    answers: tuple[Answer, ...]
    counters: Mapping[str, Any]
    load: str = ""
    """What the profile's variable was (`bench_profiles.label`)."""

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(answer.tokens for answer in self.answers)


_SUMS = ("forwards", "requests", "rows", "tokens")
_DEPTHS = ("offered_by_depth", "accepted_by_depth")


def counted(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], mode: str
) -> dict[str, Any]:
    """What ranks counted under `mode` between two snapshots (`StepStats.snapshot`), added up.

    An automatic mode's steps are counted under the policies that it chose: all of them, and
    `choices` has the forwards of each.

    Args:
        before, after: one snapshot for each rank looked at, in the same order.
    """
    total: dict[str, Any] = dict.fromkeys(_SUMS, 0) | {name: [] for name in _DEPTHS}
    choices: dict[str, int] = {}
    for earlier, later in zip(before, after, strict=True):
        chosen = later["verify"] if isinstance(parse_policy(mode), AutoPolicy) else (mode,)
        for policy in chosen:
            old = earlier["verify"].get(policy, {})
            new = later["verify"].get(policy, {})
            for name in _SUMS:
                total[name] += new.get(name, 0) - old.get(name, 0)
            for name in _DEPTHS:
                total[name] = _add(total[name], new.get(name, []), 1)
                total[name] = _add(total[name], old.get(name, []), -1)
            forwards = new.get("forwards", 0) - old.get("forwards", 0)
            choices[policy] = choices.get(policy, 0) + forwards
    return total | {"choices": {policy: count for policy, count in choices.items() if count}}


def _add(left: Sequence[int], right: Sequence[int], sign: int) -> list[int]:
    width = max(len(left), len(right))
    padded = [[*side, *[0] * (width - len(side))] for side in (left, right)]
    return [a + sign * b for a, b in zip(*padded, strict=True)]


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole else None


def summarise(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row for each mode, concurrency and temperature, in order of first appearance.

    `tokens_per_s` is the median over the rounds (all in `tokens_per_s_rounds`); `speedup` is over
    `plain` of the same cell; `tokens_per_forward` is tokens per request and target forward;
    `ms_per_step` is wall time per target forward, prefill, HTTP and (at a rate) waiting included;
    `accepted_by_depth` is the share of drafts whose accepted path reached depth 1, 2, ...;
    `ttft_ms` is the median time to a request's first text, `ttft_p95_ms` that within which 19 of 20
    had it; `left` counts clients that went early (their tokens are in no rate); `choices` counts
    forwards by the policy they ran under.
    """
    cells: dict[tuple[str, int, float, str], list[Sample]] = {}
    for sample in samples:
        key = (sample.mode, sample.concurrency, sample.temperature, sample.load)
        cells.setdefault(key, []).append(sample)
    rows = [_row(group) for group in cells.values()]
    plain = {
        (row["concurrency"], row["temperature"], row["load"]): row["tokens_per_s"]
        for row in rows
        if row["mode"] == "plain"
    }
    for row in rows:
        base = plain.get((row["concurrency"], row["temperature"], row["load"]))
        row["speedup"] = _ratio(row["tokens_per_s"], base, 2) if base else None
    return rows


def _row(group: Sequence[Sample]) -> dict[str, Any]:
    rates = [round(sample.tokens / sample.seconds, 2) for sample in group]
    forwards = sum(sample.counters["forwards"] for sample in group)
    requests = sum(sample.counters["requests"] for sample in group)
    accepted: list[int] = []
    for sample in group:
        accepted = _add(accepted, sample.counters["accepted_by_depth"], 1)
    first = [answer.first_s for sample in group for answer in sample.answers]
    return {
        "mode": group[0].mode,
        "concurrency": group[0].concurrency,
        "temperature": group[0].temperature,
        "load": group[0].load,
        "tokens_per_s": round(median(rates), 2),
        "tokens_per_forward": _ratio(sum(s.counters["tokens"] for s in group), requests, 3),
        "ms_per_step": _ratio(1000 * sum(sample.seconds for sample in group), forwards, 2),
        "accepted_by_depth": [_ratio(count, requests, 4) for count in accepted],
        "ttft_ms": round(1000 * median(first), 1),
        "ttft_p95_ms": round(1000 * sorted(first)[ceil(0.95 * len(first)) - 1], 1),
        "left": sum(answer.left for sample in group for answer in sample.answers),
        "tokens_per_s_rounds": rates,
        "requests": sum(len(sample.answers) for sample in group),
        "tokens": sum(sample.tokens for sample in group),
        "forwards": forwards,
        "choices": _choices(group),
    }


def _choices(group: Sequence[Sample]) -> dict[str, int]:
    """Forwards by the policy that they ran under."""
    total: dict[str, int] = {}
    for sample in group:
        for policy, count in sample.counters.get("choices", {}).items():
            total[policy] = total.get(policy, 0) + count
    return total


def render_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table."""
    head = ("mode", "conc", "temp", "tokens/s", "x plain", "tok/fwd", "ms/step", "TTFT ms")
    loaded = any(row.get("load") for row in rows)
    table = [(*head, "load") if loaded else head]
    for row in rows:
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
        table.append(
            (
                row["mode"],
                str(row["concurrency"]),
                f"{row['temperature']:g}",
                f"{row['tokens_per_s']:.1f}",
                speedup,
                _number(row["tokens_per_forward"], 2),
                _number(row["ms_per_step"], 1),
                f"{row['ttft_ms']:.0f}",
                *((row["load"],) if loaded else ()),
            )
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = []
    for line, depths in zip(table, ["accepted by depth", *map(_depths, rows)], strict=True):
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([*cells, depths]))
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _depths(row: Mapping[str, Any]) -> str:
    return " ".join(_number(share, 2) for share in row["accepted_by_depth"])
