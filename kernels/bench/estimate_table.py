"""`python -m overstory.kernels.bench.estimate_table results.csv`: attention on an RTX PRO 6000.

Takes what nvcc makes of the sources for sm_120 and what an H200 measured (a results file of the
benchmark), and prints a Markdown table. Needs nvcc and g++, no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from overstory.kernels import build
from overstory.kernels.cuda_library import KernelLibrary, simulator_library
from overstory.kernels.ptxas_report import read_report

from .cases import GOALS, AttentionCase
from .estimate import (
    H200,
    MAX_TILES,
    RTX_PRO_6000,
    Estimate,
    Gpu,
    Loop,
    blocks_per_sm,
    estimate,
    fit_loops,
    tiles_of,
)
from .results import Row, read_rows

SMS = (188, 170)
"""Of an RTX PRO 6000, and of a GPU of the same kind with fewer."""
_SOURCE = build.SOURCES / "mla_attention.cu"
_KERNEL = re.compile(r"9attentionILi(\d+)ELi\d+ELb0E")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench.estimate_table")
    parser.add_argument("results", type=Path, help="results.csv of a run on an H200")
    rows = read_rows(parser.parse_args(arguments).results)
    shared = _shared_bytes(simulator_library([_SOURCE]))
    there, here = _registers("sm_120"), _registers("sm_90")
    per_sm = {t: blocks_per_sm(RTX_PRO_6000, there[t], shared[t]) for t in there}
    measured = {t: H200.sms * blocks_per_sm(H200, here[t], shared[t]) for t in here}
    print(resource_table(there, shared, per_sm))
    print()
    print(estimate_table(rows, fit_loops(rows, measured), per_sm))


def _registers(arch: str) -> dict[int, int]:
    """Of a thread of the bf16 kernel, by tiles."""
    report = build.build_object(build.cuda_target(arch), _SOURCE) / build.REPORT
    kernels = read_report(report.read_text())
    found = ((_KERNEL.search(kernel.name), kernel.registers) for kernel in kernels)
    return {int(name[1]): registers for name, registers in found if name}


def _shared_bytes(library: KernelLibrary) -> dict[int, int]:
    """Dynamic, of a block, by tiles."""
    return {
        tiles: library.query("attention_shared_bytes", heads=8, max_q=tiles)
        for tiles in range(1, MAX_TILES + 1)
    }


def resource_table(
    registers: dict[int, int], shared: dict[int, int], per_sm: dict[int, int]
) -> str:
    """What sm_120 is given, by tiles."""
    lines = ["| tiles | registers | shared memory, bytes | blocks of a multiprocessor |"]
    lines.append("|---|---|---|---|")
    lines += [f"| {t} | {registers[t]} | {shared[t]:,} | {per_sm[t]} |" for t in sorted(registers)]
    return "\n".join(lines)


def estimate_table(rows: Sequence[Row], loops: dict[int, Loop], per_sm: dict[int, int]) -> str:
    """Shapes with goals, for each number of multiprocessors."""
    gpus = [dataclasses.replace(RTX_PRO_6000, sms=sms) for sms in SMS]
    lines = [
        "| op | bs | q | context | keys once, us | "
        + " | ".join(f"{sms} SMs: share, us, bound" for sms in SMS)
        + " | H200, measured, us |",
        "|---" * (6 + len(SMS)) + "|",
    ]
    for case in GOALS:
        tiles, _ = tiles_of(case.heads, case.q)
        if tiles not in loops:
            continue
        found = [_estimate(case, gpu, loops[tiles], per_sm[tiles]) for gpu in gpus]
        cells = [f"{e.share.min_chunk}, **{e.us:.0f}**, {e.bound}" for e in found]
        lines.append(
            f"| {case.op} | {case.bs} | {case.q} | {case.context:,} | {found[0].memory_us:.1f} | "
            + " | ".join(cells)
            + f" | {_measured(rows, case)} |"
        )
    return "\n".join(lines)


def _estimate(case: AttentionCase, gpu: Gpu, loop: Loop, per_sm: int) -> Estimate:
    return estimate(case, gpu, loop, per_sm, H200)


def _measured(rows: Sequence[Row], case: AttentionCase) -> str:
    key = (case.op, case.bs, case.q, case.heads, case.context, case.kv_dtype, "ours")
    for row in rows:
        if (row.op, row.bs, row.q, row.heads, row.context, row.kv_dtype, row.impl) == key:
            return f"{row.us_median:.1f}"
    return ""


if __name__ == "__main__":
    main()
