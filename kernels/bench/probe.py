"""A few launches of one op at one shape and nothing else, for a profiler.

ncu --clock-control none -k regex:attention -s 4 -c 1 python -m overstory.kernels.bench.probe
ncu -k regex:sample -s 4 -c 1 python -m overstory.kernels.bench.probe --small "sample.*greedy"
"""

from __future__ import annotations

import argparse
import re

import torch

from .cases import AttentionCase
from .inputs import draw_inputs
from .ours import ours
from .small_cases import small_cases
from .timing import Launch


def main() -> None:
    """Launch each rotating set twice."""
    parser = argparse.ArgumentParser(prog="overstory.kernels.bench.probe", description=__doc__)
    parser.add_argument("--op", default="verify_attention")
    for name, default in {"bs": 1, "q": 9, "context": 65_536, "heads": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--small", help="the first other op whose name matches, not attention")
    chosen = parser.parse_args()
    launches = _launches(chosen)
    for launch in [*launches, *launches]:
        launch()
    torch.cuda.synchronize()


def _launches(chosen: argparse.Namespace) -> list[Launch]:
    if chosen.small is not None:
        cases = [case for case in small_cases() if re.search(chosen.small, case.name)]
        if not cases:
            raise ValueError(f"--small {chosen.small!r} matches no name of a small case")
        return cases[0].launches()
    case = AttentionCase(chosen.op, chosen.bs, chosen.q, chosen.context, chosen.heads)
    return [ours(inputs) for inputs in draw_inputs(case)]


if __name__ == "__main__":
    main()
