"""Our attention over KV in runs of several lengths: what contiguous slots are worth to a step.

python -m overstory.kernels.bench.layouts --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .cases import AttentionCase
from .inputs import draw_inputs
from .ours import ours
from .results import commit
from .timing import time_launches

RUNS = (1, 8, 64, 4096)
"""Rows that lie side by side: scattered; taken step by step; topped up in blocks; contiguous."""

CASES = (
    AttentionCase("verify_attention", 1, 9, 8192),
    AttentionCase("verify_attention", 1, 9, 65536),
    AttentionCase("verify_attention", 4, 33, 8192),
    AttentionCase("verify_attention", 16, 9, 8192),
    AttentionCase("decode_attention", 32, 1, 8192),
)
ROUNDS = 3
BUDGET_S = 0.1


def measure_case(case: AttentionCase, runs: Iterable[int] = RUNS) -> dict[str, Any]:
    """Median microseconds by run length, of rounds taken in turn."""
    samples: dict[int, list[float]] = {run: [] for run in runs}
    for _ in range(ROUNDS):
        for run, times in samples.items():
            launches = [ours(inputs) for inputs in draw_inputs(case, run=run)]
            times.append(time_launches(launches, BUDGET_S).median)
    shape = {"op": case.op, "bs": case.bs, "q": case.q, "context": case.context}
    return {**shape, "us_by_run": {run: statistics.median(t) for run, t in samples.items()}}


def main() -> int:
    """Measure every case, print and write the figures; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench.layouts", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to measure", file=sys.stderr)
        return 2
    rows = []
    for case in CASES:
        rows.append(measure_case(case))
        print(rows[-1], flush=True)
    result = {"gpu": torch.cuda.get_device_name(), "commit": commit(), "cases": rows}
    chosen.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
