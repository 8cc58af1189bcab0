"""`python -m overstory.kernels.bench`: see `--help` and docs/kernels.md."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from .baselines import flashinfer_mla, foreign_sglang
from .cases import GOALS, OVER_FP8, every_case
from .ceilings import Ceilings, measure_ceilings
from .goals import goal_table
from .implementations import NAIVE, OURS, Implementation, from_flashinfer, from_sglang
from .measure import Job, attention_jobs, ceiling_rows, small_jobs
from .plot import write_plot
from .results import ResultFile
from .small_cases import small_cases
from .split_sweep import split_cases
from .sweep import sweep_jobs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write results.csv, plot.svg and goals.md; 1 if a job failed."""
    chosen = _parse(arguments)
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure", file=sys.stderr)
        return 2
    jobs = [job for job in _jobs(chosen) if re.search(chosen.only, f"{job.op} {job.impl}")]
    end_at = time.monotonic() + chosen.budget_s
    if chosen.warm:
        return _warm(jobs, end_at)
    results = ResultFile(chosen.out / "results.csv", keep=chosen.add)
    ceilings = measure_ceilings()
    if not results.rows:
        for row in ceiling_rows(ceilings):
            results.add(row)
    failed = _measure(jobs, ceilings, results, end_at)
    write_plot(results.rows, chosen.out / "plot.svg")
    table = goal_table(results.rows)
    (chosen.out / "goals.md").write_text(table + "\n")
    print(table)
    return 1 if failed else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench", description=main.__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-kernels"), help="folder of the results")
    add("--add", action="store_true", help="keep the rows that are there already")
    add("--quick", action="store_true", help="only the shapes that have goals; a small sweep")
    add("--sweep", action="store_true", help="our tunables over the goal shapes, nothing else")
    add("--budget-s", type=float, default=3600.0, help="begin no row after this many seconds")
    add("--only", default="", help="regular expression over 'op impl'")
    add("--warm", action="store_true", help="build and compile everything, time nothing")
    add(
        "--sglang",
        type=Path,
        action="append",
        help="an sglang folder (site-packages/sglang, python/sglang of a checkout); repeatable; "
        "default: the installed one",
    )
    add("--flashinfer", action="store_true", help="FlashInfer's MLA chain, which must be installed")
    parsed = parser.parse_args(arguments)
    if parsed.flashinfer and not flashinfer_mla.installed():
        parser.error("--flashinfer: flashinfer cannot be imported; install it or leave this out")
    if parsed.sglang is None:
        parsed.sglang = foreign_sglang.installed()
    return parsed


def _jobs(chosen: argparse.Namespace) -> list[Job]:
    """Most telling first: a budget cuts from the end."""
    if chosen.sweep:
        return [*sweep_jobs(GOALS, chosen.quick), *small_jobs(split_cases())]
    cases = (*GOALS, *OVER_FP8) if chosen.quick else every_case()
    others: list[Implementation] = [NAIVE, *from_sglang(chosen.sglang, chosen.quick)]
    if chosen.flashinfer:
        others += from_flashinfer()
    return [
        *attention_jobs(cases, [OURS]),
        *small_jobs(small_cases()),
        *attention_jobs(cases, others),
    ]


def _warm(jobs: list[Job], end_at: float) -> int:
    for job in jobs:
        if time.monotonic() > end_at:
            break
        begun = time.monotonic()
        try:
            job.warm()
        except Exception as error:
            print(f"{job.impl} {job.name}: {_brief(error)}", flush=True)
        else:
            print(f"{job.impl} {job.name}: {time.monotonic() - begun:.1f} s", flush=True)
    return 0


def _measure(jobs: list[Job], ceilings: Ceilings, results: ResultFile, end_at: float) -> bool:
    failed = False
    for index, job in enumerate(jobs):
        if time.monotonic() > end_at:
            print(f"out of time: {len(jobs) - index} of {len(jobs)} rows left out", flush=True)
            break
        try:
            row = job.run(ceilings)
        except Exception as error:
            failed = True
            print(f"FAILED {job.impl} {job.name}: {_brief(error)}", flush=True)
            if not _device_lives():
                print("the device is lost to this process; stopping", flush=True)
                break
        else:
            results.add(row)
            print(
                f"{row.us_median:10.1f} us (floor {row.floor_us:7.1f})  {job.impl}  {job.name}",
                flush=True,
            )
    return failed


def _brief(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _device_lives() -> bool:
    """A kernel that faults takes the process' CUDA context with it."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
