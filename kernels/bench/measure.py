"""Jobs: what is measured one after another, each to a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .cases import AttentionCase
from .ceilings import Ceilings
from .implementations import Implementation
from .inputs import AttentionInputs, draw_inputs
from .oracle import check_output
from .results import Row, commit, versions
from .small_cases import SmallCase
from .timing import Timing, time_launches


@dataclass(frozen=True)
class Job:
    """One row to come."""

    name: str
    op: str
    impl: str
    run: Callable[[Ceilings], Row]
    warm: Callable[[], None]
    """Build and compile what the job needs, without timing anything."""


@functools.lru_cache(maxsize=4)
def _inputs(case: AttentionCase) -> list[AttentionInputs]:
    return draw_inputs(case)


def attention_jobs(
    cases: Iterable[AttentionCase], implementations: Iterable[Implementation]
) -> list[Job]:
    """Implementation by implementation, each over the cases that it takes."""
    cases = list(cases)
    return [
        Job(
            f"{case.op} bs {case.bs} q {case.q} heads {case.heads} context {case.context:,}",
            case.op,
            implementation.name,
            functools.partial(_attention_row, case, implementation),
            functools.partial(_warm_attention, case, implementation),
        )
        for implementation in implementations
        for case in cases
        if implementation.takes(case)
    ]


def small_jobs(cases: Iterable[SmallCase]) -> list[Job]:
    """Our other ops."""
    return [
        Job(
            case.name,
            case.op,
            case.impl,
            functools.partial(_small_row, case),
            lambda case=case: case.launches()[0](),  # type: ignore[misc]
        )
        for case in cases
    ]


def _warm_attention(case: AttentionCase, implementation: Implementation) -> None:
    implementation.prepare(_inputs(case)[0])()
    torch.cuda.synchronize()


def _attention_row(case: AttentionCase, implementation: Implementation, ceilings: Ceilings) -> Row:
    sets = _inputs(case)
    launches = [implementation.prepare(inputs) for inputs in sets]
    sets[0].out.fill_(torch.nan)
    launches[0]()
    if implementation.whole:
        check_output(sets[0])
    timing = time_launches(launches)
    return _row(
        case.op,
        implementation.name,
        (case.bs, case.q, case.heads, case.context),
        case.kv_dtype,
        timing,
        (case.kv_bytes, case.flops, ceilings.floor_us(case)),
        implementation.version,
    )


def _small_row(case: SmallCase, ceilings: Ceilings) -> Row:
    timing = time_launches(case.launches())
    work = (case.moved_bytes, 0, case.moved_bytes / ceilings.bytes_per_us)
    shape = (case.bs, case.q, case.heads, case.context)
    return _row(case.op, case.impl, shape, case.dtype, timing, work, "")


def ceiling_rows(ceilings: Ceilings) -> list[Row]:
    """The two ceilings as rows of their own."""
    copied = (2 << 30, 0, ceilings.copy.median)
    product = (0, 2 * 8192**3, ceilings.product.median)
    return [
        _row("copy", "torch", (1, 1, 1, 1 << 30), "fp32", ceilings.copy, copied, ""),
        _row("matmul", "torch", (1, 1, 1, 8192), "bf16", ceilings.product, product, ""),
    ]


def _row(
    op: str,
    impl: str,
    shape: tuple[int, int, int, int],
    dtype: str,
    timing: Timing,
    work: tuple[int, int, float],
    version: str,
) -> Row:
    moved, flops, floor_us = work
    return Row(
        op,
        impl,
        torch.cuda.get_device_name(),
        *shape,
        dtype,
        timing.median,
        timing.p20,
        timing.p80,
        moved / timing.median / 1e3,
        flops / timing.median / 1e6,
        floor_us,
        _versions(version),
        _commit(),
    )


@functools.cache
def _versions(other: str) -> str:
    return versions([other] if other else [])


_commit = functools.cache(commit)
