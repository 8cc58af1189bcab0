"""Other ways of the attention kernel's loop beside the one in use, in one process, in turn.

python -m overstory.kernels.bench.variants --out FOLDER --budget-s 140

Every variant is a build of the same sources with macros of cuda/mla_tuning.cuh set. At each shape
all are first compared with attention in float64, then timed in turn, round by round; one that is
wrong is not timed. A shape's rows are written as soon as it is done: what a time limit leaves is
whole.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from overstory.kernels.build import SOURCES, cuda_target
from overstory.kernels.cuda_library import KernelLibrary, arch_of
from overstory.kernels.ops.choice import using

from .cases import GOALS, AttentionCase
from .inputs import AttentionInputs, draw_inputs
from .oracle import MOST_ERROR, relative_error
from .ours import ours
from .results import commit
from .timing import Launch, time_launches

LEAN, WHOLE = "OVERSTORY_MLA_LEAN", "OVERSTORY_MLA_WHOLE_VALUES"
IN_USE = "in use"
VARIANTS: Mapping[str, tuple[str, ...]] = {
    IN_USE: (),
    "lean": (LEAN,),
    "whole values": (WHOLE,),
    "lean, whole values": (LEAN, WHOLE),
}
"""By name, the macros of a build."""
ROUNDS = 3
BUDGET_S = 0.08
"""Of one timing; a round times every variant once."""
COLUMNS = (
    "op",
    "variant",
    "gpu",
    "bs",
    "q",
    "context",
    "us_median",
    "us_of_rounds",
    "error",
    "commit",
)


@dataclass(frozen=True)
class Measured:
    """A variant at a shape."""

    us: list[float]
    """Median of each round; none where the result is wrong."""
    error: float
    """Relative, against float64."""

    @property
    def median(self) -> float:
        """NaN where the result is wrong."""
        return statistics.median(self.us) if self.us else float("nan")


def build_variants(arch: str, names: Iterable[str]) -> dict[str, KernelLibrary]:
    """Libraries of the attention sources alone, built side by side or from the cache."""
    sources, wanted = sorted(SOURCES.glob("mla_attention*.cu")), list(names)
    with ThreadPoolExecutor(len(wanted)) as pool:
        built = pool.map(lambda n: KernelLibrary(cuda_target(arch, VARIANTS[n]), sources), wanted)
        return dict(zip(wanted, built, strict=True))


def measure(
    case: AttentionCase,
    libraries: Mapping[str, KernelLibrary],
    draw: Callable[[AttentionCase], list[AttentionInputs]] = draw_inputs,
    rounds: int = ROUNDS,
) -> dict[str, Measured]:
    """Every variant's error and times, rounds taken in turn; all over the same inputs."""
    sets = draw(case)
    errors = {name: _error(library, sets[0]) for name, library in libraries.items()}
    times: dict[str, list[float]] = {name: [] for name in libraries}
    for _ in range(rounds):
        for name, library in libraries.items():
            if not errors[name] < MOST_ERROR:
                continue
            with using(library):
                launches: list[Launch] = [ours(inputs) for inputs in sets]
                times[name].append(time_launches(launches, BUDGET_S).median)
    return {name: Measured(times[name], errors[name]) for name in libraries}


def _error(library: KernelLibrary, inputs: AttentionInputs) -> float:
    inputs.out.fill_(torch.nan)
    with using(library):
        ours(inputs)()
    return relative_error(inputs, torch.float64)


def write_rows(
    file: TextIO, case: AttentionCase, measured: Mapping[str, Measured], gpu: str
) -> None:
    """A row for each variant at a shape, on the disk when this returns."""
    writer = csv.writer(file)
    for name, got in measured.items():
        rounds = " ".join(f"{us:.2f}" for us in got.us)
        figures = (f"{got.median:.2f}", rounds, f"{got.error:.4e}")
        writer.writerow((case.op, name, gpu, case.bs, case.q, case.context, *figures, commit()))
    file.flush()


def main() -> int:
    """Measure all shapes with goals; 2 without a GPU, 1 if one was wrong or a shape left out."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench.variants", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of variants.csv")
    parser.add_argument("--budget-s", type=float, default=140.0, help="begin no shape after these")
    parser.add_argument(
        "--only", nargs="*", choices=[*VARIANTS], help="these beside the one in use"
    )
    chosen = parser.parse_args()
    end_at = time.monotonic() + chosen.budget_s
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure", file=sys.stderr)
        return 2
    others = VARIANTS if chosen.only is None else chosen.only
    libraries = build_variants(arch_of(), dict.fromkeys((IN_USE, *others)))
    chosen.out.mkdir(parents=True, exist_ok=True)
    with (chosen.out / "variants.csv").open("w", newline="") as file:
        csv.writer(file).writerow(COLUMNS)
        return _measure_all(file, libraries, end_at)


def _measure_all(file: TextIO, libraries: dict[str, KernelLibrary], end_at: float) -> int:
    gpu, left_out, wrong = torch.cuda.get_device_name(), 0, False
    for case in GOALS:
        if time.monotonic() > end_at:
            left_out += 1
            continue
        measured = measure(case, libraries)
        write_rows(file, case, measured, gpu)
        shape = f"{case.op} bs {case.bs} q {case.q} context {case.context:,}"
        figures = (f"{name} {got.median:.2f} us {got.error:.3e}" for name, got in measured.items())
        print(f"{shape}: {'; '.join(figures)}", flush=True)
        wrong |= any(not got.us for got in measured.values())
    if left_out:
        print(f"out of time: {left_out} of {len(GOALS)} shapes left out", flush=True)
    return 1 if left_out or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
